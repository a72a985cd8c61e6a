"""Flat files of integers with one checksum per block, written sequentially and read at any position.

A file has no header. It starts with the little-endian values, which ``np.memmap(path, dtype, "r", shape=n)`` can map.
The values are followed by the CRC-32 of each 4 KiB block as little-endian uint32.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.errors import UserError
from ray_ulysses.storage.place import FileStore
from ray_ulysses.storage.retry import READ_ERRORS, RetryPolicy
from ray_ulysses.storage.store import Buffer, StoredFile
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, Whole

T = TypeVar("T")
BLOCK_BYTES = 4096
_PENDING_BYTES = 256 * BLOCK_BYTES
_FETCHES = 32
MAX_OPEN_FILES = 256
MAX_OPEN_OBJECTS = 4096
"""Maximum number of open objects per reader. Each only caches its block checksums: about 20 kB for a 16 MiB shard."""


class DamagedFileError(OSError):
    """Error for a file that is readable but whose content differs from the content that was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatInfo:
    """Size and checksums of a flat file."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    num_items: Whole
    crc32: Whole
    """CRC-32 of the values' bytes."""
    blocks_crc32: Whole
    """CRC-32 of the block checksums."""

    def num_bytes(self, dtype: np.dtype[Any]) -> int:
        """Return the file size in bytes, including the checksums."""
        size = self.num_items * dtype.itemsize
        return size + 4 * _num_blocks(size)


class FlatWriter:
    """Appends values to a file, buffering about a megabyte in memory."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype.newbyteorder("<")
        self._file = path.open("wb")
        self._pending = bytearray()
        self._sums: list[int] = []
        self._crc32 = 0
        self.num_items = 0

    def add(self, values: NDArray[np.integer[Any]]) -> int:
        """Append values, which must fit the file's dtype, and return the position of the first appended value."""
        first = self.num_items
        self._pending += values.astype(self._dtype).tobytes()
        self.num_items += values.size
        if len(self._pending) >= _PENDING_BYTES:
            self._write(len(self._pending) // BLOCK_BYTES * BLOCK_BYTES)
        return first

    def close(self) -> FlatInfo:
        """Write the buffered values and the checksums, and return the file's size and checksums."""
        self._write(len(self._pending))
        sums = np.asarray(self._sums, dtype="<u4").tobytes()
        self._file.write(sums)
        self._file.close()
        return FlatInfo(num_items=self.num_items, crc32=self._crc32, blocks_crc32=zlib.crc32(sums))

    def abandon(self) -> None:
        """Close the file without writing buffered values. Errors are ignored, since the file will be deleted."""
        with suppress(OSError):
            self._file.close()

    def _write(self, size: int) -> None:
        blocks = bytes(memoryview(self._pending)[:size])
        del self._pending[:size]
        self._crc32 = zlib.crc32(blocks, self._crc32)
        self._sums += _sums_of(blocks)
        self._file.write(blocks)


def flat_content(values: NDArray[Any]) -> tuple[bytes, FlatInfo]:
    """Return the content of a flat file with the given values, and its size and checksums."""
    blocks = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    sums = np.asarray(_sums_of(blocks), dtype="<u4").tobytes()
    info = FlatInfo(num_items=values.size, crc32=zlib.crc32(blocks), blocks_crc32=zlib.crc32(sums))
    return blocks + sums, info


class FlatFile:
    """Thread-safe reader of a flat file that verifies the checksum of every block on every read.

    The checksums are verified each time because the file may be replaced or damaged while it is open.

    Raises:
        DamagedFileError: The file does not match ``info``.
        OSError: The file can't be read.
    """

    def __init__(self, file: StoredFile, dtype: np.dtype[Any], info: FlatInfo) -> None:
        self._dtype = dtype.newbyteorder("<")
        self._num_bytes = info.num_items * dtype.itemsize
        self._file = file
        expected = info.num_bytes(dtype)
        if file.size != expected:
            raise DamagedFileError(f"the file has {file.size} bytes, expected {expected}")
        place, size = self._num_bytes, expected - self._num_bytes
        sums = self._read_at(place, size)
        if zlib.crc32(sums) != info.blocks_crc32 and file.forget(place, size):
            sums = self._read_at(place, size)
        if zlib.crc32(sums) != info.blocks_crc32:
            raise DamagedFileError("the file was replaced by another of the same size, or its checksums are damaged")
        self._sums = np.frombuffer(sums, dtype="<u4")

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Return ``count`` values, starting at position ``first``.

        Raises:
            DamagedFileError: A block does not match its checksum.
            OSError: The file can't be read.
        """
        begin, size = self._place(first, count)
        low, high = begin // BLOCK_BYTES, _num_blocks(begin + size)
        start = low * BLOCK_BYTES
        blocks = self._read_at(start, min(high * BLOCK_BYTES, self._num_bytes) - start)
        damaged = self._damaged(blocks, low)
        if damaged is not None and self._file.forget(start, len(blocks)):
            # After a power failure, a local cache may lack part of the range.
            blocks = self._read_at(start, len(blocks))
            damaged = self._damaged(blocks, low)
        if damaged is not None:
            place = damaged * BLOCK_BYTES
            raise DamagedFileError(f"the block of {BLOCK_BYTES} bytes at byte {place} does not match its checksum")
        return np.frombuffer(blocks, dtype=self._dtype, count=count, offset=begin - start)

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch ranges ``(first, count)`` concurrently if the file is remote."""
        self._file.fetch([self._place(first, count) for first, count in ranges])

    def _place(self, first: int, count: int) -> tuple[int, int]:
        begin, size = first * self._dtype.itemsize, count * self._dtype.itemsize
        assert begin >= 0 and 0 <= size <= self._num_bytes - begin, (first, count)
        return begin, size

    def _damaged(self, blocks: Buffer, low: int) -> int | None:
        """Return the index of the first damaged block, or None. ``low`` is the index of the first block to check."""
        sums = _sums_of(blocks)
        expected = self._sums[low : low + len(sums)].tolist()
        return next((low + i for i, found in enumerate(sums) if found != expected[i]), None)

    def _read_at(self, start: int, size: int) -> bytearray:
        found = self._file.read_at(start, size)
        if len(found) < size:
            raise DamagedFileError(f"the file ends at byte {start + len(found)}")
        return found


class FlatFiles:
    """Reads several flat files of one dtype as one array, with at most ``max_open`` files open at a time.

    ``unreadable`` is called with a file's location and the reason, and returns the error for a file that can't be read.
    """

    def __init__(
        self,
        folder: FileStore,
        keys: Sequence[str],
        infos: Sequence[FlatInfo],
        dtype: np.dtype[Any],
        *,
        unreadable: Callable[[str, object], UserError],
        retry: RetryPolicy,
        max_open: int = MAX_OPEN_FILES,
    ) -> None:
        self._folder, self._keys, self._infos, self._dtype = folder, keys, infos, dtype
        self._starts = list(accumulate((info.num_items for info in infos), initial=0))
        self._unreadable, self._retry, self._max_open = unreadable, retry, max_open
        self._open: OrderedDict[int, FlatFile] = OrderedDict()
        self._near: set[int] = set()
        self._names: dict[int, str] = {}
        # The prefetch thread and the evaluation may read concurrently.
        self._lock = threading.Lock()

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Return ``count`` values, starting at position ``first`` of the array. They must be stored in one file.

        Raises:
            UserError: The file is missing, truncated or damaged, or has been replaced.
            StorageAwayError: The storage did not respond in time.
        """
        if count == 0:
            return np.empty(0, dtype=self._dtype)
        number = bisect_right(self._starts, first) - 1
        values: NDArray[Any] = self._call(
            number, partial(self._used, number, FlatFile.read, first - self._starts[number], count)
        )
        return values

    def holds(self, first: int, count: int) -> bool:
        """Return whether the ``count`` values that start at position ``first`` are stored in one file."""
        number = bisect_right(self._starts, first)
        return 0 < number < len(self._starts) and 0 <= count <= self._starts[number] - first

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch ranges ``(first, count)`` concurrently. Each range must be stored in one file. Raises like `read`."""
        by_file: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for first, count in ranges:
            if count > 0:
                number = bisect_right(self._starts, first) - 1
                by_file[number].append((first - self._starts[number], count))
        with self._lock:
            left = [self._open[number] for number in self._near - by_file.keys() if number in self._open]
            self._near = set(by_file)
        for file in left:
            # Release the ranges fetched for the previous row.
            file.fetch(())
        with ThreadPoolExecutor(min(_FETCHES, max(1, len(by_file)))) as pool:
            for done in [
                pool.submit(self._call, number, partial(self._used, number, FlatFile.fetch, wanted))
                for number, wanted in by_file.items()
            ]:
                done.result()

    def check(self) -> None:
        """Check the size and the block checksums of every file, without reading the blocks.

        Raises:
            UserError: A file is missing or has been replaced. The error names the first such file.
            StorageAwayError: The storage did not respond in time.
        """
        for number in range(len(self._keys)):
            self._call(number, partial(self._file, number))

    def _call(self, number: int, attempt: Callable[[], Any]) -> Any:
        name = self._names.get(number)
        if name is None:
            # Cached, since building a path takes longer than a short read.
            name = self._names[number] = self._folder.named(self._keys[number])
        try:
            return self._retry.call(name, attempt)
        except READ_ERRORS as error:
            raise self._unreadable(name, error) from error

    def _used(self, number: int, use: Callable[..., T], *arguments: Any) -> T:
        """Call ``use`` on a file. On failure, drop the open file, since a stale handle never recovers."""
        try:
            return use(self._file(number), *arguments)
        except READ_ERRORS:
            with self._lock:
                self._open.pop(number, None)
            raise

    def _file(self, number: int) -> FlatFile:
        with self._lock:
            opened = self._open.get(number)
            if opened is not None:
                self._open.move_to_end(number)
                return opened
        opened = FlatFile(self._folder.open_ranges(self._keys[number]), self._dtype, self._infos[number])
        with self._lock:
            self._open[number] = opened
            if len(self._open) > self._max_open:
                self._open.popitem(last=False)
        return opened


def _num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def _sums_of(blocks: Buffer) -> list[int]:
    view = memoryview(blocks)
    return [zlib.crc32(view[place : place + BLOCK_BYTES]) for place in range(0, len(blocks), BLOCK_BYTES)]
