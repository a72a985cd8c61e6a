from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage import block_cache
from ray_ulysses.storage.block_cache import BLOCK_BYTES, SEGMENT_BLOCKS, BlockCache, node_cache

GIB = 2**30


def block_of(number: int, size: int = BLOCK_BYTES) -> bytes:
    return random.Random(number).randbytes(size)


def test_blocks_are_found_by_any_cache_of_the_folder_until_they_are_dropped(tmp_path: Path) -> None:
    numbers = (0, 1, SEGMENT_BLOCKS - 1, SEGMENT_BLOCKS, 3 * SEGMENT_BLOCKS + 7)
    cache = BlockCache(tmp_path, GIB)
    for number in numbers:
        cache.put("a", number, block_of(number))
    cache.put("a", 5, block_of(5, 100))
    again = BlockCache(tmp_path, GIB)
    assert all(again.get("a", number) == block_of(number) for number in numbers)
    assert again.get("a", 5) == block_of(5, 100), "the last block of a file is shorter"
    assert again.get("a", 2) is None and again.get("a", 9 * SEGMENT_BLOCKS) is None and again.get("b", 0) is None
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*")) < 12 * BLOCK_BYTES, "not sparse"
    assert cache.drop("a", [1, 2]) and cache.get("a", 1) is None and not cache.drop("a", [1])


def test_a_block_that_was_not_written_whole_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, cache = os.pwrite, BlockCache(tmp_path, GIB)
    with monkeypatch.context() as cut:
        cut.setattr(os, "pwrite", lambda file, content, place: pwrite(file, content[: len(content) // 2], place))
        cache.put("a", 0, block_of(0))
    assert cache.get("a", 0) is None
    cache.put("a", 0, block_of(0))
    (segment,) = tmp_path.rglob("*.blocks")
    os.truncate(segment, 1000)
    assert cache.get("a", 0) is None


def test_the_segments_that_were_not_used_for_long_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "_NEW_BETWEEN_LOOKS", 2)
    limit = 20 * BLOCK_BYTES
    cache = BlockCache(tmp_path, limit)
    for number in range(40):
        cache.put("a", number * SEGMENT_BLOCKS, block_of(number))
        for path in tmp_path.rglob("*.blocks"):
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100))
        # The first block is read now and then, so its segment stays.
        monkeypatch.setattr(cache, "_touched", {})
        assert cache.get("a", 0) == block_of(0)
        size = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.blocks"))
        assert size <= limit, number
    assert cache.get("a", 39 * SEGMENT_BLOCKS) == block_of(39)
    assert cache.get("a", SEGMENT_BLOCKS) is None


def test_a_disk_that_takes_nothing_costs_only_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    for cache, num_warnings in ((BlockCache(None, GIB), 0), (BlockCache(tmp_path / "file", GIB), 1)):
        for block in (0, 1):
            cache.put("a", block, b"x")
        assert cache.get("a", 0) is None and not cache.drop("a", [0]) and len(caplog.records) == num_warnings


def test_the_environment_says_where_and_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path))
    node_cache().put("a", 0, b"x")
    assert list(tmp_path.glob("blocks/*/*.blocks"))
    monkeypatch.setenv("RAY_ULYSSES_CACHE_GIB", "0")
    assert node_cache().get("a", 0) is None
    for wrong in ("much", "-1", "nan"):
        monkeypatch.setenv("RAY_ULYSSES_CACHE_GIB", wrong)
        with pytest.raises(UserError, match=f"RAY_ULYSSES_CACHE_GIB='{wrong}'"):
            node_cache()
