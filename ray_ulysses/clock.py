"""Clocks are passed in as values, so that tests can control time."""

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
        """Return seconds of a clock that never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds."""
        ...


class SystemClock:
    """The machine's clocks.

    The wall clock may jump while a run trains. The processes of a command on one machine share a single reading of it
    and count from there, so that the difference of two times is a duration.
    """

    def __init__(self, ahead_s: float = 0.0) -> None:
        """Set the offset from this machine's clock, in seconds, for a worker that uses the coordinator's."""
        self._ahead_s = ahead_s

    def now(self) -> float:
        """Return seconds since the Unix epoch, by the wall clock as it was when the command began."""
        return _start() + _since_boot() + self._ahead_s

    def monotonic(self) -> float:
        """Return seconds of a clock that never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds."""
        time.sleep(seconds)


def _since_boot() -> float:
    # Unlike time.monotonic, this clock advances while the machine sleeps.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@cache
def _start() -> float:
    """Return when this machine booted, by the wall clock at the first call in this process or a parent of it.

    Child processes inherit the value, unless they run on another machine, or after a reboot.
    """
    boot = _BOOT_ID.read_text().strip()
    known, _, start = os.environ.get(CLOCK_START, "").partition(" ")
    if known == boot:
        return float(start)
    found = time.time() - _since_boot()
    os.environ[CLOCK_START] = f"{boot} {found!r}"
    return found
