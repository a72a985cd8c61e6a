"""What every store has in common: keys, and how files are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.storage import LocalStore
from tests.unit.storage.short_reads import read_little

CONTENT = bytes(range(256)) * 5


@pytest.mark.parametrize("most", [1, 100, 1279])
def test_a_read_is_whole_however_little_the_kernel_gives_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    store = LocalStore(tmp_path)
    store.create("a", [CONTENT])
    read_little(monkeypatch, most)
    with store.open("a") as file:
        for start, size in ((0, 1280), (0, 0), (3, 100), (3, 101), (0, 1), (1279, 1)):
            assert file.read_at(start, size) == CONTENT[start : start + size]
            file.seek(start)
            assert file.read(size) == CONTENT[start : start + size]
            assert file.tell() == start + size
        file.seek(1000)
        assert file.read(281) == file.read_at(1000, 281) == CONTENT[1000:]
        assert file.read(1) == file.read_at(1280, 1) == file.read_at(5000, 1) == b""
    assert store.read_whole("a") == CONTENT
