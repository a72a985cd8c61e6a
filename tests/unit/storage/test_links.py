"""Links below a store's root are not followed, for reading, writing or deleting; those on the way to it are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage import LocalStore
from ray_ulysses.storage.atomic import sweep_temporaries
from ray_ulysses.storage.regular import NotAPlainFileError, make_folder, open_regular, refuse_links


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "run")
    for key in ("a/one/x", "a/one/deep/y", "a/two/z"):
        store.create(key, [key.encode()])
    return store


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder outside the store, with files of the same names."""
    for name in ("x", "deep/y", ".writing-1"):
        (tmp_path / "disk" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "disk" / name).write_text("canary")
        os.utime(tmp_path / "disk" / name, (0, 0))
    return tmp_path / "disk"


def _content(folder: Path) -> dict[str, tuple[str, float]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_text(), path.stat().st_mtime) for path in files}


CALLS: dict[str, Callable[[LocalStore], object]] = {
    "open": lambda store: store.open("a/one/x"),
    "read": lambda store: store.read_whole("a/one/deep/y"),
    "create": lambda store: store.create("a/one/new", [b"new"]),
    "replace": lambda store: store.replace("a/one/x", [b"new"]),
    "list": lambda store: store.list("a"),
    "list below the link": lambda store: store.list("a/one/deep"),
    "delete": lambda store: store.delete("a/one/x"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_linked_folder_is_refused_by_its_name_and_stays_as_it_is(store: LocalStore, disk: Path, call: str) -> None:
    link, before = store.root / "a" / "one", _content(disk)
    shutil.rmtree(link)
    link.symlink_to(disk)
    with pytest.raises(NotAPlainFileError) as refused:
        CALLS[call](store)
    assert isinstance(refused.value, UserError) and refused.value.filename == str(link)
    # Callers put the reason alone into errors of their own.
    assert f"{link} is a link" in refused.value.strerror and "checkpoint.storage" in refused.value.strerror
    assert _content(disk) == before


@pytest.mark.parametrize("target", ["disk/x", "disk/nowhere", "pipe"])
def test_a_linked_file_is_neither_read_nor_written(store: LocalStore, disk: Path, target: str) -> None:
    os.mkfifo(disk.parent / "pipe")
    link, before = store.root / "a" / "one" / "x", _content(disk)
    link.unlink()
    link.symlink_to(disk.parent / target)
    with pytest.raises(NotAPlainFileError):
        store.open("a/one/x")
    with pytest.raises(NotAPlainFileError):
        store.list("a")
    assert store.replace("a/one/x", [b"own"]) == 3
    assert not link.is_symlink() and store.read_whole("a/one/x") == b"own"
    assert _content(disk) == before


def test_deleting_takes_the_link_alone(store: LocalStore, disk: Path) -> None:
    before = _content(disk)
    (store.root / "a" / "two" / "inside").symlink_to(disk)
    (store.root / "a" / "link").symlink_to(disk)
    for key in ("a/link", "a/two"):
        store.delete(key)
    assert store.list("a") == ["a/one/deep/y", "a/one/x"]
    assert _content(disk) == before


def test_the_root_and_its_parents_may_be_links(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.root)
    (tmp_path / "parent").symlink_to(tmp_path)
    for root in (tmp_path / "link", tmp_path / "parent" / "run"):
        linked = LocalStore(root)
        assert linked.list("a") == store.list("a")
        linked.replace("a/one/x", [root.name.encode()])
        assert store.read_whole("a/one/x") == root.name.encode()
        linked.delete("b")
        with open_regular(root / "a" / "one" / "x") as stream:
            assert stream.read() == root.name.encode()


@pytest.mark.parametrize("link", ["run", "."])
def test_a_root_whose_disk_is_not_mounted_is_no_absence(store: LocalStore, tmp_path: Path, link: str) -> None:
    """Otherwise the run would start from step 0."""
    place = tmp_path / "runs"
    place.symlink_to(tmp_path if link == "run" else tmp_path / "nowhere")
    if link == "run":
        store.root.rename(tmp_path / "moved")
        store.root.symlink_to(tmp_path / "nowhere")
    for prefix in ("a", "a/one/deep"):
        with pytest.raises(OSError, match="mount the target") as refused:
            LocalStore(place / "run").list(prefix)
        assert not isinstance(refused.value, FileNotFoundError)


def test_no_folder_is_made_or_swept_through_a_link(store: LocalStore, disk: Path) -> None:
    for link in (store.root / "link", store.root / "a" / "link"):
        link.symlink_to(disk)
    for folder in (store.root / "link", store.root / "link" / "new"):
        for refuse in (make_folder, refuse_links):
            with pytest.raises(NotAPlainFileError):
                refuse(folder, store.root)
    for folder in ("a", "link"):
        assert sweep_temporaries(store.root / folder, store.root) == ()
    assert (disk / ".writing-1").exists() and not (disk / "new").exists()
    for folder in (store.root / "absent" / "folder", disk):
        refuse_links(folder, store.root)
