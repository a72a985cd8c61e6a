"""What a supervisor sees of a child: whether it, or the launcher that would tell its end, is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ray_ulysses.supervision.order import process_state
from ray_ulysses.supervision.shared_progress import SharedProgress
from ray_ulysses.supervision.supervisor import LAUNCHER_STOPPED, PROCESS_STOPPED, WatchedChild
from tests.polling import wait_until


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    found = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
    try:
        yield found
    finally:
        for process in found:
            process.kill()
            process.wait()


@pytest.mark.parametrize("stopped", [PROCESS_STOPPED, LAUNCHER_STOPPED])
def test_what_is_stopped_for_a_second_is_named(processes: list[subprocess.Popen[bytes]], stopped: str) -> None:
    child, launcher = processes
    order: Any = None
    stacks = os.memfd_create("stacks", os.MFD_CLOEXEC)
    watched = WatchedChild(order=order, progress=SharedProgress.create(), stacks=stacks, started_at=0.0, pid=child.pid)
    one = child if stopped == PROCESS_STOPPED else launcher
    assert watched.find_stop(launcher.pid, 10.0) is None
    for begun in (20.0, 40.0):
        one.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state(one.pid) == "T", "it is stopped")
        assert watched.find_stop(launcher.pid, begun) is None
        assert watched.find_stop(launcher.pid, begun + 0.9) is None
        assert watched.find_stop(launcher.pid, begun + 1.1) == stopped
        # One that goes on within the second was not stopped for long.
        one.send_signal(signal.SIGCONT)
        wait_until(lambda: process_state(one.pid) != "T", "it goes on")
        assert watched.find_stop(launcher.pid, begun + 2.0) is None
    watched.close()
