"""A `Store` on a mounted file system. It publishes a synced temporary file by hard link (create) or rename (replace).

The store follows no symbolic link below its root; see `storage.regular`. If a write fails, no file appears under the
key, and the temporary file is deleted. A temporary file remains only if the process dies or loses access to the folder;
`sweep_temporaries` deletes such files.
"""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ray_ulysses.errors import UserError
from ray_ulysses.storage.atomic import TEMPORARY_PREFIX, make_folders, unpublished_file, write_all
from ray_ulysses.storage.regular import (
    close_quietly,
    entered,
    link_error,
    open_inside,
    opened_folder,
    sync,
)
from ray_ulysses.storage.store import AlreadyExistsError, Buffer, Store, StoredFile, checked_key

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_DELETE_TRIES = 5
_MOST_MEETINGS = 1000
_SIZES_AT_ONCE = 16


class LocalStore(Store):
    """A store in a directory, on a local disk or a network file system with hard links.

    Args:
        root: The directory. Errors show this path as given.
        must_exist: If True, a write fails if the directory is missing, for example because it was deleted during the
            run. Otherwise the write creates the directory.
    """

    def __init__(self, root: Path | str, *, must_exist: bool = False) -> None:
        self.root, self.name = Path(root).absolute(), str(root)
        self.must_exist = must_exist

    def __str__(self) -> str:
        return self.name

    def named(self, key: str) -> str:
        """Return the display name of a file."""
        return str(Path(self.name) / key)

    def exists(self) -> bool:
        """Return whether the root exists."""
        return self.root.exists()

    def path(self, key: str) -> Path:
        """Return the path of a key's file."""
        return self.root / checked_key(key)

    def open(self, key: str) -> LocalFile:
        """Open a file for reading; see `Store.open`."""
        return LocalFile(self.path(key), self.root)

    def root_names(self) -> builtins.list[str]:
        """Return the names of the files and folders in the root; raise OSError if the root does not exist."""
        return os.listdir(self.root)

    def size(self, key: str) -> int:
        """Return the size of a file in bytes."""
        with self.open(key) as file:
            return file.size

    def modified_at(self, key: str) -> float:
        """Return a file's modification time by the file system's clock, in seconds since the epoch."""
        with self.open(key) as file:
            return os.fstat(file.fileno()).st_mtime

    def for_arrow(self, key: str) -> Path:
        """Return the path of a regular file for pyarrow. Call this method before each read to check for links again."""
        self.open(key).close()
        return self.path(key)

    def open_ranges(self, key: str) -> LocalFile:
        """Open a file for random access."""
        return self.open(key)

    def create(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Write a new file durably and return its size in bytes; see `Store.create`."""
        path = self.path(key)
        try:
            return self._write(path, chunks, is_new=True)
        except FileExistsError as error:
            raise AlreadyExistsError(f"{path} already exists and was not overwritten") from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise UserError(
                f"the file system of {path.parent} does not support hard links ({error.strerror}), which atomic "
                "checkpoint commits require; use a local disk or NFS"
            ) from error

    def replace(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Create or overwrite a file durably; see `Store.replace`."""
        return self._write(self.path(key), chunks)

    def list(self, prefix: str) -> list[str]:
        """Return the sorted keys of all files in a folder tree, except temporary files; see `Store.list`.

        Raises:
            NotAPlainFileError: The folder tree contains a symbolic link.
            OSError: A folder can't be listed, or the root is a dangling link, possibly to an unmounted disk.
        """
        top, keys = self.path(prefix), list[str]()
        try:
            with opened_folder(top.parent, self.root) as folder:
                mode = os.stat(top.name, dir_fd=folder, follow_symlinks=False).st_mode
                if not stat.S_ISREG(mode):
                    keys.extend(self._collect(prefix, folder))
        except FileNotFoundError:
            # The folder does not exist, or another process deleted it during the listing.
            self._refuse_unmounted()
        return sorted(keys)

    def names(self, folder: str) -> builtins.list[str]:
        """Return the names of a folder's files and of its subfolders that have a file."""
        top = self.path(folder)
        try:
            with opened_folder(top.parent, self.root) as parent, entered(top, parent) as opened:
                entries = self._entries(folder, opened)
                return sorted(entry.name for entry in entries if any(self._keys_of(entry, folder, opened)))
        except (FileNotFoundError, NotADirectoryError):
            self._refuse_unmounted()
            return []

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the size in bytes, or None if unreadable, of each file in a folder tree; see `Store.sizes`."""
        keys = self.list(folder)
        with ThreadPoolExecutor(_SIZES_AT_ONCE, thread_name_prefix="ray-ulysses-sizes") as threads:
            found = zip(keys, threads.map(self._size, keys), strict=True)
        # -1 marks a file that was deleted after the listing.
        return {key: size for key, size in found if size != -1}

    def _size(self, key: str) -> int | None:
        try:
            return self.size(key)
        except FileNotFoundError:
            return -1
        except OSError:
            return None

    def delete(self, prefix: str) -> None:
        """Delete a file, a folder tree, or a symbolic link but not its target; see `Store.delete`."""
        top = self.path(prefix)
        with suppress(FileNotFoundError), opened_folder(top.parent, self.root) as folder:
            try:
                os.unlink(top.name, dir_fd=folder)
            except IsADirectoryError:
                _delete_folder(top.name, folder)
            sync(".", folder)

    def delete_files(self, keys: Sequence[str]) -> None:
        """Delete files; see `delete`."""
        for key in keys:
            self.delete(key)

    def _collect(self, key: str, parent: int) -> Iterator[str]:
        with entered(self.root / key, parent) as folder:
            for entry in self._entries(key, folder):
                yield from self._keys_of(entry, key, folder)

    def _entries(self, key: str, folder: int) -> builtins.list[os.DirEntry[str]]:
        """Return an opened folder's entries, files first and without temporary files."""
        with os.scandir(folder) as found:
            entries = [entry for entry in found if not entry.name.startswith(TEMPORARY_PREFIX)]
        for entry in entries:
            if entry.is_symlink():
                raise link_error(self.root / key / entry.name)
        return sorted(entries, key=lambda entry: entry.is_dir(follow_symlinks=False))

    def _keys_of(self, entry: os.DirEntry[str], key: str, folder: int) -> Iterator[str]:
        below = f"{key}/{entry.name}"
        if not entry.is_dir(follow_symlinks=False):
            yield below
            return
        # Another process may delete the folder during the listing.
        with suppress(FileNotFoundError):
            yield from self._collect(below, folder)

    def _refuse_unmounted(self) -> None:
        """Raise `OSError` if the root, or one of its parents, is a dangling link."""
        link = next(path for path in (self.root, *self.root.parents) if os.path.lexists(path))
        if not os.path.exists(link):
            # Callers treat a `FileNotFoundError` as an empty folder.
            target = os.path.realpath(link)
            text = f"{link} is a link to {target}, which does not exist; mount the target or delete the link"
            raise OSError(errno.ENXIO, text)

    def _write(self, path: Path, chunks: Iterable[Buffer], *, is_new: bool = False) -> int:
        if self.must_exist and not self.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the directory no longer exists", str(self.root))
        if not self.must_exist:
            make_folders(self.root)
        with opened_folder(path.parent, self.root, make=True) as folder:
            with (
                unpublished_file(path.name, folder, is_new=is_new) as (_, descriptor),
                os.fdopen(os.dup(descriptor), "r+b", buffering=0) as stream,
            ):
                size = sum(write_all(stream, chunk) for chunk in chunks)
            try:
                # Without this a power cut can lose the directory entry.
                sync(".", folder)
            except OSError:
                # A failed `create` must not leave a file behind.
                if is_new:
                    os.unlink(path.name, dir_fd=folder)
                raise
        return size


def _delete_folder(name: str, parent: int) -> None:
    """Delete a folder tree, even if other processes delete files or write new ones in the meantime."""
    met, refilled = 0, 0
    while True:
        try:
            return shutil.rmtree(name, dir_fd=parent)
        except OSError as error:
            try:
                os.stat(name, dir_fd=parent, follow_symlinks=False)
            except FileNotFoundError:
                return None
            # Files that another process deletes are progress; files that another process keeps writing are not.
            met += error.errno == errno.ENOENT
            refilled += error.errno == errno.ENOTEMPTY
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or met > _MOST_MEETINGS or refilled >= _DELETE_TRIES:
                raise


class LocalFile(StoredFile):
    """A local file, read through a descriptor; see `StoredFile`.

    A memory map would be no faster, and would crash the process if the file were truncated or its storage disconnected.
    """

    _descriptor = -1

    def __init__(self, path: Path, within: Path) -> None:
        """Open a file; raise the exceptions of `open_inside`."""
        self._descriptor = open_inside(path, within)
        super().__init__(os.fstat(self._descriptor).st_size)

    def read_into(self, start: int, target: memoryview) -> int:
        """Read bytes from offset ``start`` into a buffer; see `StoredFile.read_into`."""
        done = 0
        # One call may return less (2 GiB at most).
        while done < len(target) and (count := os.preadv(self._descriptor, [target[done:]], start + done)):
            done += count
        return done

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._descriptor

    def close(self) -> None:
        """Close the file. If threads share the file, close it only after the last read."""
        # The kernel may reuse the descriptor's number for another file.
        descriptor, self._descriptor = self._descriptor, -1
        close_quietly(descriptor)
        super().close()
