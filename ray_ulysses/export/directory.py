"""The exported directory appears whole or not at all: it is written beside its place and renamed last."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export.report import decimal_size

RECORD_FILE = "ray_ulysses_export.json"
_LOCK_FILE = ".exporting"
_SPARE_BYTES = 64 * 2**20


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
    """What a directory says of how it was made, in ``ray_ulysses_export.json``.

    Attributes:
        identity: What it is an export of.
        report: What was reported.
    """

    identity: Identity
    report: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        """Return the file."""
        return json.dumps(asdict(self), indent=2, sort_keys=True).encode() + b"\n"


def read_record(directory: Path) -> Record | None:
    """Return what a directory says of itself; None where it is no export."""
    try:
        fields = json.loads((directory / RECORD_FILE).read_bytes())
        return Record(identity=Identity(**fields["identity"]), report=fields["report"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def already_exported(out: Path, identity: Identity, *, overwrite: bool) -> Record | None:
    """Return the record of an export that is there already, so that nothing is left to do.

    Args:
        out: The directory to publish.
        identity: What is to be exported.
        overwrite: Whether another export may be replaced.

    Returns:
        None where ``out`` is free, or may be replaced.

    Raises:
        UserError: Something else is there.
    """
    if not out.exists() and not out.is_symlink():
        return None
    if not out.is_dir():
        raise UserError(f"--out={str(out)!r}: is a file; give a directory")
    if not any(out.iterdir()):
        return None
    record = read_record(out)
    if record is None:
        raise UserError(
            f"--out={str(out)!r}: holds something that is no export of ray-ulysses, which is never overwritten; give "
            "another directory, or empty it"
        )
    differences = identity.differences(record.identity)
    if not differences:
        differences = _missing(out, record.report["files"])
    if overwrite or not differences:
        return None if overwrite else record
    raise UserError(
        f"--out={str(out)!r}: holds another export of ray-ulysses ({'; '.join(differences)}); add --overwrite to "
        "replace it, or give another directory"
    )


def _missing(out: Path, files: Mapping[str, int]) -> list[str]:
    sizes = {path.name: path.stat().st_size for path in out.iterdir()}
    return [f"{name} is not what was exported" for name, size in files.items() if sizes.get(name) != size]


@contextlib.contextmanager
def unpublished(out: Path, num_bytes: int) -> Iterator[Path]:
    """Give a directory to write to that is published as ``out`` when the block ends well, and else is gone.

    What an export that was killed has left is cleaned first. One that is still going on is not disturbed.

    Args:
        out: The directory to publish; empty, absent, or an export to replace.
        num_bytes: What will be written, so that too small a disk is refused before.

    Raises:
        RunError: The disk is too small, or can't be written, or another process exports to the same place.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out)
        free = shutil.disk_usage(out.parent).free
        if free < num_bytes + _SPARE_BYTES:
            raise RunError(
                f"--out={str(out)!r}: the export takes {decimal_size(num_bytes)}, and {decimal_size(free)} are free "
                "there; make room or give another directory"
            )
        folder = out.parent / f"{_prefix(out)}{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        descriptor = _lock(folder)
    except OSError as error:
        raise RunError(
            f"--out={str(out)!r}: can't be written ({error.strerror or error}); give another directory"
        ) from error
    try:
        yield folder
        _publish(folder, out)
    except OSError as error:
        raise RunError(
            f"--out={str(out)!r}: could not be written ({error.strerror or error}); nothing was published. Make room, "
            "or give another directory"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _prefix(out: Path) -> str:
    return f".{out.name}.exporting-"


def _lock(folder: Path) -> int:
    """Take a directory that is being written; the kernel lets go of it when the process ends, however it does."""
    descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sweep(out: Path) -> None:
    """Delete what dead exports to the same place have left."""
    for leftover in out.parent.glob(f"{_prefix(out)}*"):
        try:
            descriptor = _lock(leftover)
        except BlockingIOError as error:
            raise RunError(
                f"--out={str(out)!r}: another process is exporting to it; wait for it, or stop it"
            ) from error
        shutil.rmtree(leftover, ignore_errors=True)
        os.close(descriptor)


def _publish(folder: Path, out: Path) -> None:
    """Give a finished directory its name; an export of that name goes away in the same moment, or nearly so."""
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)
    old = None
    if out.is_dir() and any(out.iterdir()):
        # Under a name that the next export sweeps, should this process die between the two renames.
        old = out.parent / f"{_prefix(out)}{uuid.uuid4().hex[:8]}"
        out.rename(old)
    folder.rename(out)
    (out / _LOCK_FILE).unlink(missing_ok=True)
    _sync(out.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
