"""A `Store` on a mounted file system: temporary file, fsync, then a hard link (create) or a rename (replace).

Below its root no symbolic link is followed, for reading, writing or deleting; see `storage.regular`. If a write
fails, nothing appears under the key and the temporary file is deleted. Only a process that dies, or loses access to the
folder, leaves one, which `sweep_temporaries` deletes.
"""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
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
    """Files under one directory, on a local disk or a network file system with hard links.

    Attributes:
        root: The directory; it need not exist before the first write.
        name: Its display name in errors: as it was given.
        must_exist: Whether it must: a directory that is deleted while a run writes there is not created again.
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
        """Return whether there is something at its root."""
        return self.root.exists()

    def path(self, key: str) -> Path:
        """Return the path of a key's file."""
        return self.root / checked_key(key)

    def open(self, key: str) -> LocalFile:
        """Open a file for reading; see `Store.open`."""
        return LocalFile(self.path(key), self.root)

    def root_names(self) -> builtins.list[str]:
        """Return the names of the files and the folders at its root; raises OSError if it is not there."""
        return os.listdir(self.root)

    def size(self, key: str) -> int:
        """Return the size of a file in bytes."""
        with self.open(key) as file:
            return file.size

    def modified_at(self, key: str) -> float:
        """Return when a file was written, by the file system's clock, in seconds since the epoch."""
        with self.open(key) as file:
            return os.fstat(file.fileno()).st_mtime

    def for_arrow(self, key: str) -> Path:
        """Return the path of a plain file for pyarrow; ask again for each reading."""
        self.open(key).close()
        return self.path(key)

    def open_ranges(self, key: str) -> LocalFile:
        """Open a file to be read by ranges."""
        return self.open(key)

    def create(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Write a new file durably and return its size in bytes; see `Store.create`."""
        path = self.path(key)
        try:
            return self._write(path, chunks, is_new=True)
        except FileExistsError as error:
            raise AlreadyExistsError(f"{path} exists already; nothing was written over it") from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise UserError(
                f"the file system of {path.parent} has no hard links ({error.strerror}), so a checkpoint can't be "
                "committed atomically on it; use a local disk or NFS"
            ) from error

    def replace(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Write a file durably in place of the one there, if any; see `Store.replace`."""
        return self._write(self.path(key), chunks)

    def list(self, prefix: str) -> list[str]:
        """Return the keys of all files under a folder, sorted; files being written are left out.

        Raises:
            NotAPlainFileError: There is a link among them, whose target is not part of the store.
            OSError: A folder can't be listed, or the root is a link whose disk may not be mounted; an absent
                folder is an empty one.
        """
        top, keys = self.path(prefix), list[str]()
        try:
            with opened_folder(top.parent, self.root) as folder:
                mode = os.stat(top.name, dir_fd=folder, follow_symlinks=False).st_mode
                if not stat.S_ISREG(mode):
                    self._collect(prefix, folder, keys)
        except FileNotFoundError:
            # Absent, or deleted by somebody meanwhile.
            self._refuse_unmounted()
        return sorted(keys)

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the size in bytes of each file under a folder, by its key; None for one that can't be opened now."""
        keys = self.list(folder)
        with ThreadPoolExecutor(_SIZES_AT_ONCE, thread_name_prefix="ray-ulysses-sizes") as threads:
            found = zip(keys, threads.map(self._size, keys), strict=True)
        # -1 marks a file that was deleted since it was listed.
        return {key: size for key, size in found if size != -1}

    def _size(self, key: str) -> int | None:
        try:
            return self.size(key)
        except FileNotFoundError:
            return -1
        except OSError:
            return None

    def delete(self, prefix: str) -> None:
        """Delete a file, or a folder with all that is in it; of a link only the link itself."""
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

    def _collect(self, key: str, parent: int, keys: builtins.list[str]) -> None:
        """Add the keys of all files under a folder, given a descriptor of the folder above it."""
        with entered(self.root / key, parent) as folder:
            with os.scandir(folder) as found:
                entries = tuple(found)
            for entry in entries:
                below = f"{key}/{entry.name}"
                # The listing gives the type of an entry, so no file is opened.
                if entry.name.startswith(TEMPORARY_PREFIX):
                    continue
                if entry.is_symlink():
                    raise link_error(self.root / below)
                if not entry.is_dir(follow_symlinks=False):
                    keys.append(below)
                    continue
                # Another process may delete it meanwhile.
                with suppress(FileNotFoundError):
                    self._collect(below, folder, keys)

    def _refuse_unmounted(self) -> None:
        """Raise `OSError` if the root is absent because a link on the way to it leads to nowhere."""
        link = next(path for path in (self.root, *self.root.parents) if os.path.lexists(path))
        if not os.path.exists(link):
            # Not a `FileNotFoundError`, which would mean that the folder is empty.
            target = os.path.realpath(link)
            raise OSError(errno.ENXIO, f"{link} is a link to {target}, which is not there; mount it or delete the link")

    def _write(self, path: Path, chunks: Iterable[Buffer], *, is_new: bool = False) -> int:
        """Write beside the target, make it durable, publish it under its name."""
        if self.must_exist and not self.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the directory is not there any more", str(self.root))
        if not self.must_exist:
            make_folders(self.root)
        with opened_folder(path.parent, self.root, make=True) as folder:
            with (
                unpublished_file(path.name, folder, is_new=is_new) as (_, descriptor),
                os.fdopen(os.dup(descriptor), "r+b", buffering=0) as stream,
            ):
                size = sum(write_all(stream, chunk) for chunk in chunks)
            try:
                # Without this a power cut can lose the name although the bytes are there.
                sync(".", folder)
            except OSError:
                # A caller that got an error must not find a new file there later.
                if is_new:
                    os.unlink(path.name, dir_fd=folder)
                raise
        return size


def _delete_folder(name: str, parent: int) -> None:
    """Delete a folder although others may delete in it, or still write into it, at the same time."""
    met, refilled = 0, 0
    while True:
        try:
            # It follows no link.
            return shutil.rmtree(name, dir_fd=parent)
        except OSError as error:
            try:
                os.stat(name, dir_fd=parent, follow_symlinks=False)
            except FileNotFoundError:
                return None
            # Another one was faster with a file, which is progress; one who still writes is not.
            met += error.errno == errno.ENOENT
            refilled += error.errno == errno.ENOTEMPTY
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or met > _MOST_MEETINGS or refilled >= _DELETE_TRIES:
                raise


class LocalFile(StoredFile):
    """A file that is read through a descriptor; see `StoredFile`.

    A memory map would be no faster, and ends the process where the file was truncated or its storage went away.
    """

    _descriptor = -1

    def __init__(self, path: Path, within: Path) -> None:
        """Open a file; raises as `open_inside`."""
        self._descriptor = open_inside(path, within)
        super().__init__(os.fstat(self._descriptor).st_size)

    def read_into(self, start: int, target: memoryview) -> int:
        """Fill a buffer from a place on; return how many bytes there were."""
        done = 0
        # The kernel may return less at a time (2 GiB at most).
        while done < len(target) and (count := os.preadv(self._descriptor, [target[done:]], start + done)):
            done += count
        return done

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def close(self) -> None:
        """Close it; of a file that threads read, when the last of them lets it go."""
        # Another file may get its number.
        descriptor, self._descriptor = self._descriptor, -1
        close_quietly(descriptor)
        super().close()
