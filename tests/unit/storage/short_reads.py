"""A store whose streams give few bytes at a time, as raw streams may."""

from __future__ import annotations

import io
from typing import Any, BinaryIO, cast

from ray_ulysses.storage import Store
from tests.stores import HookedStore


class ShortStream(io.RawIOBase, BinaryIO):  # type: ignore[misc]  # their annotations of `write` differ
    """Gives at most so many bytes at once, whatever it is asked for."""

    def __init__(self, content: bytes, most: int) -> None:
        self._inner, self._most = io.BytesIO(content), most

    def read(self, size: int | None = -1, /) -> bytes:
        """Return some bytes; none at the end only."""
        return self._inner.read(self._most if size is None or size < 0 else min(size, self._most))

    def readinto(self, buffer: Any, /) -> int:
        """Fill some of a buffer."""
        return self._inner.readinto(memoryview(buffer)[: self._most])

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a position."""
        return self._inner.seek(offset, whence)

    def tell(self) -> int:
        """Return the position."""
        return self._inner.tell()

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return True."""
        return True


class ShortStore(HookedStore):
    """A store of which every opened file is a `ShortStream`."""

    def __init__(self, inner: Store, most: int) -> None:
        super().__init__(inner)
        self._most = most

    def open(self, key: str) -> BinaryIO:
        """Return a stream that gives little at a time."""
        with self.inner.open(key) as stream:
            return cast(BinaryIO, ShortStream(stream.read(), self._most))
