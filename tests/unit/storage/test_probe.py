"""The storage check: good directories stay clean, bad ones are named with a reason."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.storage import LocalStore, check_storage, open_store
from tests.s3_server import FaultyProxy, S3Server


def test_a_good_place_passes_and_stays_empty(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    check_storage(tmp_path / "new" / "storage")
    assert os.listdir(tmp_path / "new" / "storage") == []
    check_storage(s3.uri(prefix), setting="checkpoint.storage")
    assert s3.client().list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents") is None


@pytest.mark.parametrize("is_known", [False, True])
def test_a_store_with_two_winners_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    monkeypatch.setattr(LocalStore, "create", LocalStore.replace)
    with pytest.raises(UserError, match="two writers"):
        check_storage(tmp_path, is_known=is_known)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("call", "reason"), [("link", "does not support hard links"), ("fsync", "Permission denied")])
def test_a_failing_call_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, reason: str) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match=r"^checkpoint\.storage='.*/file/x': .*Not a directory"):
        check_storage(tmp_path / "file" / "x", setting="checkpoint.storage")
    error = OSError(errno.EPERM if call == "link" else errno.EACCES, "Permission denied")
    monkeypatch.setattr(os, call, Mock(side_effect=error))
    with pytest.raises(UserError, match=rf"^checkpoint\.storage='.*{reason}") as refused:
        check_storage(tmp_path, setting="checkpoint.storage")
    assert "run.storage" not in str(refused.value) and os.listdir(tmp_path) == ["file"]


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
def test_lies_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, lie: Any, text: str) -> None:
    monkeypatch.setattr(LocalStore, method, lie)
    with pytest.raises(UserError, match=rf"run\.storage='.*': .*{text}"):
        check_storage(tmp_path)
