"""Publishes an exported directory atomically, on a file system or in an object store.

On a file system, the export is written next to its final path and then renamed. In an object store, its files are
uploaded one by one, ending with the record, which commits the export. A later export recognizes the directory by its
record.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export.report import ExportReport, decimal_size
from ray_ulysses.storage.block_cache import cache_folder
from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.lock import lock_file
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.storage.regular import refuse_links, sync
from ray_ulysses.storage.store import file_pieces
from ray_ulysses.validation import KNOWN_FIELDS_ONLY

RECORD_FILE = "ray_ulysses_export.json"
_LOCK_FILE = ".exporting"
_MOST_NAMED = 3
# Reserve for the model card, the record and file system overhead.
_LEAST_SPARE_BYTES = 2**20
_SPARE_SHARE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Properties by which an export is identified; exports with equal properties are identical."""

    # Refuse records with unknown fields, which may distinguish exports in a newer version.
    __pydantic_config__ = KNOWN_FIELDS_ONLY

    manifest: str
    """Hash of the manifests of the checkpoint, or of all averaged checkpoints."""
    weights: str
    max_shard_bytes: int
    """Maximum tensor bytes per file."""
    tokenizer: str
    """Hash of the tokenizer files."""
    checked: bool
    """Whether the export was compared with the live model."""
    merged: bool = False
    average: int = 1
    """Number of checkpoints whose weights were averaged."""

    def differences(self, other: Identity) -> list[str]:
        """Describe how an existing export ``other`` differs from this one."""
        average = f"averages {other.average} checkpoints" if other.average > 1 else "is not an average"
        found = {
            "its checkpoint is different": self.manifest != other.manifest,
            f"its weights have --dtype {other.weights}": self.weights != other.weights,
            f"its --max-shard-size is {decimal_size(other.max_shard_bytes)}": (
                self.max_shard_bytes != other.max_shard_bytes
            ),
            "its tokenizer is different": self.tokenizer != other.tokenizer,
            f"its adapter is {'' if other.merged else 'not '}merged": self.merged != other.merged,
            f"it {average}": self.average != other.average,
            "it was not checked": self.checked and not other.checked,
        }
        return [difference for difference, is_there in found.items() if is_there]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Content of the record file ``ray_ulysses_export.json``."""

    identity: Identity
    report: ExportReport

    def to_bytes(self) -> bytes:
        """Serialize the record."""
        return json.dumps(asdict(self), indent=2, sort_keys=True).encode() + b"\n"


def read_record(place: Place) -> Record | None:
    """Read the record of a directory's export, or return None if there is no valid record.

    Raises:
        OSError: The record exists but can't be read.
    """
    try:
        return TypeAdapter(Record).validate_json(open_store(place).read_whole(RECORD_FILE), strict=True)
    except (FileNotFoundError, ValueError):
        return None


def refuse_place(out: Path, own: Sequence[Path], exports: Path) -> None:
    """Refuse to publish among a run's own files, which the run may delete. Paths below ``exports`` are allowed.

    Raises:
        UserError: ``out`` is in one of the run's directories, or a symbolic link leads there.
    """
    refuse_links(out.absolute(), exports.parent.absolute())
    place = _real(out)
    if _real(exports) in place.parents:
        return
    for directory in own:
        if _real(directory) in (place, *place.parents):
            raise UserError(
                f"--out={str(out)!r}: is in {directory}, where the run stores and deletes its own files; use a "
                f"directory below {exports} or outside the run's directories"
            )


def already_exported(place: Place, identity: Identity, *, overwrite: bool) -> Record | None:
    """Return the record of an identical export in a directory or object store folder.

    Returns:
        The record, or None if ``place`` is free or may be replaced. In an object store, files without a record were
        left by an export that was killed.

    Raises:
        UserError: ``place`` contains other files or a different export.
        RunError: ``place`` can't be read.
    """
    name = f"--out={str(place)!r}"
    try:
        sizes = _sizes_of(place)
        there = read_record(place) if sizes else None
    except OSError as error:
        raise RunError(f"{name}: can't be read ({error.strerror or error}); use another directory") from error
    if isinstance(place, Path) and sizes and there is None:
        raise UserError(
            f"{name}: contains files that ray-ulysses did not export, and these are never overwritten; use another "
            "directory, or empty it"
        )
    if there is None or overwrite:
        if there is not None and isinstance(place, Path) and (others := _not_exported(sizes, there)):
            raise UserError(f"{name}: {others}; move these files, or use another directory")
        return None
    lost = [f"{file} has changed or is missing" for file, size in there.report.files.items() if sizes.get(file) != size]
    differences = identity.differences(there.identity) or lost
    if not differences:
        return there
    raise UserError(
        f"{name}: contains another export of ray-ulysses ({'; '.join(differences)}); add --overwrite to replace it, or "
        "use another directory"
    )


def _sizes_of(place: Place) -> dict[str, int | None]:
    """Return the size of each file in a directory by name, or an empty dict if the directory does not exist."""
    if isinstance(place, Path):
        if not place.exists() and not place.is_symlink():
            return {}
        if not place.is_dir():
            raise UserError(f"--out={str(place)!r}: is a file; use a directory")
        return {name: path.lstat().st_size for name, path in _files_in(place).items()}
    found = open_store(place.parent).sizes(place.name)
    return {key.removeprefix(f"{place.name}/"): size for key, size in found.items()}


def _files_in(folder: Path) -> dict[str, Path]:
    """Return the files and empty folders in a directory and its folders, by path."""
    paths = sorted(folder.rglob("*"))
    found = (path for path in paths if path.is_symlink() or not path.is_dir() or not any(path.iterdir()))
    return {path.relative_to(folder).as_posix(): path for path in found}


def _not_exported(names: Iterable[str], there: Record) -> str:
    """Describe the files that the export did not write, or return an empty string if there are none."""
    others = sorted({*names} - {*there.report.files, RECORD_FILE, _LOCK_FILE})
    if not others:
        return ""
    more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    return f"contains other files ({', '.join(others[:_MOST_NAMED])}{more}), which are never overwritten"


@contextlib.contextmanager
def unpublished(out: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a temporary directory, which becomes ``out`` if the block succeeds and is deleted otherwise.

    Directories left by killed exports are deleted first. Those of running exports are kept.

    Args:
        out: A path that does not exist, an empty directory, an export to replace, or a symbolic link to one of these.
        num_bytes: Number of bytes that the block will write.

    Raises:
        RunError: The disk has too little space or can't be written, another process exports to ``out``, or other files
            appeared in ``out``.
    """
    if out.is_symlink():
        # Keep the link, and replace only the directory that the link points to.
        out = _real(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out)
        free = shutil.disk_usage(out.parent).free
        spare = max(_LEAST_SPARE_BYTES, num_bytes // _SPARE_SHARE)
        if free < num_bytes + spare:
            raise RunError(
                f"--out={str(out)!r}: the export needs {decimal_size(num_bytes)} and a reserve of "
                f"{decimal_size(spare)}, but only {decimal_size(free)} is free; free up space or set another --out"
            )
        folder = out.parent / f"{_prefix(out)}{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        try:
            descriptor = lock_file(folder / _LOCK_FILE)
        except FileNotFoundError as error:
            # Another export has deleted the folder, because it was not locked yet.
            raise BlockingIOError from error
    except BlockingIOError as error:
        raise RunError(
            f"--out={str(out)!r}: another process is exporting to this directory; wait for it to finish, or stop it"
        ) from error
    except OSError as error:
        raise RunError(
            f"--out={str(out)!r}: can't be written ({error.strerror or error}); use another directory"
        ) from error
    try:
        yield folder
        _publish(folder, out)
    except OSError as error:
        raise RunError(
            f"--out={str(out)!r}: could not be written ({error.strerror or error}); nothing was published. Free up "
            "space, or use another directory"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _real(path: Path) -> Path:
    # `Path.resolve` raises for circular links.
    return Path(os.path.realpath(path))


def _prefix(out: Path) -> str:
    return f".{out.name}.exporting-"


def _sweep(out: Path) -> None:
    for leftover in out.parent.glob(f"{glob.escape(_prefix(out))}*"):
        try:
            descriptor = lock_file(leftover / _LOCK_FILE, out.parent)
        except FileNotFoundError:
            # Its export has just published or removed it.
            continue
        shutil.rmtree(leftover, ignore_errors=True)
        os.close(descriptor)


def _publish(folder: Path, out: Path) -> None:
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)
    old = None
    names = _files_in(out) if out.is_dir() else {}
    if names:
        there = read_record(out)
        # Other files may have appeared during the export.
        others = "now contains files that are not an export" if there is None else _not_exported(names, there)
        if others:
            raise RunError(f"--out={str(out)!r}: {others}; nothing was published. Use another directory")
        # If this process dies between the two renames, the next export deletes the directory with this name.
        old = out.parent / f"{_prefix(out)}{uuid.uuid4().hex[:8]}"
        out.rename(old)
    folder.rename(out)
    (out / _LOCK_FILE).unlink(missing_ok=True)
    sync(out.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def staging_folder(published: Place) -> Path:
    """Return the local directory in which to write an export: ``published`` itself, or a cache folder for a URI."""
    if isinstance(published, Path):
        return published
    digest = hashlib.sha256(str(published).encode()).hexdigest()[:12]
    return cache_folder("exports") / digest / published.name


def upload(folder: Path, published: ObjectLocation) -> None:
    """Upload an export's files to an object store folder, with the record last, and delete the local files.

    Other files in the folder, from a replaced or killed export, are deleted.

    Raises:
        RunError: The store can't be written. The uploaded files have no record, and the next export replaces them.
    """
    names = [name for name in _files_in(folder) if name != RECORD_FILE]
    store = open_store(published)
    try:
        store.delete(RECORD_FILE)
        for name in sorted(_sizes_of(published).keys() - {*names}):
            store.delete(name)
        for name in names:
            store.replace(name, file_pieces(folder / name))
        store.replace(RECORD_FILE, [(folder / RECORD_FILE).read_bytes()])
    except OSError as error:
        raise RunError(
            f"{published}: can't be written ({error.strerror or error}); nothing was published. Make the store "
            "reachable, or use a local directory with --out"
        ) from error
    shutil.rmtree(folder, ignore_errors=True)
