"""Accounts for the time of an attempt while it runs, for the journal and for the tracker's curves."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray_ulysses.clock import Clock
from ray_ulysses.tracking.events import Event
from ray_ulysses.tracking.step_groups import Entry
from ray_ulysses.tracking.time_spent import TimeLedger

_AFTER_A_PAUSE = ("step", "attempt_ended")
"""Records that report for how long training was paused for checkpoints before them."""


class TimeAccount:
    """The account of a run's time up to now; records may come from any thread."""

    def __init__(self, clock: Clock, events: Iterable[Entry] = ()) -> None:
        """Start from the events that the journal already holds."""
        self._clock = clock
        self._ledger = TimeLedger()
        for event in events:
            self._ledger.add(event)
        self._saving_s = 0.0
        self._reported: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure a block in which training is paused for a checkpoint, if one is due."""
        begin = self._clock.monotonic()
        try:
            yield
        finally:
            self._saving_s += self._clock.monotonic() - begin

    def complete(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return a record with its time and the seconds that its kind reports."""
        complete = {"time": self._clock.now(), **record}
        if record["event"] in _AFTER_A_PAUSE:
            complete["saving_seconds"] = round(self._saving_s, 6)
            self._saving_s = 0.0
        return complete

    def add(self, event: Event) -> None:
        """Account for the time up to an event."""
        with self._lock:
            self._ledger.add(event)

    def news(self) -> dict[str, float]:
        """Return the parts of the time that have grown since the last call, and the goodput, by their metric names."""
        with self._lock:
            parts = self._ledger.spent().metrics()
        news = {name: value for name, value in parts.items() if value != self._reported.get(name, 0.0)}
        self._reported |= news
        return news
