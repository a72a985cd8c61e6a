"""Links in a directory: what was moved to another disk is still there, and a disk that is away is not an absence."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ray_ulysses.storage import LocalStore
from ray_ulysses.storage.store import read_bytes


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "run")
    for key in ("a/one/x", "a/one/deep/y", "a/two/z"):
        store.create(key, [key.encode()])
    return store


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Another disk, with something of somebody else's on it."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "foreign").write_text("stays")
    return tmp_path / "disk"


def _move_and_link(folder: Path, disk: Path) -> Path:
    moved = Path(shutil.move(folder, disk / folder.name))
    folder.symlink_to(moved)
    return moved


def test_a_folder_that_was_moved_and_linked_back_is_listed(store: LocalStore, disk: Path) -> None:
    keys = store.list("a")
    _move_and_link(store.root / "a" / "one", disk)
    assert store.list("a") == keys == ["a/one/deep/y", "a/one/x", "a/two/z"]
    assert store.list("a/one") == ["a/one/deep/y", "a/one/x"]
    assert read_bytes(store, "a/one/x") == b"a/one/x"
    _move_and_link(store.root / "a", disk)
    assert store.list("a") == keys


def test_a_file_that_is_a_link_is_a_file(store: LocalStore, disk: Path) -> None:
    (store.root / "a" / "linked").symlink_to(disk / "foreign")
    assert store.list("a/linked") == ["a/linked"]
    assert "a/linked" in store.list("a")


@pytest.mark.parametrize("where", ["a/one", "a", "."])
def test_a_disk_that_is_not_mounted_is_no_absence(store: LocalStore, disk: Path, where: str) -> None:
    link = store.root / where
    moved = _move_and_link(link, disk)
    moved.rename(disk / "away")
    for prefix in ("a", "a/one", "a/one/deep"):
        with pytest.raises(OSError) as refused:
            store.list(prefix)
        assert not isinstance(refused.value, FileNotFoundError)
        assert refused.value.strerror == f"{link} is a link to {moved}, which is not there; mount it or delete the link"
    (disk / "away").rename(moved)
    assert store.list("a/one/deep") == ["a/one/deep/y"]


def test_a_link_to_what_the_store_has_deleted_hides_nothing(store: LocalStore) -> None:
    """As people make them: ``latest`` beside the checkpoints, of which the oldest are deleted."""
    (store.root / "a" / "latest").symlink_to("one")
    assert "a/latest/x" in store.list("a")
    store.delete("a/one")
    assert store.list("a") == ["a/two/z"]
    assert store.list("a/latest") == []


@pytest.mark.parametrize("target", [".", "..", "../..", "loop"])
def test_a_link_in_a_circle_fails_with_its_name(store: LocalStore, target: str) -> None:
    link = store.root / "a" / "loop"
    link.symlink_to(target)
    with pytest.raises(
        OSError, match=r"Too many levels of symbolic links: .*loop|loop is a link to a folder that holds"
    ):
        store.list("a")
    assert store.list("a/two") == ["a/two/z"]


def test_a_folder_that_can_not_be_a_folder_is_no_absence(store: LocalStore) -> None:
    with pytest.raises(NotADirectoryError):
        store.list("a/one/x/below")


def test_deleting_a_linked_folder_frees_its_disk_and_touches_nothing_around_it(store: LocalStore, disk: Path) -> None:
    moved = _move_and_link(store.root / "a" / "one", disk)
    (moved / ".writing-1").write_bytes(b"half")
    store.delete("a/one")
    assert store.list("a") == ["a/two/z"]
    assert sorted(os.listdir(disk)) == ["foreign"]


def test_a_link_inside_a_deleted_folder_only_goes_itself(store: LocalStore, disk: Path) -> None:
    (store.root / "a" / "one" / "elsewhere").symlink_to(disk)
    store.delete("a/one")
    assert store.list("a") == ["a/two/z"]
    assert (disk / "foreign").read_text() == "stays"


@pytest.mark.parametrize("target", ["two", "..", "../.."])
def test_deleting_a_link_to_what_holds_other_keys_takes_the_link_alone(store: LocalStore, target: str) -> None:
    (store.root / "a" / "link").symlink_to(target)
    store.delete("a/link")
    assert store.list("a") == ["a/one/deep/y", "a/one/x", "a/two/z"]


def test_deleting_a_dangling_link_takes_the_link(store: LocalStore, disk: Path) -> None:
    _move_and_link(store.root / "a" / "one", disk).rename(disk / "away")
    store.delete("a/one")
    assert store.list("a") == ["a/two/z"]
    assert (disk / "away" / "x").exists()


def test_listing_asks_no_file_what_it_is(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing of many shards on a network file system costs one call a folder, and not one a file."""
    for number in range(20):
        store.create(f"many/{number:02d}", [b""])
    asked: list[str] = []
    for name in ("stat", "lstat"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path, *a, _real=real, **k: asked.append(str(path)) or _real(path, *a, **k))
    assert len(store.list("many")) == 20
    assert not [path for path in asked if "/many/" in path]
