"""The base of every section of the configuration, and the types and errors that sections share."""

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
    """Marks whether a run may be resumed with another value of a setting."""

    rule: Literal["fixed", "by branch", "may change"]
    note: str = ""
    """The reason, or a remark."""


def fixed(reason: str) -> OnResume:
    """Mark a setting that stays the same for the life of a run."""
    return OnResume(rule="fixed", note=reason)


def by_branch(reason: str) -> OnResume:
    """Mark a setting of the data plan, which stays the same unless ``train --branch`` requests a branch of the plan."""
    return OnResume(rule="by branch", note=reason)


def free(note: str = "") -> OnResume:
    """Mark a setting that may change."""
    return OnResume(rule="may change", note=note)


class Section(BaseModel):
    """A frozen group of settings that accepts no unknown keys and converts no types.

    Strict types expose slips: ``workers: "4"`` and ``seed: yes`` are refused, not converted.
    The docstring below a field is its documentation; ``docs/configuration.md`` is generated from it.
    """

    on_resume: ClassVar[OnResume]
    """The mark of the section's settings that do not have their own."""
    short_form: ClassVar[str] = ""
    """Type of the short form that a section accepts instead of a mapping, as ``docs/configuration.md`` shows it."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


def refusal(rule: str, hint: str, shown: str | None = None) -> PydanticCustomError:
    """Return the error for a field validator to raise.

    ``shown`` replaces the value in the error, where the value itself may hold a secret.
    """
    shown_instead = {} if shown is None else {"shown": shown}
    return PydanticCustomError("refused", "{rule}", {"rule": rule, "hint": hint, **shown_instead})


def base_of(info: ValidationInfo) -> Path | None:
    """Return the directory that relative paths are resolved against, if this validation makes them absolute."""
    return info.context["base"] if info.context else None


def _has_known_home(value: str) -> str:
    if os.path.expanduser(value).startswith("~"):
        raise refusal("names the home directory of a user that this machine does not know", "write an absolute path")
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
        raise refusal("is not a local directory", "give a path, such as /mnt/nvme/swap")
    # The code that opens it does not accept URIs.
    return str(location) if value.startswith("file:") else value


NamedPlace = Annotated[str, Field(min_length=1), AfterValidator(_has_known_home)]
"""A path or another location, which may begin with a home directory."""
PlacePath = Annotated[NamedPlace, AfterValidator(_absolute)]
"""A path or URI that ``Config.with_absolute_paths`` makes independent of the working directory."""
StoragePlace = Annotated[PlacePath, AfterValidator(_is_location)]
"""A path, or the URI of a folder of an object store."""
LocalPath = Annotated[PlacePath, AfterValidator(_is_path)]
"""A path on each node's local disk."""
