"""The storage check: good directories stay clean, bad ones are named with a reason."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage import LocalStore, check_storage


def test_a_good_directory_passes_and_stays_empty(tmp_path: Path) -> None:
    check_storage(tmp_path / "new" / "storage")
    assert os.listdir(tmp_path / "new" / "storage") == []


def test_a_path_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match=r"run\.storage='.*/file/x' can't be written: Not a directory; make"):
        check_storage(tmp_path / "file" / "x")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="can't be written: Permission denied"):
        check_storage(tmp_path)
    tmp_path.chmod(0o700)


def test_permission_denied_is_said_even_to_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(UserError, match="can't be written: Permission denied"):
        check_storage(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_store_where_two_writers_win_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "create", LocalStore.replace)
    with pytest.raises(UserError, match="two writers can create the same file there"):
        check_storage(tmp_path)
