"""Publishes an exported directory atomically: it is written beside its final path and renamed at the end."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export.record import RECORD_FILE, Existing, Identity, Record, read_existing
from ray_ulysses.export.report import decimal_size
from ray_ulysses.storage.lock import lock_file
from ray_ulysses.storage.regular import refuse_links, sync

_LOCK_FILE = ".exporting"
_MOST_NAMED = 3
# For the model card, the record, and the overhead of the file system.
_LEAST_SPARE_BYTES = 2**20
_SPARE_SHARE = 128


def refuse_place(out: Path, own: Sequence[Path], exports: Path) -> None:
    """Refuse to publish among a run's own files, some of which the run deletes.

    Args:
        out: The directory to publish.
        own: Directories of the run.
        exports: The folder in which exports are allowed nevertheless.

    Raises:
        UserError: ``out`` is in one of the run's directories, or there is a link on the way from it to ``out``.
    """
    refuse_links(out.absolute(), exports.parent.absolute())
    place = _real(out)
    if _real(exports) in place.parents:
        return
    for directory in own:
        if _real(directory) in (place, *place.parents):
            raise UserError(
                f"--out={str(out)!r}: is in {directory}, where the run keeps and deletes its own files; give a "
                f"directory below {exports}, or elsewhere"
            )


def already_exported(out: Path, identity: Identity, *, overwrite: bool) -> Record | None:
    """Return the record of an identical export in a directory.

    Args:
        out: The directory to publish.
        identity: Identity of the new export.
        overwrite: Whether another export may be replaced.

    Returns:
        None if ``out`` is free, or may be replaced.

    Raises:
        UserError: ``out`` holds something else.
        RunError: It can't be read.
    """
    try:
        return _already_exported(out, identity, overwrite)
    except OSError as error:
        raise RunError(
            f"--out={str(out)!r}: can't be read ({error.strerror or error}); give another directory"
        ) from error


def _already_exported(out: Path, identity: Identity, overwrite: bool) -> Record | None:
    if not out.exists() and not out.is_symlink():
        return None
    if not out.is_dir():
        raise UserError(f"--out={str(out)!r}: is a file; give a directory")
    if not any(out.iterdir()):
        return None
    there = read_existing(out)
    if there is None:
        raise UserError(
            f"--out={str(out)!r}: holds something that is not an export of ray-ulysses, which is never overwritten; "
            "give another directory, or empty it"
        )
    if overwrite:
        others = _not_exported(out, there)
        if others:
            raise UserError(f"--out={str(out)!r}: {others}; move that elsewhere, or give another directory")
        return None
    if there.record is None:
        differences = ["another version of ray-ulysses wrote it"]
    else:
        differences = identity.differences(there.record.identity) or _missing(out, there.files)
    if not differences:
        return there.record
    raise UserError(
        f"--out={str(out)!r}: holds another export of ray-ulysses ({'; '.join(differences)}); add --overwrite to "
        "replace it, or give another directory"
    )


def _missing(out: Path, files: Mapping[str, int]) -> list[str]:
    sizes = {path.name: path.lstat().st_size for path in out.iterdir()}
    return [f"{name} is not what was exported" for name, size in files.items() if sizes.get(name) != size]


def _not_exported(out: Path, there: Existing) -> str:
    """Return in words which files of an exported directory were not exported; empty if all were."""
    own = {*there.files, RECORD_FILE, _LOCK_FILE}
    others = sorted(path.name for path in out.iterdir() if path.name not in own)
    if not others:
        return ""
    more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    return f"holds files that were not exported ({', '.join(others[:_MOST_NAMED])}{more}), which are never overwritten"


@contextlib.contextmanager
def unpublished(out: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a temporary directory, which becomes ``out`` if the block succeeds and is deleted otherwise.

    Leftovers of killed exports are deleted first; a running export is not disturbed.

    Args:
        out: The directory to publish; empty, absent, or an export to replace. Of a link, the directory it leads to.
        num_bytes: Bytes that will be written, for a check of the free space.

    Raises:
        RunError: The disk is too small or can't be written, another process exports to ``out``, or ``out`` now holds
            other files.
    """
    if out.is_symlink():
        # The link stays: a directory takes the place only of the one that it leads to.
        out = _real(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out)
        free = shutil.disk_usage(out.parent).free
        spare = max(_LEAST_SPARE_BYTES, num_bytes // _SPARE_SHARE)
        if free < num_bytes + spare:
            raise RunError(
                f"--out={str(out)!r}: the export takes {decimal_size(num_bytes)} and a reserve of "
                f"{decimal_size(spare)}, and {decimal_size(free)} are free there; make room or give another directory"
            )
        folder = out.parent / f"{_prefix(out)}{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        descriptor = lock_file(folder / _LOCK_FILE)
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


def _real(path: Path) -> Path:
    # Not `Path.resolve`, which raises for circular links.
    return Path(os.path.realpath(path))


def _prefix(out: Path) -> str:
    return f".{out.name}.exporting-"


def _sweep(out: Path) -> None:
    """Delete the leftovers of dead exports to the same directory."""
    for leftover in out.parent.glob(f"{glob.escape(_prefix(out))}*"):
        try:
            descriptor = lock_file(leftover / _LOCK_FILE, out.parent)
        except BlockingIOError as error:
            raise RunError(
                f"--out={str(out)!r}: another process is exporting to it; wait for it, or stop it"
            ) from error
        shutil.rmtree(leftover, ignore_errors=True)
        os.close(descriptor)


def _publish(folder: Path, out: Path) -> None:
    """Rename a finished directory to its final path, replacing an export that is there."""
    for path in folder.iterdir():
        sync(path)
    sync(folder)
    old = None
    if out.is_dir() and any(out.iterdir()):
        there = read_existing(out)
        # An export takes long enough for other files to appear there in the meantime.
        others = "now holds something that is not an export" if there is None else _not_exported(out, there)
        if others:
            raise RunError(f"--out={str(out)!r}: {others}; nothing was published. Give another directory")
        # Under a name that the next export deletes, in case this process dies between the two renames.
        old = out.parent / f"{_prefix(out)}{uuid.uuid4().hex[:8]}"
        out.rename(old)
    folder.rename(out)
    (out / _LOCK_FILE).unlink(missing_ok=True)
    sync(out.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
