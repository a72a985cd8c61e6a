"""Reads an object by ranges: a large read is one request for exactly its bytes, small ones in a row share one."""

from __future__ import annotations

import errno
import io
from typing import TYPE_CHECKING

import obstore

from ray_ulysses.storage.object_client import Client
from ray_ulysses.storage.object_errors import Refusal, explain
from ray_ulysses.storage.patience import Patience
from ray_ulysses.storage.store import Buffer

if TYPE_CHECKING:
    from obstore import GetOptions

# Below this a request costs more than its bytes: a read that continues where the last one ended fetches this many.
READ_AHEAD_BYTES = 64 * 2**10
_PIECE_BYTES = 4 * 2**20


class ObjectStream(io.BufferedIOBase):
    """A seekable stream of one object as it was when it was opened.

    Every request names the version that was opened, so that bytes of two versions are never mixed: a large object
    that is replaced while it is read gives an `OSError`, a small one is read whole when it is opened.
    """

    def __init__(self, client: Client, key: str, *, name: str, patience: Patience) -> None:
        """Request the size and version of the object.

        Args:
            client: The store.
            key: The object, relative to the client's prefix.
            name: What to call it in errors.
            patience: How long a broken read is taken up again.

        Raises:
            FileNotFoundError: There is no such object.
            OSError: The store does not give them.
        """
        self._client, self._key, self._object_name, self._patience = client, key, name, patience
        self._position, self._last_end = 0, -1
        self._ahead, self._ahead_start = memoryview(b""), 0
        self._look()

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to `size` bytes from the position, all of them if it is None or negative."""
        left = max(self._size - self._position, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        target = bytearray(wanted)
        self._fill(memoryview(target))
        return bytes(target)

    def read1(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes; like `read`, since nothing here waits for more than was asked."""
        return self.read(READ_AHEAD_BYTES if size < 0 else size)

    def readinto(self, target: Buffer, /) -> int:  # type: ignore[override]
        """Fill a buffer from the position and return how many bytes there were."""
        view = memoryview(target).cast("B")
        view = view[: max(self._size - self._position, 0)]
        self._fill(view)
        return len(view)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a position and return it; nothing is read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"can't seek to {base + offset}, before the beginning")
        self._position = base + offset
        return self._position

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def _fill(self, target: memoryview) -> None:
        """Fill the target from the position and advance past it."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        goes_on, start = self._position == self._last_end, self._position
        done = self._from_ahead(target, start)
        rest = target[done:]
        if rest.nbytes:
            if goes_on and rest.nbytes < READ_AHEAD_BYTES:
                ahead = bytearray(min(READ_AHEAD_BYTES, self._size - start - done))
                self._fetch(memoryview(ahead), start + done)
                self._ahead, self._ahead_start = memoryview(ahead), start + done
                self._from_ahead(rest, start + done)
            else:
                self._fetch(rest, start + done)
        self._position = self._last_end = start + target.nbytes

    def _from_ahead(self, target: memoryview, start: int) -> int:
        """Copy what was read ahead, if it begins before `start`; return how many bytes that were."""
        offset = start - self._ahead_start
        if not 0 <= offset < self._ahead.nbytes:
            return 0
        found = self._ahead[offset : offset + target.nbytes]
        target[: found.nbytes] = found
        return found.nbytes

    def _fetch(self, target: memoryview, start: int) -> None:
        """Fill the target by one request; if it breaks off, ask for the rest."""
        done, waiting = 0, self._patience.begin()
        while done < target.nbytes:
            options: GetOptions = {"range": (start + done, start + target.nbytes)}
            if self._version is not None:
                options["if_match"] = self._version
            before = done
            try:
                for piece in obstore.get(self._client, self._key, options=options).stream(_PIECE_BYTES):
                    content = memoryview(piece)
                    target[done : done + content.nbytes] = content
                    done += content.nbytes
                refusal, cause = Refusal(meaning="transient", reason="it sent too few bytes"), None
            except Exception as error:
                refusal, cause = explain(error), error
            if done > before:
                # A long read may break more than once; patience is for what does not move.
                waiting = self._patience.begin()
                continue
            if refusal.meaning == "changed":
                refusal = Refusal(meaning="changed", reason="the file was replaced while it was read")
            if not refusal.may_pass or not waiting.pause():
                raise refusal.as_os_error(self._object_name, waiting.waited_s) from cause

    def _look(self) -> None:
        """Ask for size and version, and read a small object at once, so that its replacement can't get between."""
        waiting, looks = self._patience.begin(), 0
        while True:
            looks += 1
            try:
                meta = obstore.head(self._client, self._key)
            except Exception as error:
                raise explain(error).as_os_error(self._object_name, waiting.waited_s) from error
            self._size, self._version = meta["size"], meta["e_tag"]
            if not 0 < self._size <= READ_AHEAD_BYTES:
                return
            content = bytearray(self._size)
            try:
                self._fetch(memoryview(content), 0)
            except OSError as error:
                # Once more however slow the store is: one replacement is no reason to give up.
                if error.errno in (errno.ESTALE, errno.ENOENT) and (looks == 1 or waiting.goes_on):
                    continue
                raise
            self._ahead = memoryview(content)
            return
