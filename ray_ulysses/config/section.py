"""The base class of all configuration sections, and the types and errors that sections share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from ray_ulysses.storage.location import LocationError, absolute_location, parse_location


@dataclass(frozen=True, kw_only=True, slots=True)
class OnResume:
    """Rule for changing a setting when a run is resumed."""

    rule: Literal["fixed", "by branch", "may change"]
    note: str = ""
    """Reason for the rule, or a remark."""


def fixed(reason: str) -> OnResume:
    """Mark a setting that must not change during a run."""
    return OnResume(rule="fixed", note=reason)


def by_branch(reason: str) -> OnResume:
    """Mark a setting that may change only in a branch of the run (``train --branch``)."""
    return OnResume(rule="by branch", note=reason)


def free(note: str = "") -> OnResume:
    """Mark a setting that may change on every resume."""
    return OnResume(rule="may change", note=note)


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys and never converts types.

    Strict types expose mistakes: ``workers: "4"`` and ``seed: yes`` are refused instead of converted.
    The docstring below a field is its documentation, from which ``docs/configuration.md`` is generated.
    """

    on_resume: ClassVar[OnResume]
    """Resume rule for all settings of the section that have no individual rule."""
    short_form: ClassVar[str] = ""
    """Type of a short form that is accepted instead of a mapping, as shown in ``docs/configuration.md``."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        serialize_by_alias=True,
    )


def refusal(rule: str, hint: str, shown: str | None = None) -> PydanticCustomError:
    """Return an error for a field validator to raise.

    ``shown`` replaces the value in the error message if the value may contain a secret.
    """
    shown_instead = {} if shown is None else {"shown": shown}
    return PydanticCustomError("refused", "{rule}", {"rule": rule, "hint": hint, **shown_instead})


def base_of(info: ValidationInfo) -> Path | None:
    """Return the directory that relative paths are resolved against, or None if they stay relative."""
    return info.context["base"] if info.context else None


def _has_known_home(value: str) -> str:
    if os.path.expanduser(value).startswith("~"):
        raise refusal("refers to the home directory of a user that does not exist here", "write an absolute path")
    return value


def _absolute(value: str, info: ValidationInfo) -> str:
    base = base_of(info)
    return value if base is None else absolute_location(value, base)


def _is_location(value: str) -> str:
    try:
        parse_location(value)
    except LocationError as error:
        raise refusal(error.rule, error.hint, error.shown) from error
    return value


def _is_path(value: str) -> str:
    location = parse_location(_is_location(value))
    if not isinstance(location, Path):
        raise refusal("is not a local directory", "use a path, such as /mnt/nvme/swap")
    # Code that opens a local path does not accept URIs.
    return str(location) if value.startswith("file:") else value


NamedPlace = Annotated[str, Field(min_length=1), AfterValidator(_has_known_home)]
"""A path or another location, which may start with a home directory (``~``)."""
PlacePath = Annotated[NamedPlace, AfterValidator(_absolute)]
"""A path or URI that ``Config.with_absolute_paths`` makes absolute."""
StoragePlace = Annotated[PlacePath, AfterValidator(_is_location)]
"""A path, or the URI of a folder in an object store."""
LocalPath = Annotated[PlacePath, AfterValidator(_is_path)]
"""A path on a local disk of each node."""
