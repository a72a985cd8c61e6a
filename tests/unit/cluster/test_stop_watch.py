"""A stopped process is continued by the process that waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from ray_ulysses.cluster.controller import StopWatch
from ray_ulysses.supervision.order import process_state
from tests.polling import wait_until
from tests.unit.peer_memory.test_agent import SetClock


def test_a_process_that_stays_stopped_is_continued() -> None:
    """A controller that is killed instead costs the start of all workers, who train well meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        clock = SetClock()
        watch = StopWatch(process.pid, os.stat("/proc/self/ns/pid").st_ino, clock)
        elsewhere = StopWatch(process.pid, 7, clock)
        watch.look()
        for _ in range(2):
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: process_state(process.pid) == "T", "it is stopped")
            for one in (watch, elsewhere):
                one.look()
            clock.sleep(2.5)
            watch.look()
            clock.sleep(1.0)
            elsewhere.look()
            assert process_state(process.pid) == "T", "not yet, and not by the watch of another container"
            watch.look()
            wait_until(lambda: process_state(process.pid) == "S", "it goes on")
            watch.look()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
