"""A `Store` on a mounted file system: temporary file, fsync, then a link (create) or a rename (replace).

Whatever fails, nothing appears under the key and the temporary file goes. Only a process that dies, or that loses the
right to the folder, leaves one; `sweep_temporaries` takes it.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from ray_ulysses.errors import UserError
from ray_ulysses.storage.atomic import atomic_file, sync, write_all
from ray_ulysses.storage.regular import open_regular
from ray_ulysses.storage.store import AlreadyExistsError, Buffer, checked_key
from ray_ulysses.storage.temporaries import TEMPORARY_PREFIX

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_DELETE_TRIES = 5
_MOST_MEETINGS = 1000
_SIZES_AT_ONCE = 16


class LocalStore:
    """Files under one directory, on a local disk or a network file system with hard links.

    Attributes:
        root: The directory; it need not exist before the first write.
        must_exist: Whether it must: a directory that is deleted while a run writes there is not created again.
    """

    def __init__(self, root: Path | str, *, must_exist: bool = False) -> None:
        self.root = Path(root).absolute()
        self.must_exist = must_exist

    def path(self, key: str) -> Path:
        """Return the path of a key's file."""
        return self.root / checked_key(key)

    def open(self, key: str) -> BinaryIO:
        """Return a seekable stream of the file's bytes; see `Store.open`."""
        return open_regular(self.path(key))

    def create(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Write a new file durably and return its size in bytes; see `Store.create`."""
        path = self.path(key)
        size = self._write(path, chunks, _link_new)
        try:
            # Without this a power cut can lose the name although the bytes are there.
            sync(path.parent)
        except OSError:
            # A caller that got an error must not find the file there later.
            path.unlink(missing_ok=True)
            raise
        return size

    def replace(self, key: str, chunks: Iterable[Buffer]) -> int:
        """Write a file durably in place of the one there, if any; see `Store.replace`."""
        path = self.path(key)
        size = self._write(path, chunks)
        sync(path.parent)
        return size

    def list(self, prefix: str) -> list[str]:
        """Return the keys of all files at or under a folder, sorted; files being written are left out.

        Links to folders are followed, as they are when a file is opened: a folder that was moved to another disk and
        linked back is still there. A link that leads out of the store to where nothing is fails, since its disk may not
        be mounted; what a link into the store led to has been deleted, and it is left out.

        Raises:
            OSError: A folder can't be looked into, or a link can't be followed; an absent folder is an empty one.
        """
        top = self.path(prefix)
        if top.is_file():
            return [prefix]
        keys: list[str] = []
        self._collect(str(top), prefix, (), keys)
        return sorted(keys)

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the size in bytes of each file under a folder, by its key; None for one that can't be opened now."""
        keys = self.list(folder)
        with ThreadPoolExecutor(_SIZES_AT_ONCE, thread_name_prefix="ray-ulysses-sizes") as threads:
            found = zip(keys, threads.map(self._size, keys), strict=True)
        # -1 stands for what was deleted since it was listed.
        return {key: size for key, size in found if size != -1}

    def _size(self, key: str) -> int | None:
        try:
            with self.open(key) as stream:
                return stream.seek(0, os.SEEK_END)
        except FileNotFoundError:
            return -1
        except OSError:
            return None

    def delete(self, prefix: str) -> None:
        """Delete a file, or a folder with all that is in it.

        Of a link to a folder outside the store, what is in that folder goes, too, and the folder where it can; what
        surrounds it stays. Of any other link, and of those inside a folder, only the link goes.
        """
        top = self.path(prefix)
        if top.is_symlink():
            self._empty_linked(top)
            top.unlink(missing_ok=True)
        elif top.is_dir():
            _delete_folder(top)
        else:
            top.unlink(missing_ok=True)
        if top.parent.is_dir():
            sync(top.parent)

    def _collect(self, folder: str, key: str, above: tuple[str, ...], keys: builtins.list[str]) -> None:
        """Add the keys of all files under a folder; `above` are the folders through which it was reached."""
        try:
            with os.scandir(folder) as found:
                entries = tuple(found)
        except FileNotFoundError:
            # Absent, or deleted by somebody meanwhile.
            self._refuse_unmounted(Path(folder))
            return
        way = (*above, folder)
        for entry in entries:
            if entry.name.startswith(TEMPORARY_PREFIX):
                continue
            # What an entry is comes with the listing; only a link costs a look.
            is_folder = self._leads_to_folder(entry, way) if entry.is_symlink() else entry.is_dir(follow_symlinks=False)
            if is_folder:
                self._collect(entry.path, f"{key}/{entry.name}", way, keys)
            elif is_folder is not None:
                keys.append(f"{key}/{entry.name}")

    def _leads_to_folder(self, link: os.DirEntry[str], way: tuple[str, ...]) -> bool | None:
        """Return whether a link leads to a folder; None if it leads nowhere.

        Raises:
            OSError: It leads out of the store to nowhere, or back to a folder through which it was reached.
        """
        try:
            target = link.stat()
        except FileNotFoundError:
            self._refuse_unmounted(Path(link.path))
            return None
        if not stat.S_ISDIR(target.st_mode):
            return False
        if any(os.path.samestat(target, os.stat(folder)) for folder in way):
            raise OSError(errno.ELOOP, f"{link.path} is a link to a folder that holds it; delete it")
        return True

    def _refuse_unmounted(self, path: Path) -> None:
        """Raise `OSError` if a path is absent because a link on the way to it leads out of the store to nowhere."""
        link = next((one for one in (path, *path.parents) if os.path.lexists(one)), None)
        if link is None or not link.is_symlink() or os.path.exists(link):
            return
        target, root = os.path.realpath(link), os.path.realpath(self.root)
        if link == self.root or not Path(target).is_relative_to(root):
            # No `FileNotFoundError`, which would say that there is nothing to be found.
            raise OSError(errno.ENXIO, f"{link} is a link to {target}, which is not there; mount it or delete the link")

    def _empty_linked(self, link: Path) -> None:
        """Delete what is in the folder that a link leads to, if that is neither in the store nor around it."""
        target, root = Path(os.path.realpath(link)), Path(os.path.realpath(self.root))
        if not target.is_dir() or target.is_relative_to(root) or root.is_relative_to(target):
            return
        for path in target.iterdir():
            if path.is_dir() and not path.is_symlink():
                _delete_folder(path)
            else:
                path.unlink(missing_ok=True)
        # It may be where a disk is mounted, or in a folder of somebody else's.
        with contextlib.suppress(OSError):
            target.rmdir()

    def _write(self, path: Path, chunks: Iterable[Buffer], publish: Callable[[Path, Path], None] | None = None) -> int:
        """Write beside the target, make it durable, publish it under its name."""
        if self.must_exist and not self.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the directory is not there any more", str(self.root))
        with atomic_file(path, publish) as temporary, temporary.open("r+b", buffering=0) as stream:
            return sum(write_all(stream, chunk) for chunk in chunks)


def _link_new(temporary: Path, path: Path) -> None:
    """Give the written file its name unless the name is taken (a rename would overwrite silently)."""
    try:
        os.link(temporary, path)
    except FileExistsError as error:
        raise AlreadyExistsError(f"{path} exists already; nothing was written over it") from error
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise UserError(
            f"the file system of {path.parent} has no hard links ({error.strerror}), so a checkpoint can't be "
            "committed atomically on it; use a local disk or NFS"
        ) from error


def _delete_folder(top: Path) -> None:
    """Delete a folder although others may delete in it, or still write into it, at the same time."""
    met, refilled = 0, 0
    while True:
        try:
            return shutil.rmtree(top)
        except OSError as error:
            if not top.exists():
                return None
            # Another one was faster with a file, which is progress; one who still writes is not.
            met += error.errno == errno.ENOENT
            refilled += error.errno == errno.ENOTEMPTY
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or met > _MOST_MEETINGS or refilled >= _DELETE_TRIES:
                raise
