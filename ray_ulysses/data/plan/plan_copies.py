"""Plan segments in an object store, written by the planning process and copied to the disk of each reading node.

A committed segment never changes. A copy is named by the hash of ``plan.json``, which records the size and the
checksums of every other file. Copies appear atomically. A reader that finds a copy damaged or missing replaces it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ray_ulysses.errors import RunError
from ray_ulysses.storage.block_cache import cache_folder
from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.storage.regular import NotAPlainFileError, sync
from ray_ulysses.storage.store import AlreadyExistsError, file_pieces

_SEGMENT_FILE = re.compile(r"^segment-(?P<number>\d{4,})/(?P<name>[^/.][^/]*)$")
_PIECE_BYTES = 16 << 20
_KEPT_S = 14 * 24 * 3600.0


def committed_segments(directory: Place, header: str) -> dict[int, str]:
    """Return the folder names of the committed segments, by segment number.

    ``header`` is the name of the file that commits a segment.

    Raises:
        NotAPlainFileError: The directory contains a symbolic link.
        RunError: The storage does not respond.
    """
    try:
        # Listed from the parent folder, since the root of a store has no name of its own.
        keys = open_store(directory.parent).list(directory.name)
    except NotAPlainFileError:
        raise
    except OSError as error:
        raise RunError(
            f"run.storage: the data plan in {directory} can't be read ({error.strerror or error}); make the storage "
            "reachable, and start the same command again"
        ) from error
    found = (_SEGMENT_FILE.match(key.removeprefix(f"{directory.name}/")) for key in keys)
    return {int(match["number"]): f"segment-{match['number']}" for match in found if match and match["name"] == header}


def fetch_segment(directory: ObjectLocation, folder: str, header: str, *, anew: bool = False) -> Path:
    """Return this node's copy of a committed segment, copying the segment first if necessary.

    If ``anew`` is set, a damaged copy is replaced. The path of the copy, a hash of the header file, stays the same.

    Raises:
        RunError: The store does not respond or a file is missing, or the copy does not fit on the node's disk.
    """
    place = directory / folder
    store = open_store(place)
    try:
        content = store.read_whole(header)
        copy = _copies() / hashlib.sha256(content).hexdigest()[:32] / folder
        with suppress(OSError):
            if not anew and (copy / header).read_bytes() == content:
                with suppress(OSError):
                    os.utime(copy.parent)
                return copy
        found = map(_SEGMENT_FILE.match, open_store(directory).list(folder))
        names = sorted({match["name"] for match in found if match} - {header})
        with _filled(copy) as temporary:
            for name in names:
                with store.open(name) as stream, (temporary / name).open("wb") as file:
                    shutil.copyfileobj(stream, file, _PIECE_BYTES)
            (temporary / header).write_bytes(content)
    except OSError as error:
        raise RunError(
            f"{place}: the data plan can't be copied to this node ({error.strerror or error}); make the storage "
            "reachable, or free disk space on the node (RAY_ULYSSES_CACHE_DIR), and start the same command again"
        ) from error
    _sweep()
    return copy


def put_segment(directory: ObjectLocation, folder: str, header: str, write: Callable[[Path], None]) -> Path:
    """Write a segment on this node, upload it to an object store, and return this node's copy.

    ``write`` writes the segment into a new folder. The header file, which commits the segment, is uploaded last.

    Raises:
        RunError: The store or this node's disk can't store the segment. The segment is not committed.
    """
    try:
        _copies().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_copies(), prefix="new-") as name:
            local = Path(name) / folder
            local.mkdir()
            write(local)
            content = (local / header).read_bytes()
            _put(directory / folder, header, local, content)
            copy = _copies() / hashlib.sha256(content).hexdigest()[:32] / folder
            with _filled(copy) as temporary:
                for path in local.iterdir():
                    path.rename(temporary / path.name)
    except OSError as error:
        raise RunError(
            f"{_copies()}: the data plan can't be stored ({error.strerror or error}); free space on the "
            "disk, or set RAY_ULYSSES_CACHE_DIR to a directory on another disk, then start the same command again"
        ) from error
    return copy


def _put(place: ObjectLocation, header: str, local: Path, content: bytes) -> None:
    store = open_store(place)
    try:
        for path in sorted(local.iterdir()):
            if path.name != header:
                store.replace(path.name, file_pieces(path))
        try:
            store.create(header, [content])
        except AlreadyExistsError:
            if store.read_whole(header) != content:
                raise
    except OSError as error:
        raise RunError(
            f"{place}: the data plan can't be stored ({error.strerror or error}); free space in run.storage or repair "
            "it, then start the same command again"
        ) from error


def _copies() -> Path:
    return cache_folder("plans")


@contextmanager
def _filled(copy: Path) -> Iterator[Path]:
    """Yield a new folder, then rename it to ``copy``; if ``copy`` already exists, replace the files in ``copy``."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=copy.parent, prefix="copying-", ignore_cleanup_errors=True) as name:
        temporary = Path(name)
        yield temporary
        files = sorted(temporary.iterdir())
        for path in (*files, temporary):
            sync(path)
        try:
            temporary.rename(copy)
        except OSError:
            # ``copy`` was made by a faster process, or is damaged. Replaced file by file, it is readable at all times.
            for path in files:
                path.replace(copy / path.name)


def _sweep() -> None:
    """Delete copies that have not been opened for two weeks."""
    with suppress(OSError):
        for folder in _copies().iterdir():
            if time.time() - folder.stat().st_mtime > _KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)
