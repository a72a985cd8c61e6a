from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from ray_ulysses.checkpoint.notice import Notice
from ray_ulysses.run.requests import (
    RequestWatch,
    clear_stop,
    exclude_nodes,
    excluded_nodes,
    preemption_noticed,
    request_save,
    request_stop,
    stop_requested,
)
from ray_ulysses.run_names import EXCLUDED_FILE, NOTICE_FILE, SAVE_FILE, STOP_FILE
from ray_ulysses.storage import background
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import open_store, place_of
from tests.polling import wait_until
from tests.s3_server import FaultyProxy, S3Server


def test_a_request_stops_the_session_that_it_is_meant_for_until_it_is_cleared(tmp_path: Path) -> None:
    assert stop_requested(tmp_path / "missing", "now") is None
    for session, reason, expected in (
        ("earlier", "stop", None),
        ("now", "resize", "resize"),
        ("now", "stop", "stop"),
        # The user may stop the run while the driver requests a resize.
        ("now", "resize", "stop"),
    ):
        request_stop(tmp_path, session, reason)
        assert stop_requested(tmp_path, "now") == expected and stop_requested(tmp_path, "") is None
    for _ in range(2):
        clear_stop(tmp_path)
        assert stop_requested(tmp_path, "now") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["bytes", "directory", "pipe", "empty", "stale"])
def test_an_odd_request_file_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    for path in (tmp_path / STOP_FILE, tmp_path / NOTICE_FILE):
        if kind == "directory":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.write_bytes(b"\xff\xfe\x00" * 1000 if kind == "bytes" else b"")
    for call in ("open", "stat", "lstat") if kind == "stale" else ():
        monkeypatch.setattr(os, call, Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    assert stop_requested(tmp_path, "now") is None
    assert preemption_noticed(tmp_path) == (None if kind == "stale" else Notice())


def test_each_attempt_takes_a_request_to_save_once_until_its_checkpoint_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "PROMPT_S", 60.0)
    for content in ("", "written by a person"):
        (tmp_path / SAVE_FILE).write_text(content)
        # The first attempt fails before the commit.
        for watch in (RequestWatch(tmp_path, "now"), RequestWatch(tmp_path, "now")):
            for expected in (True, False, False):
                watch.look()
                assert watch.take_save() == expected
            watch.close()
    watch = RequestWatch(tmp_path, "now")
    watch.look()
    assert watch.take_save()
    delete, tries = LocalStore.delete_files, Mock(side_effect=[OSError(errno.EIO, "the store failed"), None])
    monkeypatch.setattr(LocalStore, "delete_files", lambda self, keys: tries() or delete(self, keys))
    watch.saved(watch.taken or 0.0)
    assert watch._calls.wait(60.0) and tries.call_count == 1
    watch.look()
    assert not watch.take_save() and not (tmp_path / SAVE_FILE).exists()
    request_save(tmp_path)
    watch.look()
    assert watch.take_save()
    watch.close()


def test_a_request_to_save_that_is_made_during_the_save_for_another_is_served_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "PROMPT_S", 60.0)
    watch = RequestWatch(tmp_path, "now")
    for made_at in (100, 200, 300):
        request_save(tmp_path)
        os.utime(tmp_path / SAVE_FILE, (made_at, made_at))
        # The save for the request before this one ends before this request is seen, or afterwards.
        if made_at == 200:
            watch.saved(100.0)
        watch.look()
        assert watch.take_save() and watch.taken == made_at
        if made_at == 300:
            watch.saved(200.0)
        watch.look()
        assert not watch.take_save() and (tmp_path / SAVE_FILE).exists()
    watch.close()


@pytest.mark.parametrize(
    ("content", "deadline"),
    [(b"", None), (b" 1700000000.5\n", 1.7e9 + 0.5), (b"soon", None), (b"nan", None), (b"\xff", None)],
)
def test_a_notice_lasts_with_its_file_and_may_expire(tmp_path: Path, content: bytes, deadline: float | None) -> None:
    (tmp_path / NOTICE_FILE).write_bytes(content)
    assert preemption_noticed(tmp_path) == preemption_noticed(tmp_path) == Notice(deadline=deadline)
    (tmp_path / NOTICE_FILE).unlink()
    assert preemption_noticed(tmp_path) is None


def test_excluded_nodes_are_those_of_the_session_and_add_up(tmp_path: Path) -> None:
    assert excluded_nodes(tmp_path, "one") == {}
    exclude_nodes(tmp_path, "one", {"a": 1.4})
    exclude_nodes(tmp_path, "one", {"a": 1.6, "b" * 56: 2.0, **{f"{number:056d}": 1.5 for number in range(100)}})
    found = excluded_nodes(tmp_path, "one")
    assert len(found) == 102 and found["a"] == 1.6 and found["b" * 56] == 2.0
    # One left by an earlier command.
    assert excluded_nodes(tmp_path, "two") == {}
    exclude_nodes(tmp_path, "two", {"c": 3.0})
    assert excluded_nodes(tmp_path, "two") == {"c": 3.0} and excluded_nodes(tmp_path, "one") == {}
    assert {path.name for path in tmp_path.iterdir()} == {EXCLUDED_FILE}
    for torn in ("", "two", "two c=", "two =1.0 c", "two c=x"):
        (tmp_path / EXCLUDED_FILE).write_text(torn)
        assert excluded_nodes(tmp_path, "two") == {}


def test_in_an_object_store_a_thread_looks_for_the_requests(s3: S3Server, prefix: str) -> None:
    place = place_of(s3.uri(prefix))
    request_save(place)
    watch = RequestWatch(place, "now", every_s=3600.0)
    wait_until(lambda: watch.take_save(), "what was requested before", timeout_s=20)
    watch.saved(watch.taken or 0.0)
    wait_until(lambda: SAVE_FILE not in open_store(place).root_names(), "its end", timeout_s=20)
    watch.close()
    watch = RequestWatch(place, "now", every_s=0.02)
    assert watch.stop() is None and watch.notice() is None and not watch.take_save()
    request_save(place)
    wait_until(lambda: watch.take_save(), "the request to save", timeout_s=20)
    watch.saved(watch.taken or 0.0)
    wait_until(lambda: SAVE_FILE not in open_store(place).root_names(), "its end", timeout_s=20)
    assert not watch.take_save()
    open_store(place).replace(NOTICE_FILE, [b"1700000000"])
    wait_until(lambda: watch.notice() == Notice(deadline=1.7e9), "the notice", timeout_s=20)
    open_store(place).delete(NOTICE_FILE)
    wait_until(lambda: watch.notice() is None, "its end", timeout_s=20)
    request_stop(place, "earlier")
    for reason in ("resize", "stop"):
        request_stop(place, "now", reason)
        request_stop(place, "now", "resize")
        wait_until(lambda reason=reason: watch.stop() == reason, reason, timeout_s=20)
    clear_stop(place)
    wait_until(lambda: watch.stop() is None, "its end", timeout_s=20)
    for node in "ab":
        exclude_nodes(place, "now", {node: 1.5})
    assert excluded_nodes(place, "now") == {"a": 1.5, "b": 1.5} and excluded_nodes(place, "then") == {}
    watch.close()


def test_clearing_a_request_outlasts_a_short_outage(s3: S3Server, proxy: FaultyProxy, prefix: str) -> None:
    """A generation that clears the request for the one before it would fail before its first step."""
    place = place_of(s3.uri(prefix, proxy.port))
    request_stop(place, "now", "resize")
    until = time.monotonic() + 2.0
    proxy.fail("503", lambda method, path: method in ("POST", "DELETE") and time.monotonic() < until, 10**6)
    clear_stop(place)
    assert stop_requested(place, "now") is None


def test_an_unreadable_request_remains_valid(s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(s3.uri(prefix))
    request_stop(place, "now")
    watch = RequestWatch(place, "now", every_s=0.02)
    wait_until(lambda: watch.stop() == "stop", "the stop", timeout_s=20)
    read, tries = ObjectStore.read_whole, []

    def failing(self: ObjectStore, key: str, limit: int = -1) -> bytes:
        tries.append(key)
        raise OSError(errno.EIO, "the store failed")

    monkeypatch.setattr(ObjectStore, "read_whole", failing)
    open_store(place).create(NOTICE_FILE, [b"1"])
    wait_until(lambda: tries.count(NOTICE_FILE) >= 2, "looks at the notice", timeout_s=20)
    assert watch.stop() == "stop" and watch.notice() == Notice()
    monkeypatch.setattr(ObjectStore, "read_whole", read)
    wait_until(lambda: watch.notice() == Notice(deadline=1.0), "the deadline", timeout_s=20)
    watch.close()


def test_an_unreachable_store_requests_nothing_without_blocking(s3: S3Server, proxy: FaultyProxy, prefix: str) -> None:
    place = place_of(s3.uri(prefix, proxy.port))
    proxy.fail("503", times=1_000_000)
    watch = RequestWatch(place, "now", every_s=0.02)
    began = time.monotonic()
    for _ in range(1000):
        assert watch.stop() is None and watch.notice() is None and not watch.take_save()
    assert time.monotonic() - began < 30
    proxy.heal()
    request_stop(place, "now")
    wait_until(lambda: watch.stop() == "stop", "the stop", timeout_s=30)
    watch.close()


def test_a_hung_directory_blocks_one_step_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PROMPT_S", 60.0)
    watch, gate, listdir = RequestWatch(tmp_path, "now"), threading.Event(), os.listdir
    for ask, expected in (
        (lambda: request_stop(tmp_path, "now", "resize"), "resize"),
        (lambda: clear_stop(tmp_path), None),
    ):
        ask()
        watch.look()
        assert watch.stop() == expected
    request_save(tmp_path)
    request_stop(tmp_path, "now")
    (tmp_path / NOTICE_FILE).write_text("1700000000")
    monkeypatch.setattr(background, "PROMPT_S", 0.1)
    monkeypatch.setattr(os, "listdir", lambda path: gate.wait(60.0) and listdir(path))
    began = time.monotonic()
    for _ in range(1000):
        watch.look()
        assert watch.stop() is None and watch.notice() is None and not watch.take_save()
    assert time.monotonic() - began < 30.0
    gate.set()
    wait_until(watch.take_save, "the look", timeout_s=20)
    assert watch.stop() == "stop" and watch.notice() == Notice(deadline=1.7e9)
    watch.close()
