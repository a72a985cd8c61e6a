"""The record of an export in its directory, by which a repeated export recognizes it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ray_ulysses.export.report import ExportReport, decimal_size
from ray_ulysses.storage.regular import read_regular
from ray_ulysses.validation import KNOWN_FIELDS_ONLY

RECORD_FILE = "ray_ulysses_export.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The identity of an export."""

    # A field that this version does not know may distinguish two exports, too.
    __pydantic_config__ = KNOWN_FIELDS_ONLY

    manifest: str
    """Hash of the checkpoint's manifest."""
    weights: str
    """Precision of the weights."""
    max_shard_bytes: int
    """Maximum bytes of tensors in a file."""
    tokenizer: str
    """Hash of the tokenizer's files."""
    checked: bool
    """Whether it was compared with the live model."""
    merged: bool = False
    """Whether an adapter was merged."""

    def differences(self, other: Identity) -> list[str]:
        """Return in words how an existing export differs from this one."""
        found = ["it is of another checkpoint"] if self.manifest != other.manifest else []
        if self.weights != other.weights:
            found.append(f"its weights are --dtype {other.weights}")
        if self.max_shard_bytes != other.max_shard_bytes:
            found.append(f"its files hold up to {decimal_size(other.max_shard_bytes)}")
        if self.tokenizer != other.tokenizer:
            found.append("its tokenizer is another one")
        if self.merged != other.merged:
            found.append("its adapter is merged" if other.merged else "its adapter is not merged")
        if self.checked and not other.checked:
            found.append("it was not checked")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The file ``ray_ulysses_export.json``."""

    identity: Identity
    """Identity of the export."""
    report: ExportReport
    """Report on the export."""

    def to_bytes(self) -> bytes:
        """Return the file."""
        return json.dumps(asdict(self), indent=2, sort_keys=True).encode() + b"\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Existing:
    """An existing export."""

    files: Mapping[str, int]
    """Size in bytes of each exported file, by name."""
    record: Record | None
    """Its record; None if another version of ray-ulysses wrote it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Files:
    files: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _AnyRecord:
    """The part of the record that all versions share."""

    report: _Files


@functools.cache
def _adapters() -> tuple[TypeAdapter[_AnyRecord], TypeAdapter[Record]]:
    return TypeAdapter(_AnyRecord), TypeAdapter(Record)


def read_existing(directory: Path) -> Existing | None:
    """Return the export in a directory; None if it has no valid record."""
    try:
        return existing_of(read_regular(directory / RECORD_FILE, directory))
    except OSError:
        return None


def existing_of(content: bytes) -> Existing | None:
    """Return the export that the content of a record tells of; None if that is not valid."""
    any_record, own_record = _adapters()
    try:
        files = any_record.validate_json(content, strict=True).report.files
    except ValueError:
        return None
    try:
        record = own_record.validate_json(content, strict=True)
    except ValueError:
        record = None
    return Existing(files=files, record=record)
