"""The one way in which tests wait for something that another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    holds: Callable[[], object],
    what: str,
    *,
    timeout_s: float = 60.0,
    every_s: float = 0.02,
    said: Callable[[], str] = str,
) -> None:
    """Wait until ``holds()`` is true; after ``timeout_s``, fail with ``what`` was awaited and what ``said()`` adds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}\n{said()}"
        time.sleep(every_s)
