"""Files that appear whole or not at all and outlive a power cut: written beside their place, synced, published."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path

from ray_ulysses.storage.regular import opened_folder, sync
from ray_ulysses.storage.store import Buffer
from ray_ulysses.storage.temporaries import mark_as_written, temporary_name

_BLOCK_BYTES = 1 << 20


@contextmanager
def atomic_file(path: Path, within: Path | None = None) -> Iterator[Path]:
    """Give an empty file beside ``path`` to write; give it its name when the block ends without an error.

    Its temporary name is new each time, so that a retried task and its predecessor, which may still be writing on
    another node, never write into one file. The file is synced before it is published: a reader sees the whole file or
    none, also after a power cut; which of the two is settled when its folder is synced.

    Args:
        path: Where the file is to be.
        within: The folder below which no link is followed; None for the file's own folder. It is made if it is missing.
    """
    within = within or path.parent
    make_folders(within)
    with (
        opened_folder(path.parent, within, make=True) as folder,
        unpublished_file(path.name, folder) as (temporary, _),
    ):
        yield path.parent / temporary


@contextmanager
def unpublished_file(name: str, folder: int, *, is_new: bool = False) -> Iterator[tuple[str, int]]:
    """Do as `atomic_file` in an opened folder; yield the temporary name, and a descriptor of the file.

    Args:
        name: The file's name.
        folder: A descriptor of its folder.
        is_new: Whether a file that is there already is an error (FileExistsError); otherwise it is replaced.
    """
    temporary = temporary_name()
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    try:
        mark_as_written(descriptor)
        yield temporary, descriptor
        os.fsync(descriptor)
        # A rename would silently replace a file that has to be new.
        (os.link if is_new else os.replace)(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        # A folder that takes no changes any more must not hide what went wrong first.
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        with suppress(OSError):
            os.close(descriptor)


def write_text(path: Path, text: str, within: Path | None = None) -> None:
    """Write ``text`` as UTF-8, whole or not at all; it is there after a power cut, too. See `atomic_file`."""
    with atomic_file(path, within) as temporary:
        temporary.write_text(text, encoding="utf-8")
    sync(path.parent)


def write_all(stream: RawIOBase, chunk: Buffer) -> int:
    """Write a whole chunk and return its size in bytes; the kernel may take less at a time (2 GiB at most)."""
    left = memoryview(chunk).cast("B")
    size = left.nbytes
    while left.nbytes:
        left = left[stream.write(left) :]
    return size


def make_folders(folder: Path) -> None:
    """Create a folder and its parents so that they outlive a power cut."""
    missing = []
    while not folder.is_dir():
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync(path.parent)


def file_crc32(path: Path) -> int:
    """Return the CRC-32 of a file's bytes."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
