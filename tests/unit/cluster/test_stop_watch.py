"""A stopped process is killed by who waits for it, and one that goes on is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from ray_ulysses.cluster.controller import StopWatch
from ray_ulysses.supervision.launcher_process import process_state
from tests.polling import wait_until
from tests.unit.vault.test_agent import SetClock


def test_a_process_that_stays_stopped_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        clock = SetClock()
        watch = StopWatch(process.pid, os.stat("/proc/self/ns/pid").st_ino, clock)
        elsewhere = StopWatch(process.pid, 7, clock)
        watch.look()
        for _ in range(2):
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: process_state(process.pid) == "T", "it is stopped")
            watch.look()
            clock.sleep(4.0)
            watch.look()
            elsewhere.look()
            process.send_signal(signal.SIGCONT)
            wait_until(lambda: process_state(process.pid) != "T", "it goes on")
            watch.look()
            clock.sleep(4.0)
        assert process.poll() is None
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state(process.pid) == "T", "it is stopped")
        for one in (watch, elsewhere):
            one.look()
        clock.sleep(5.5)
        elsewhere.look()
        assert process.poll() is None, "that process is of another container"
        watch.look()
        assert process.wait(20) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
