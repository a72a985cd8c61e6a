"""What an exported directory says of how it was made: by it a repeated export knows that it is done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from pydantic_core import from_json

from ray_ulysses.export.report import ExportReport, decimal_size
from ray_ulysses.storage.regular import read_regular

RECORD_FILE = "ray_ulysses_export.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What decides whether two exports are the same.

    Attributes:
        manifest: Hash of the checkpoint's manifest.
        weights: Precision of the weights.
        max_shard_bytes: Most bytes of tensors in a file.
        tokenizer: Hash of the tokenizer's files.
        checked: Whether it was held against the live model.
    """

    manifest: str
    weights: str
    max_shard_bytes: int
    tokenizer: str
    checked: bool

    def differences(self, other: Identity) -> list[str]:
        """Return what another one, which is there already, lacks of this one, in words."""
        found = ["it is of another checkpoint"] if self.manifest != other.manifest else []
        if self.weights != other.weights:
            found.append(f"its weights are --dtype {other.weights}")
        if self.max_shard_bytes != other.max_shard_bytes:
            found.append(f"its files hold up to {decimal_size(other.max_shard_bytes)}")
        if self.tokenizer != other.tokenizer:
            found.append("its tokenizer is another one")
        if self.checked and not other.checked:
            found.append("it was not checked")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The file ``ray_ulysses_export.json``.

    Attributes:
        identity: What it is an export of.
        report: What was reported.
    """

    identity: Identity
    report: ExportReport

    def to_bytes(self) -> bytes:
        """Return the file."""
        return json.dumps(asdict(self), indent=2, sort_keys=True).encode() + b"\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Existing:
    """An export that is there.

    Attributes:
        files: Size in bytes of each file that it wrote, by name.
        record: All that it says; None if a version of ray-ulysses wrote it that says other things.
    """

    files: Mapping[str, int]
    record: Record | None


def read_existing(directory: Path) -> Existing | None:
    """Return what a directory says of itself; None where it is no export, or does not say which files are its own."""
    try:
        fields = from_json(read_regular(directory / RECORD_FILE))
        files = _value_of(dict[str, int], fields["report"]["files"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    try:
        # Fields that this version does not know may decide as well whether two exports are the same.
        is_ours = fields["identity"].keys() == get_type_hints(Identity).keys()
        record = _value_of(Record, fields) if is_ours else None
    except (TypeError, KeyError, AttributeError):
        record = None
    return Existing(files=files, record=record)


def _value_of(kind: Any, value: Any) -> Any:
    """Return a JSON value as what a dataclass declares; fields that it does not declare are left out.

    Raises:
        KeyError: A field is missing.
        TypeError: One is of another type.
    """
    if is_dataclass(kind):
        fields: dict[str, Any] = _checked(dict, value)
        found = {name: _value_of(hint, fields[name]) for name, hint in get_type_hints(kind).items()}
        return kind(**found)  # type: ignore[operator]  # a class, which mypy can't tell from an instance
    if get_origin(kind) is UnionType:
        inner, none = get_args(kind)
        assert none is type(None), f"{kind} is not written to this file"
        return None if value is None else _value_of(inner, value)
    if get_origin(kind) is dict:
        return {name: _value_of(get_args(kind)[1], item) for name, item in _checked(dict, value).items()}
    return _checked(kind, value)


def _checked(kind: Any, value: Any) -> Any:
    # Python counts True as a number, and JSON writes some floats as whole ones.
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not (is_whole if kind is int else isinstance(value, kind) or (kind is float and is_whole)):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
