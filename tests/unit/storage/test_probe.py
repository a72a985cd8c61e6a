"""The storage check: good directories stay clean, bad ones are named with a reason."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage import LocalStore, check_storage, open_store
from tests.s3_server import FaultyProxy, S3Server


def test_a_good_directory_passes_and_stays_empty(tmp_path: Path) -> None:
    check_storage(tmp_path / "new" / "storage")
    assert os.listdir(tmp_path / "new" / "storage") == []


def test_a_path_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match=r"run\.storage='.*/file/x': can't write to this location .Not a directory"):
        check_storage(tmp_path / "file" / "x")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("is_known", [False, True])
def test_a_store_where_two_writers_win_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    monkeypatch.setattr(LocalStore, "create", LocalStore.replace)
    with pytest.raises(UserError, match="two writers"):
        check_storage(tmp_path, is_known=is_known)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("call", "reason"), [("link", "does not support hard links"), ("fsync", "Permission denied")])
def test_a_file_system_that_refuses_a_call_is_refused_by_the_setting_that_gave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, reason: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM if call == "link" else errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(UserError, match=rf"^checkpoint\.storage='.*{reason}") as refused:
        check_storage(tmp_path, setting="checkpoint.storage")
    assert "run.storage" not in str(refused.value) and os.listdir(tmp_path) == []


def test_a_good_bucket_passes_and_stays_empty(s3: S3Server, prefix: str) -> None:
    check_storage(s3.uri(prefix), setting="checkpoint.storage")
    assert s3.client().list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents") is None


def test_a_server_that_ignores_conditional_puts_is_refused(s3: S3Server, proxy: FaultyProxy, prefix: str) -> None:
    proxy.fail("ignore-condition", times=10**6)
    uri = s3.uri(prefix, proxy.port)
    with pytest.raises(UserError) as refused:
        check_storage(uri, setting="checkpoint.storage")
    assert f"checkpoint.storage={uri!r}: two writers" in str(refused.value)
    assert open_store(s3.uri(prefix)).list(".probe") == []


@pytest.mark.parametrize("is_there", [False, True], ids=["no bucket", "wrong credentials"])
def test_a_bucket_that_can_not_be_used_is_refused(s3: S3Server, prefix: str, is_there: bool) -> None:
    uri = s3.uri(prefix) if is_there else s3.uri("run").replace("bucket/", "no-such-bucket/")
    s3.require_credentials(is_there)
    try:
        with pytest.raises(UserError, match="403 Forbidden" if is_there else "bucket does not exist"):
            check_storage(uri)
    finally:
        s3.require_credentials(False)


@pytest.mark.parametrize(
    ("method", "lie", "text"),
    [
        ("list", lambda self, prefix: [], "lacks a new file"),
        ("delete", lambda self, prefix: None, "contains a deleted file"),
        ("replace", lambda self, key, chunks: 0, "old content of a replaced file"),
    ],
)
def test_a_store_that_does_not_do_what_it_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, lie: Any, text: str
) -> None:
    monkeypatch.setattr(LocalStore, method, lie)
    with pytest.raises(UserError, match=rf"run\.storage='.*': .*{text}"):
        check_storage(tmp_path)
