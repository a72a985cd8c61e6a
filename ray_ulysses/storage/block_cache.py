"""A size-limited disk cache for blocks of remote files, shared by all processes of a node.

The cache stores each file in segments of 16 MiB. A segment is a sparse file of 64 KiB blocks, followed by a table of
block sizes. A writer stores a block before its size, and all writers store the same bytes, so readers need no lock: a
block with a size is complete. After a power cut a lost block may still have a size. Readers therefore verify the
content and drop damaged blocks (`BlockCache.drop`). The least recently used segments are evicted first.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from ray_ulysses.errors import UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.storage.location import expand_home
from ray_ulysses.storage.store import StoredFile

BLOCK_BYTES = 64 << 10
SEGMENT_BLOCKS = 256
FOLDER_VARIABLE, SIZE_VARIABLE = "RAY_ULYSSES_CACHE_DIR", "RAY_ULYSSES_CACHE_GIB"
DEFAULT_GIB = 32.0
_SEGMENT_BYTES = SEGMENT_BLOCKS * BLOCK_BYTES
_DISK_UNIT = 512
_NEW_BETWEEN_LOOKS = 16
_TOUCH_S = 60.0
log = get_logger(__name__)


class BlockCache:
    """A disk cache of file blocks. If the cache fails, reads are slower but still correct.

    Args:
        folder: The folder for the segments; None disables the cache.
        max_bytes: Maximum disk usage of all segments, in bytes.
    """

    def __init__(self, folder: Path | None, max_bytes: int) -> None:
        self._folder = folder if max_bytes > 0 else None
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._touched: dict[Path, float] = {}
        self._num_new = 0
        self._is_broken = False

    def get(self, file: str, block: int) -> bytes | None:
        """Return a block's content, or None if the block is not cached. A file's last block may be shorter."""
        path = self._segment(file, block)
        if path is None:
            return None
        index = block % SEGMENT_BLOCKS
        try:
            with path.open("rb", buffering=0) as stream:
                found = os.pread(stream.fileno(), 4, _SEGMENT_BYTES + 4 * index)
                size = int.from_bytes(found, "little")
                content = os.pread(stream.fileno(), size, index * BLOCK_BYTES) if 0 < size <= BLOCK_BYTES else b""
        except OSError:
            return None
        if not content or len(content) != size:
            return None
        self._touch(path)
        return content

    def put(self, file: str, block: int, content: bytes) -> None:
        """Cache a block. If a write fails, log a warning once and stop caching."""
        path = self._segment(file, block)
        if path is None or self._is_broken:
            return
        index = block % SEGMENT_BLOCKS
        try:
            is_new = not path.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.pwrite(descriptor, content, index * BLOCK_BYTES) == len(content):
                    os.pwrite(descriptor, len(content).to_bytes(4, "little"), _SEGMENT_BYTES + 4 * index)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._is_broken = True
            log.warning("%s: can't write to the cache (%s); data is read from the storage without caching", path, error)
            return
        if is_new:
            self._make_room()

    def drop(self, file: str, blocks: Iterable[int]) -> bool:
        """Delete the segments that contain the given damaged blocks, and return whether any segment was deleted."""
        found = False
        for path in {self._segment(file, block) for block in blocks} - {None}:
            assert path is not None
            with suppress(OSError):
                path.unlink()
                found = True
        return found

    def _segment(self, file: str, block: int) -> Path | None:
        if self._folder is None:
            return None
        name = hashlib.sha256(file.encode()).hexdigest()[:32]
        return self._folder / name / f"{block // SEGMENT_BLOCKS:08d}.blocks"

    def _touch(self, path: Path) -> None:
        """Update a segment's last-use time, at most once a minute."""
        now = time.monotonic()
        if now - self._touched.get(path, -_TOUCH_S) >= _TOUCH_S:
            self._touched[path] = now
            with suppress(OSError):
                os.utime(path)

    def _make_room(self) -> None:
        """Evict the least recently used segments, on every `_NEW_BETWEEN_LOOKS`-th call."""
        with self._lock:
            self._num_new += 1
            if self._num_new % _NEW_BETWEEN_LOOKS != 1:
                return
            self._touched.clear()
        assert self._folder is not None
        found = []
        for path in self._folder.glob("*/*.blocks"):
            with suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_blocks * _DISK_UNIT, path))
        # Leave space for the segments that are added before the next scan.
        left = max(self._max_bytes - _NEW_BETWEEN_LOOKS * _SEGMENT_BYTES, self._max_bytes // 2)
        for _, size, path in sorted(found, reverse=True):
            left -= size
            if left < 0:
                with suppress(OSError):
                    path.unlink()


class CachedObject(StoredFile):
    """One version of an object, read in blocks through the cache; see `StoredFile`."""

    def __init__(
        self, file: str, size: int, request: Callable[[Sequence[tuple[int, int]]], list[bytes]], cache: BlockCache
    ) -> None:
        """Set up the reader without reading any bytes.

        Args:
            file: The cache key of the object's version.
            size: The size of the object in bytes.
            request: A function that fetches byte ranges ``[start, end)`` from the store.
            cache: The cache for the blocks.
        """
        super().__init__(size)
        self._file, self._request_ranges, self._cache = file, request, cache
        self._near: dict[int, bytes] = {}

    def read_into(self, start: int, target: memoryview) -> int:
        """Read bytes from offset ``start`` into a buffer; see `StoredFile.read_into`."""
        blocks = _blocks(start, min(target.nbytes, self.size - start))
        content = memoryview(b"".join(self._read(blocks).values()))
        found = content[start - blocks.start * BLOCK_BYTES :][: target.nbytes]
        target[: found.nbytes] = found
        return found.nbytes

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Prefetch the blocks of several ranges into memory with parallel requests, replacing the last prefetch."""
        wanted = sorted({block for start, size in ranges for block in _blocks(start, min(size, self.size - start))})
        self._near = self._read(wanted)

    def forget(self, start: int, size: int) -> bool:
        """Drop a range's blocks, and return whether any of them may have come from the cache."""
        self._near = {}
        return self._cache.drop(self._file, _blocks(start, size))

    def _read(self, blocks: Sequence[int]) -> dict[int, bytes]:
        """Return blocks in the given order. Memory, the cache and the store are tried in turn for each block."""
        near = self._near
        found = {block: near.get(block) or self._cache.get(self._file, block) or b"" for block in blocks}
        for block, content in self._request([block for block, content in found.items() if not content]):
            self._cache.put(self._file, block, content)
            found[block] = content
        return found

    def _request(self, blocks: Sequence[int]) -> Iterable[tuple[int, bytes]]:
        """Fetch blocks from the store and yield them. Consecutive blocks are fetched as one range."""
        if not blocks:
            return
        runs = [[block for _, block in run] for _, run in groupby(enumerate(blocks), lambda one: one[1] - one[0])]
        ranges = [(run[0] * BLOCK_BYTES, min((run[-1] + 1) * BLOCK_BYTES, self.size)) for run in runs]
        for run, content in zip(runs, self._request_ranges(ranges), strict=True):
            for number, block in enumerate(run):
                yield block, content[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]


def _blocks(start: int, size: int) -> range:
    """Return the block numbers that cover ``size`` bytes from ``start``."""
    return range(start // BLOCK_BYTES, -(-(start + max(size, 0)) // BLOCK_BYTES))


def node_cache() -> BlockCache:
    """Return this node's cache, configured by environment variables.

    Raises:
        UserError: `SIZE_VARIABLE` has an invalid value.
    """
    text = os.environ.get(SIZE_VARIABLE, f"{DEFAULT_GIB:g}")
    try:
        gib = float(text)
    except ValueError:
        gib = -1.0
    if not 0 <= gib < 2**40:
        raise UserError(
            f"{SIZE_VARIABLE}={text!r} is not a size; set the disk space in GiB that a node may use to cache data from "
            "object stores, such as 100, or 0 to disable the cache"
        )
    return BlockCache(cache_folder("blocks"), int(gib * 2**30))


def cache_folder(name: str) -> Path:
    """Return a node-local cache folder, below `FOLDER_VARIABLE` if it is set, otherwise below the user's cache."""
    named = os.environ.get(FOLDER_VARIABLE)
    base = expand_home(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or expand_home("~/.cache"))
    return (base if named else base / "ray-ulysses") / name
