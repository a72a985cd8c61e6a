"""Accounts for the time of an attempt while it runs, for the journal and for the tracker's curves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray_ulysses.clock import Clock
from ray_ulysses.logging import get_logger
from ray_ulysses.tracking.events import Event
from ray_ulysses.tracking.run_time import TimeLedger
from ray_ulysses.tracking.steps import Entry

_log = get_logger(__name__)
_AFTER_A_PAUSE = ("step", "attempt_ended")
"""Records that report for how long training was paused for checkpoints before them."""


class TimeAccount:
    """The account of a run's time up to now; records may come from any thread."""

    def __init__(self, clock: Clock, read_earlier: Callable[[], Iterable[Entry]] | None = None) -> None:
        """Start from the events of earlier attempts.

        Args:
            clock: Source of the records' times.
            read_earlier: Reads them, in a thread of its own: the first step doesn't wait for a journal of a million
                steps. Until it has, there is no news. None for a run without any.
        """
        self._clock = clock
        self._ledger = TimeLedger()
        self._saving_s = 0.0
        self._reported: dict[str, float] = {}
        self._lock = threading.Lock()
        # What happens before the earlier events are read; None from then on.
        self._waiting: list[Event] | None = None
        self._reader: threading.Thread | None = None
        if read_earlier is not None:
            self._waiting = []
            self._reader = threading.Thread(target=self._read, args=(read_earlier,), name="time-account", daemon=True)
            self._reader.start()

    def _read(self, read_earlier: Callable[[], Iterable[Entry]]) -> None:
        try:
            earlier = read_earlier()
        except OSError as error:
            _log.warning(
                "the journal of earlier attempts can't be read (%s): the curves of time and goodput have a gap until "
                "the next attempt",
                error.strerror or error,
            )
            return
        with self._lock:
            for event in (*earlier, *(self._waiting or ())):
                self._ledger.add(event)
            self._waiting = None

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
            if self._waiting is None:
                self._ledger.add(event)
            elif self._reader is not None and self._reader.is_alive():
                self._waiting.append(event)

    def news(self, *, wait_s: float = 0.0) -> dict[str, float]:
        """Return the parts of the time that have grown since the last call, and the goodput, by their metric names.

        Args:
            wait_s: How long to wait for the earlier events.
        """
        if self._reader is not None:
            self._reader.join(wait_s)
        with self._lock:
            if self._waiting is not None:
                return {}
            parts = self._ledger.spent().metrics()
        news = {name: value for name, value in parts.items() if value != self._reported.get(name, 0.0)}
        self._reported |= news
        return news
