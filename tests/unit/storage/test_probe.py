"""The storage check: good directories stay clean, bad ones are named with a reason."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.commands.doctor import check_run_storage
from ray_ulysses.errors import UserError
from ray_ulysses.storage import LocalStore, check_storage, open_store
from tests.s3_server import FaultyProxy, S3Server


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
    def denied(path: Any, flags: int, *args: Any, **folder: Any) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied")
        return really_open(path, flags, *args, **folder)

    really_open = os.open
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(UserError, match="can't be written: Permission denied"):
        check_storage(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("is_known", [False, True])
def test_a_store_where_two_writers_win_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    monkeypatch.setattr(LocalStore, "create", LocalStore.replace)
    with pytest.raises(UserError, match="two writers can create the same file there"):
        check_storage(tmp_path, is_known=is_known)
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_links_is_refused_by_the_setting_that_gave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(UserError) as refused:
        check_storage(tmp_path, setting="checkpoint.storage")
    assert str(refused.value).startswith(f"checkpoint.storage='{tmp_path}': the file system of {tmp_path}/.probe-")
    assert "has no hard links (Operation not permitted)" in str(refused.value)
    assert "run.storage" not in str(refused.value) and os.listdir(tmp_path) == []


def test_a_good_bucket_passes_and_stays_empty(s3: S3Server, prefix: str) -> None:
    check_storage(s3.uri(prefix), setting="checkpoint.storage")
    assert s3.client().list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents") is None


def test_doctor_looks_at_a_bucket_too(s3: S3Server, prefix: str) -> None:
    check = check_run_storage(s3.uri(prefix))
    assert (check.level, check.detail) == ("ok", f"s3://bucket/{prefix} is writable, with atomic creation")
    check = check_run_storage(s3.uri("run").replace("bucket/", "no-such-bucket/"))
    assert check.level == "fail"
    assert check.detail.startswith("run.storage='s3://no-such-bucket/run?")
    assert check_run_storage("http://host/runs").level == "fail"


def test_a_server_that_ignores_conditional_puts_is_refused(s3: S3Server, proxy: FaultyProxy, prefix: str) -> None:
    proxy.fail("ignore-condition", times=10**6)
    uri = s3.uri(prefix, proxy.port)
    with pytest.raises(UserError) as refused:
        check_storage(uri, setting="checkpoint.storage")
    assert str(refused.value) == (
        f"checkpoint.storage={uri!r}: two writers can create the same file there (conditional puts are ignored), so "
        "a checkpoint can't be committed safely; use a local disk, NFS, or another object store"
    )
    assert open_store(s3.uri(prefix)).list(".probe") == []


def test_a_bucket_that_is_not_there_is_refused(s3: S3Server) -> None:
    uri = s3.uri("run").replace("bucket/", "no-such-bucket/")
    with pytest.raises(
        UserError, match=r"can't be written: the store refused: there is no such bucket; check the bucket"
    ):
        check_storage(uri, setting="checkpoint.storage")


def test_wrong_credentials_are_refused(s3: S3Server, prefix: str) -> None:
    s3.require_credentials(True)
    try:
        with pytest.raises(UserError, match=r"can't be written: the store refused: its answer to the credentials was"):
            check_storage(s3.uri(prefix), setting="checkpoint.storage")
    finally:
        s3.require_credentials(False)


@pytest.mark.parametrize(
    ("method", "lie", "text"),
    [
        ("list", lambda self, prefix: [], "a file that was written is missing from the list of its folder"),
        ("delete", lambda self, prefix: None, "a file that was deleted is still listed"),
        ("replace", lambda self, key, chunks: 0, "a file that was replaced is read as it was before"),
    ],
)
def test_a_store_that_does_not_do_what_it_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, lie: Any, text: str
) -> None:
    monkeypatch.setattr(LocalStore, method, lie)
    with pytest.raises(UserError, match=rf"run\.storage='.*': {text}; use a local disk"):
        check_storage(tmp_path)
