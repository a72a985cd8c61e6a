"""Lets the processes of one node start to read streams one after the other.

A reader's process takes seconds of a core until it reads: those of many ranks, all at once, would take them from the
first steps, and each would start a process of its own instead of taking over the one before.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray_ulysses.cluster.session import session_logs
from ray_ulysses.storage.file_lock import lock_file

_POLL_S = 0.05
_MOST_S = 10.0
"""Longest wait for a turn: its holder may wait for CPUs, and another run on the node must not wait with it."""


@contextmanager
def cold_start(stopped: threading.Event) -> Iterator[None]:
    """Wait for this process's turn, and hold it for a block; go ahead without it after 10 s, or if the event is set."""
    logs = session_logs()
    descriptor = None if logs is None else _turn(Path(logs) / "ray-ulysses-cold-start.lock", stopped)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _turn(path: Path, stopped: threading.Event) -> int | None:
    deadline = time.monotonic() + _MOST_S
    while True:
        try:
            return lock_file(path)
        except BlockingIOError:
            if stopped.wait(_POLL_S) or time.monotonic() > deadline:
                return None
        except OSError:
            # Reading does not depend on the lock.
            return None
