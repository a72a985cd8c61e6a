"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ray_ulysses.storage.local import make_folders

TEMPORARY_SUFFIX = ".tmp"
_BLOCK_BYTES = 1 << 20


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``; rename it into place when the block ends without an error.

    The name is drawn anew each time, so that a retried task and its predecessor, which may still be writing on
    another node, never write into one file. The file is synced before the rename: a reader sees the whole file
    or none, also after a power failure; which of the two is settled when its folder is synced.
    """
    make_folders(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        # A name that a failing storage keeps is removed with the other working files.
        with suppress(OSError):
            temporary.unlink()
        raise


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, outlive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, whole or not at all."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def temporary_files(directory: Path) -> list[Path]:
    """Return what writers that were killed have left in a directory, and what others may be writing there."""
    return list(directory.glob(f".*{TEMPORARY_SUFFIX}"))


def file_crc32(path: Path) -> int:
    """Return the CRC-32 of a file's bytes."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
