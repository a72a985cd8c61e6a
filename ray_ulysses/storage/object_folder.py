"""A folder of an object store whose files are read by ranges, through the cache on the node's disk."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import BinaryIO

from ray_ulysses.storage.block_cache import BLOCK_BYTES, BlockCache
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.store import read_bytes

_PIECE_BYTES = 4 << 20


class RemoteFolder:
    """A prefix of an object store.

    Attributes:
        store: Its files.
        location: Its URI.
    """

    def __init__(self, store: ObjectStore, location: str, cache: BlockCache) -> None:
        """Use a store.

        Args:
            store: The store, whose root is the folder.
            location: The folder's URI, which tells apart what the cache holds of several.
            cache: Where blocks are kept.
        """
        self.store, self.location, self._cache = store, location, cache

    def __str__(self) -> str:
        return self.store.name

    def named(self, key: str) -> str:
        """Return the location of a file, without hosts."""
        return f"{self.store.name}/{key}"

    def exists(self) -> bool:
        """Return whether there is a file in it."""
        return self.store.has_files()

    def size(self, key: str) -> int:
        """Return the size of a file in bytes."""
        return self.store.look(key)[0]

    def read_whole(self, key: str) -> bytes:
        """Return the content of a file."""
        return read_bytes(self.store, key)

    def crc32(self, key: str) -> int:
        """Return the CRC-32 of the content of a file."""
        crc32 = 0
        with self.store.open(key) as stream:
            while part := stream.read(_PIECE_BYTES):
                crc32 = zlib.crc32(part, crc32)
        return crc32

    def for_arrow(self, key: str) -> BinaryIO:
        """Return a stream of a file."""
        return self.store.open(key)

    def open_ranges(self, key: str, *, fresh: bool = False) -> CachedObject:
        """Open a file, without the cache if it is to be fresh."""
        return CachedObject(self.store, key, self.location, BlockCache(None, 0) if fresh else self._cache)


class CachedObject:
    """An object as it was when it was opened, read in blocks.

    Attributes:
        size: Its size in bytes.
    """

    def __init__(self, store: ObjectStore, key: str, location: str, cache: BlockCache) -> None:
        """Ask for the size and the version of the object; raises FileNotFoundError if there is none."""
        self.size, version = store.look(key)
        self._store, self._key, self._cache = store, key, cache
        # Another version is another file.
        self._file = f"{location}\n{key}\n{version}\n{self.size}"
        self._near: dict[int, bytes] = {}

    def read_at(self, start: int, size: int) -> bytes:
        """Return ``size`` bytes from a place on, or fewer where the object ends."""
        blocks = _blocks(start, min(size, self.size - start))
        content = b"".join(self._read(blocks).values())
        offset = start - blocks.start * BLOCK_BYTES
        return content[offset : offset + size]

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Bring the blocks of ranges into memory, by requests at the same time, in place of those fetched before."""
        wanted = sorted({block for start, size in ranges for block in _blocks(start, min(size, self.size - start))})
        self._near = self._read(wanted)

    def forget(self, start: int, size: int) -> bool:
        """Drop the blocks of a range; return whether one of them may have come from the cache."""
        self._near = {}
        return self._cache.drop(self._file, _blocks(start, size))

    def _read(self, blocks: Sequence[int]) -> dict[int, bytes]:
        """Return blocks in their order, those from the store that are nowhere nearer."""
        near = self._near
        found = {block: near.get(block) or self._cache.get(self._file, block) or b"" for block in blocks}
        for block, content in self._request([block for block, content in found.items() if not content]):
            self._cache.put(self._file, block, content)
            found[block] = content
        return found

    def _request(self, blocks: Sequence[int]) -> Iterable[tuple[int, bytes]]:
        """Yield blocks from the store; those that follow one another are one range."""
        if not blocks:
            return
        runs = [[block for _, block in run] for _, run in groupby(enumerate(blocks), lambda one: one[1] - one[0])]
        ranges = [(run[0] * BLOCK_BYTES, min((run[-1] + 1) * BLOCK_BYTES, self.size)) for run in runs]
        for run, content in zip(runs, self._store.read_ranges(self._key, ranges), strict=True):
            for number, block in enumerate(run):
                yield block, content[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]


def _blocks(start: int, size: int) -> range:
    """Return the numbers of the blocks that hold a range."""
    return range(start // BLOCK_BYTES, -(-(start + max(size, 0)) // BLOCK_BYTES))
