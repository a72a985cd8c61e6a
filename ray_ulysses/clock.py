"""Clocks. They are passed as arguments so that tests can control time."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from typing import Protocol

CLOCK_START = "RAY_ULYSSES_CLOCK_START"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """Source of time."""

    def now(self) -> float:
        """Return seconds since the Unix epoch."""
        ...

    def monotonic(self) -> float:
        """Return the time in seconds since an unspecified start, from a clock that never goes backwards."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block for `seconds` seconds."""
        ...


class SystemClock:
    """The machine's clocks.

    The wall clock may be adjusted during training. A command's processes on the same machine therefore read the wall
    clock only once and add the time since boot, so that the difference between two times is the duration between them.

    Args:
        ahead_s: Offset added to `now`, in seconds, so that a worker agrees with the coordinator's clock.
    """

    def __init__(self, ahead_s: float = 0.0) -> None:
        self._ahead_s = ahead_s

    def now(self) -> float:
        """Return seconds since the Unix epoch, unaffected by clock adjustments after the command has started."""
        return _start() + _since_boot() + self._ahead_s

    def monotonic(self) -> float:
        """Return the time in seconds since an unspecified start, from a clock that never goes backwards."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block for `seconds` seconds."""
        time.sleep(seconds)


def _since_boot() -> float:
    # Unlike time.monotonic, this clock advances while the machine sleeps.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@cache
def _start() -> float:
    """Return this machine's boot time in seconds since the Unix epoch, computed from one reading of the wall clock.

    Child processes on the same machine inherit the value through the environment until the machine reboots.
    """
    boot = _BOOT_ID.read_text().strip()
    known, _, start = os.environ.get(CLOCK_START, "").partition(" ")
    if known == boot:
        return float(start)
    found = time.time() - _since_boot()
    os.environ[CLOCK_START] = f"{boot} {found!r}"
    return found
