from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from ray_ulysses.data.corpus.corpus import read_shards
from ray_ulysses.data.corpus.flat_file import BLOCK_BYTES, DamagedFileError, FlatFile, FlatFiles, FlatInfo, FlatWriter
from ray_ulysses.data.corpus.format import ShardInfo
from ray_ulysses.errors import UserError
from ray_ulysses.storage.local import LocalFile, LocalStore
from ray_ulysses.storage.retry import RetryPolicy, StorageAwayError
from tests.unit.storage.test_retry import SleepingClock, policy_of

U16 = np.dtype(np.uint16)


def write(path: Path, values: NDArray[np.integer], parts: int = 1) -> FlatInfo:
    writer = FlatWriter(path, values.dtype)
    for part in np.array_split(values, parts):
        writer.add(part)
    return writer.close()


def opened(path: Path, info: FlatInfo, dtype: np.dtype[Any] = U16) -> FlatFile:
    return FlatFile(LocalFile(path, path.parent), dtype, info)


def numbers(count: int, dtype: type = np.uint16, seed: int = 0) -> NDArray[np.integer]:
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max, count, dtype=dtype, endpoint=True)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int64])
@pytest.mark.parametrize("more", [-1, 0, 700])
def test_ranges_are_read_as_written_in_any_number_of_parts(tmp_path: Path, dtype: type, more: int) -> None:
    per_block = BLOCK_BYTES // np.dtype(dtype).itemsize
    values = numbers(2 * per_block + more, dtype)
    info = write(tmp_path / "f", values, parts=7)
    assert (tmp_path / "f").stat().st_size == info.num_bytes(values.dtype)
    assert write(tmp_path / "g", values) == info
    assert (tmp_path / "g").read_bytes() == (tmp_path / "f").read_bytes()
    borders = [0, 1, per_block - 1, per_block, per_block + 1, values.size - 1, values.size]
    for first in borders:
        for last in borders:
            if first <= last <= values.size:
                fresh = opened(tmp_path / "f", info, values.dtype)
                assert np.array_equal(fresh.read(first, last - first), values[first:last])


def test_a_flipped_bit_is_noticed_where_it_is_read_and_nowhere_else(tmp_path: Path) -> None:
    values = numbers(5 * BLOCK_BYTES // 2 + 100)
    info = write(tmp_path / "f", values)
    clean = (tmp_path / "f").read_bytes()
    size = values.size * 2
    for at in (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5, size - 1):
        damaged = bytearray(clean)
        damaged[at] ^= 0x40
        (tmp_path / "f").write_bytes(damaged)
        block = at // BLOCK_BYTES
        file = opened(tmp_path / "f", info)
        message = f"the block of 4096 bytes at byte {block * BLOCK_BYTES} does not match its checksum"
        for _ in range(2):
            with pytest.raises(DamagedFileError, match=message):
                file.read(at // 2, 1)
        with pytest.raises(DamagedFileError, match=message):
            file.read(0, values.size)
        for other in {0, 1, 2, 3, 4, 5} - {block}:
            first, last = other * BLOCK_BYTES // 2, min((other + 1) * BLOCK_BYTES // 2, values.size)
            assert np.array_equal(file.read(first, last - first), values[first:last])


def test_damaged_checksums_another_file_and_another_size_are_noticed_when_it_is_opened(tmp_path: Path) -> None:
    values = numbers(9000)
    info = write(tmp_path / "f", values)
    clean = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(clean[:-1] + bytes([clean[-1] ^ 1]))
    with pytest.raises(DamagedFileError, match="replaced by another of the same size, or its checksums are dam"):
        opened(tmp_path / "f", info)
    write(tmp_path / "f", numbers(9000, seed=1))
    with pytest.raises(DamagedFileError, match="replaced by another of the same size"):
        opened(tmp_path / "f", info)
    for content in (clean[:-1], clean + b"\0", b""):
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(DamagedFileError, match=rf"{len(content)} bytes, expected {len(clean)}"):
            opened(tmp_path / "f", info)


def test_a_file_that_is_replaced_or_truncated_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    values, others = numbers(3 * BLOCK_BYTES), numbers(3 * BLOCK_BYTES, seed=1)
    info = write(tmp_path / "f", values)
    write(tmp_path / "other", others)
    file, own = opened(tmp_path / "f", info), (tmp_path / "f").read_bytes()
    for first in (0, 5000, values.size - 1):
        assert np.array_equal(file.read(first, 1), values[first : first + 1])
    # The open file gets the other one's content, checksums included.
    (tmp_path / "f").write_bytes((tmp_path / "other").read_bytes())
    for first in (0, 5000, values.size - 1):
        with pytest.raises(DamagedFileError, match="does not match its checksum"):
            file.read(first, 1)
    (tmp_path / "f").write_bytes(own)
    os.truncate(tmp_path / "f", 10_001)
    assert np.array_equal(file.read(0, 4096), values[:4096])
    with pytest.raises(DamagedFileError, match="the file ends at byte 10001"):
        file.read(4000, 2000)


@pytest.fixture
def three(tmp_path: Path) -> tuple[list[Path], list[FlatInfo], NDArray[np.integer]]:
    paths = [tmp_path / name for name in "abc"]
    parts = [numbers(count, seed=count) for count in (5000, 0, 7001)]
    return paths, [write(path, part) for path, part in zip(paths, parts, strict=True)], np.concatenate(parts)


def several(paths: list[Path], infos: list[FlatInfo], retry: RetryPolicy, max_open: int = 256) -> FlatFiles:
    def unreadable(name: str, reason: object) -> UserError:
        return UserError(f"{Path(name).name}: {reason}")

    folder, keys = LocalStore(paths[0].parent), [path.name for path in paths]
    return FlatFiles(folder, keys, infos, U16, unreadable=unreadable, retry=retry, max_open=max_open)


def test_files_follow_one_another_and_few_stay_open(three) -> None:
    paths, infos, values = three
    files = several(paths, infos, RetryPolicy(), max_open=1)
    files.check()

    def ranges(seed: int) -> Iterator[bool]:
        rng = np.random.default_rng(seed)
        for first in rng.integers(0, 12_001, 300).tolist():
            end = 5000 if first < 5000 else 12_001
            count = int(rng.integers(0, end - first))
            yield np.array_equal(files.read(first, count), values[first : first + count])

    # Files are closed while other threads read them.
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda seed: all(ranges(seed)), range(8)))
    assert len(os.listdir("/proc/self/fd")) < 100


def test_each_of_many_objects_is_opened_once_and_holds_what_was_fetched_last(tmp_path: Path) -> None:
    """A row of short documents takes one from each of hundreds of shards; opening one of a store waits for requests."""

    class FarFile(LocalFile):
        near: Sequence[tuple[int, int]] = ()

        def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
            self.near = ranges

    class FarFolder:
        files: ClassVar[list[FarFile]] = []

        def named(self, key: str) -> str:
            return key

        def open_ranges(self, key: str) -> FarFile:
            file = FarFile(tmp_path / key, tmp_path)
            self.files.append(file)
            return file

    (tmp_path / "shards").mkdir()
    info = write(tmp_path / "shards" / "0", numbers(9))
    shards = [ShardInfo(name="0", num_documents=1, tokens=info)] * 300
    folder: Any = FarFolder()
    files = read_shards(folder, shards, U16, RetryPolicy())
    for row in range(2):
        ranges = [(9 * number + row, 3) for number in range(row, 300)]
        files.fetch(ranges)
        for first, count in ranges:
            files.read(first, count)
    assert len(folder.files) == 300
    # Threads open them, in no order.
    assert sorted(bool(file.near) for file in folder.files) == [False] + 299 * [True]


def test_a_storage_that_comes_back_is_waited_for_and_the_file_opened_anew(
    three, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, infos, values = three
    clock = SleepingClock()
    files = several(paths, infos, policy_of(clock))
    preadv, failures, opened = os.preadv, [3], []

    def away(descriptor: int, buffers: Sequence[memoryview], start: int) -> int:
        if start < 10_000 and failures[0]:
            failures[0] -= 1
            opened.append(files._open[0])
            raise OSError(errno.ESTALE, "Stale file handle")
        return preadv(descriptor, buffers, start)

    monkeypatch.setattr(os, "preadv", away)
    assert np.array_equal(files.read(7, 100), values[7:107])
    assert len(set(map(id, opened))) == 3 and clock.pauses == [0.1, 0.2, 0.4]


def test_what_is_away_for_long_damaged_or_missing_is_named(three, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, infos, _ = three
    files = several(paths, [*infos[:2], replace(infos[2], blocks_crc32=1)], policy_of(SleepingClock()))
    with pytest.raises(UserError, match="c: the file was replaced by another"):
        files.check()
    with pytest.raises(UserError, match="c: the file was replaced by another"):
        files.read(5000, 1)
    content = bytearray(paths[0].read_bytes())
    content[8192] ^= 1
    paths[0].write_bytes(content)
    files.read(0, 100)
    with pytest.raises(UserError, match="a: the block of 4096 bytes at byte 8192"):
        files.read(0, 5000)
    paths[0].unlink()
    with pytest.raises(UserError, match=r"a: .*No such file or directory"):
        files.read(0, 1)

    def away(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "open", away)
    with pytest.raises(StorageAwayError, match=r"b: the storage did not respond for 60 s \(14 tries, the last"):
        several(paths[1:], infos[1:], policy_of(SleepingClock())).check()
