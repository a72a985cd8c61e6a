"""The run lock: one live holder, named to the second; a dead one's lock is free."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ray_ulysses.errors import UserError
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
