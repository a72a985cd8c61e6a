"""The run lock: one live holder, named to the second; a dead one's lock is free."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ray_ulysses.errors import RunError, UserError
from ray_ulysses.storage import RunLock, current_owner
from ray_ulysses.storage.lock import LOCK_FILE

_HOLDER = """
import sys, time
from ray_ulysses.storage import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


class _StillClock:
    def now(self) -> float:
        return 1_700_000_000.0

    def monotonic(self) -> float:
        return 0.0


def _start_holder(run_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _HOLDER, str(run_dir)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_live_run_is_refused_with_who_and_since_when(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    with RunLock(run_dir, _StillClock()), pytest.raises(UserError) as refused:
        RunLock(run_dir).acquire()
    assert str(refused.value) == (
        f"run.name='demo' is already running in {tmp_path}: held by process {os.getpid()} on host "
        f"{socket.gethostname()} since 2023-11-14 22:13:20 UTC; wait for it, stop it, or set another run.name"
    )


def test_another_process_is_respected_while_it_lives_and_taken_over_when_it_died(tmp_path: Path) -> None:
    holder = _start_holder(tmp_path)
    try:
        with pytest.raises(UserError, match=f"held by process {holder.pid} on host"):
            RunLock(tmp_path).acquire()
        owner = current_owner(tmp_path)
        assert owner is not None and owner.pid == holder.pid
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert current_owner(tmp_path) is None
    with RunLock(tmp_path) as lock:
        assert lock.taken_over_from is not None
        assert lock.taken_over_from.pid == holder.pid
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_a_stopped_holder_is_still_respected(tmp_path: Path) -> None:
    holder = _start_holder(tmp_path)
    try:
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(UserError, match=f"held by process {holder.pid} on host"):
            RunLock(tmp_path).acquire()
        holder.send_signal(signal.SIGCONT)
        with pytest.raises(UserError, match=f"held by process {holder.pid} on host"):
            RunLock(tmp_path).acquire()
    finally:
        holder.kill()
        holder.wait(timeout=10)
    with RunLock(tmp_path):
        pass


_CHILD = """
import subprocess, sys, time
from ray_ulysses.storage import RunLock
lock = RunLock(sys.argv[1])
lock.acquire()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_child_that_outlives_the_holder_does_not_hold_the_run(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", _CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    holder.kill()
    holder.wait(timeout=10)
    try:
        os.kill(child, 0)
        with RunLock(tmp_path) as lock:
            assert lock.taken_over_from is not None and lock.taken_over_from.pid == holder.pid
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_of_several_that_wait_for_a_dead_one_exactly_one_takes_over(tmp_path: Path) -> None:
    holder = _start_holder(tmp_path)
    holder.kill()
    holder.wait(timeout=10)
    barrier = threading.Barrier(6, timeout=20)

    def come(number: int) -> RunLock | None:
        lock = RunLock(tmp_path)
        barrier.wait()
        try:
            lock.acquire()
        except UserError:
            return None
        return lock

    with ThreadPoolExecutor(6) as pool:
        locks = [lock for lock in pool.map(come, range(6)) if lock is not None]
    assert len(locks) == 1
    assert locks[0].held
    locks[0].release()


def test_a_holder_notices_that_its_lock_was_given_to_another(tmp_path: Path) -> None:
    """As on NFS, when the server lost sight of a host, or when a person deleted the file."""
    first = RunLock(tmp_path, _StillClock())
    first.acquire()
    first.check()
    (tmp_path / LOCK_FILE).unlink()
    assert not first.held
    with pytest.raises(RunError, match=r"is no longer held by this process: its run\.lock is gone"):
        first.check()
    with RunLock(tmp_path) as second:
        assert second.held
        with pytest.raises(RunError, match=f"it was taken over by process {os.getpid()} on host"):
            first.check()
        first.release()
        # The late release leaves the new holder's note alone.
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
        assert second.held
    assert not second.held


def test_a_note_that_somebody_else_wrote_means_that_the_lock_is_lost(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        (tmp_path / LOCK_FILE).write_text('{"host": "other", "pid": 7, "since": 1700000000.0}')
        assert not lock.held
        with pytest.raises(RunError, match="taken over by process 7 on host other since 2023-11-14 22:13:20 UTC"):
            lock.check()


def test_a_lock_that_another_host_holds_comes_with_a_hint(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        (tmp_path / LOCK_FILE).write_text('{"host": "other", "pid": 7, "since": 1700000000.0}')
        with pytest.raises(UserError) as refused:
            RunLock(tmp_path).acquire()
    assert str(refused.value).endswith(
        f"or set another run.name. If that host is gone for good and two minutes have passed, delete "
        f"{tmp_path / LOCK_FILE}"
    )


def test_a_lock_file_that_was_deleted_in_between_is_not_the_one_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / LOCK_FILE
    path.write_text("")
    real_open = os.open

    def delete_after_opening(name: object, *args: object, **folder: int) -> int:
        descriptor = real_open(name, *args, **folder)  # type: ignore[call-overload]
        if name == path.name:
            monkeypatch.setattr(os, "open", real_open)
            path.unlink()
        return int(descriptor)

    monkeypatch.setattr(os, "open", delete_after_opening)
    with RunLock(tmp_path) as lock:
        assert lock.held
        with pytest.raises(UserError, match="is already running"):
            RunLock(tmp_path).acquire()


def test_a_released_lock_is_free_and_names_nobody(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()
    lock.release()
    with RunLock(tmp_path) as again:
        assert again.taken_over_from is None


def test_a_torn_note_does_not_stop_the_next_run(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text('{"host": "a", "pi')
    with RunLock(tmp_path) as lock:
        assert lock.taken_over_from is None


def test_a_storage_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.storage: .*file/demo can't be written \(Not a directory\)"):
        RunLock(tmp_path / "file" / "demo").acquire()


def test_asking_who_holds_a_run_leaves_nothing_behind(tmp_path: Path) -> None:
    assert current_owner(tmp_path) is None
    assert os.listdir(tmp_path) == []


def test_a_run_is_lost_only_when_another_says_that_it_has_it(tmp_path: Path) -> None:
    path, theirs = tmp_path / LOCK_FILE, '{"host": "other", "pid": 7, "since": 1700000000.0}'
    lock = RunLock(tmp_path)
    assert not lock.lost
    with lock:
        own = path.read_text()
        assert not lock.lost
        path.unlink()
        # Nobody has come yet; nor does an empty or a torn note say who.
        assert not lock.held and not lock.lost
        for text in ("", '{"host": "oth'):
            path.write_text(text)
            assert not lock.held and not lock.lost
        path.write_text(own)
        assert not lock.lost
        path.write_text(theirs)
        assert lock.lost
        with pytest.raises(RunError, match="taken over by process 7 on host other since 2023-11-14 22:13:20 UTC"):
            lock.check()
    assert path.read_text() == theirs


def test_a_run_directory_that_is_away_is_not_lost(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with RunLock(run_dir) as lock:
        run_dir.rename(tmp_path / "away")
        assert not lock.held and not lock.lost
        (tmp_path / "away").rename(run_dir)
        assert lock.held and not lock.lost


def test_a_full_disk_is_said_and_leaves_the_run_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(UserError, match=r"run\.storage: .* can't be written \(No space left on device\)"):
            RunLock(tmp_path).acquire()
    with RunLock(tmp_path) as lock:
        assert lock.held


@pytest.mark.parametrize("kind", ["a link", "a pipe"])
def test_a_lock_that_is_no_plain_file_is_refused_and_held_by_nobody(tmp_path: Path, kind: str) -> None:
    (tmp_path / "canary").write_text("stays")
    if kind == "a link":
        (tmp_path / LOCK_FILE).symlink_to(tmp_path / "canary")
    else:
        os.mkfifo(tmp_path / LOCK_FILE)
    assert current_owner(tmp_path) is None
    with pytest.raises(UserError, match=rf"{LOCK_FILE}(:)? is {kind}"):
        RunLock(tmp_path).acquire()
    assert (tmp_path / "canary").read_text() == "stays"
