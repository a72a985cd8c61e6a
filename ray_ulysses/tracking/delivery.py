"""A tracker whose calls return immediately: events go to a spool on disk, and a thread delivers them."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, Protocol

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.errors import UserError, without_secret
from ray_ulysses.logging import get_logger
from ray_ulysses.tracking.checkpoint_updates import CheckpointUpdate, to_event
from ray_ulysses.tracking.spool import Position, Spool, SpooledEvent

_logger = get_logger(__name__)

Event = Mapping[str, Any]

RunStatus = Literal["finished", "stopped", "failed"]
"""The end of an attempt: every planned step done, stopped on request or at a stop step, or ended by an error."""


class RefusedEvent(Exception):
    """The receiver will never accept this event, no matter how often it is sent."""


class PartlyDelivered(Exception):
    """The receiver took some events for good and failed at the next, for the reason that is the cause.

    Attributes:
        num_taken: How many it took.
    """

    def __init__(self, num_taken: int) -> None:
        super().__init__(num_taken)
        self.num_taken = num_taken


class Sink(Protocol):
    """The receiver of events, such as a tracking server; used by one thread."""

    def connect(self) -> None:
        """Open or continue the run; raises when the receiver can't be reached, ``UserError`` until somebody acts."""
        ...

    def existing_marks(self, events: Sequence[Event]) -> dict[str, int]:
        """Return the largest step that the receiver already has, for each mark that these events would raise.

        A mark is ``metric:<name>``. By default the spool's own marks alone say what was delivered.
        """
        return {}

    def deliver(self, events: Sequence[Event]) -> None:
        """Send events in order; ``RefusedEvent`` drops an event, any other exception is retried.

        ``PartlyDelivered`` says that the first events are not to be sent again. Steps are sent once. An update of a
        checkpoint may be repeated after a lost answer, before any other event, and must then change nothing.
        """
        ...


class SpooledTracker:
    """Records attempts of a run with a `Sink`, and never raises into training; used by rank 0 only.

    Events are spooled, sent once, retried forever, and waited for briefly. A step that the run already has is not
    recorded again, and a repeated update of a checkpoint changes nothing.
    """

    def __init__(
        self,
        sink: Sink,
        spool_dir: Path,
        *,
        clock: Clock | None = None,
        retry_s: tuple[float, float] = (1.0, 30.0),
        drain_s: float = 20.0,
        batch_events: int = 200,
        max_bytes: int = 64 << 20,
    ) -> None:
        """Open nothing before ``start``.

        Args:
            sink: The receiver.
            spool_dir: Directory of the spool, in the run directory.
            clock: Source of the events' times.
            retry_s: First and longest pause after a failed delivery; each pause doubles the one before.
            drain_s: Longest time that ``finish`` waits for the receiver.
            batch_events: Most events sent together.
            max_bytes: Maximum size of the spool.
        """
        self._sink, self._spool_dir, self._clock = sink, spool_dir, clock or SystemClock()
        self._retry_s, self._drain_s, self._batch = retry_s, drain_s, batch_events
        self._max_bytes = max_bytes
        self._spool: Spool | None = None
        self._wake, self._stop = threading.Event(), threading.Event()
        self._drained, self._given_up = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._early: list[dict[str, Any]] = []
        self._warned: set[str] = set()

    def start(
        self, params: Mapping[str, object], tags: Mapping[str, object], files: Mapping[str, str] | None = None
    ) -> None:
        """Open the run, or continue that of an earlier attempt: first the undelivered events of earlier processes.

        Args:
            params: Settings of the whole run, by dotted path.
            tags: Facts that may differ between attempts, such as the world size and the versions of libraries.
            files: Texts that describe the run, by file name.
        """
        try:
            self._spool = Spool(self._spool_dir, max_bytes=self._max_bytes)
        except OSError as error:
            self._warn_once("spool", f"{self._spool_dir} can't be written ({error}): this attempt is not tracked")
            return
        self._put({"kind": "start", "params": dict(params), "tags": dict(tags)})
        if files:
            self._put({"kind": "files", "files": dict(files)})
        for event in self._early:
            self._put(event)
        self._early.clear()
        self._begin()

    def catch_up(
        self,
        update: CheckpointUpdate | None = None,
        *,
        status: RunStatus | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> int:
        """Deliver the events that earlier processes left, without an attempt; takes at most ``drain_s``.

        Only the holder of the run may call this: the spool has one reader. Does nothing for a run that was never
        tracked.

        Args:
            update: Delivered after that.
            status: How the run ended, if no attempt recorded it.
            tags: Tags about that end.

        Returns:
            The number of undelivered events.

        Raises:
            OSError: The spool can't be read or written.
        """
        if not self._spool_dir.is_dir():
            return 0
        self._spool = Spool(self._spool_dir, max_bytes=self._max_bytes)
        if update is not None:
            self.log_checkpoint(update)
        if status is not None:
            self._put({"kind": "finish", "status": status, "tags": dict(tags or {})})
        if self._spool.is_empty:
            self._spool.close()
            return 0
        self._begin()
        self._drain()
        return self._spool.num_waiting()

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Spool the metrics of a step; one that is not a number, such as a loss of a broken model, is left out."""
        known = {key: float(value) for key, value in metrics.items() if not math.isnan(value)}
        self._put({"kind": "step", "step": step, "metrics": known})

    def log_checkpoint(self, update: CheckpointUpdate) -> None:
        """Spool an update of the run's checkpoints; one before `start` is kept until then."""
        self._put(to_event(update))

    def finish(self, status: RunStatus, step: int = 0, metrics: Mapping[str, float] | None = None) -> None:
        """Spool the end, and wait at most ``drain_s`` until everything has been delivered."""
        self._put({"kind": "finish", "status": status, "step": step, "metrics": dict(metrics or {})})
        self._drain()

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="tracker", daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread is None or self._spool is None:
            return
        if not self._drained.wait(self._drain_s):
            self._given_up.set()
            self._wake.set()
            self._warn_once(
                "drain",
                f"the tracker could not be reached within {self._drain_s:g} s; undelivered events stay in "
                f"{self._spool_dir} and are sent when the run is started again, even a finished one",
            )

    def _put(self, event: dict[str, Any]) -> None:
        if self._spool is None:
            # Steps come after `start`, but a checkpoint may be set aside while the run resumes.
            if event["kind"].startswith("checkpoint"):
                self._early.append(event)
            return
        event["time_ms"] = int(self._clock.now() * 1000)
        try:
            if not self._spool.append(event):
                self._warn_once("full", f"{self._spool_dir} is full: the tracker misses later events")
        except (OSError, ValueError) as error:
            self._warn_once("append", f"{self._spool_dir} can't be written ({error}): the tracker misses events")
        self._wake.set()

    def _run(self) -> None:
        assert self._spool is not None
        try:
            with closing(self._spool):
                self._deliver_until_stopped(self._spool)
        finally:
            # However the thread ends, nobody is to wait for it any more.
            self._drained.set()

    def _deliver_until_stopped(self, spool: Spool) -> None:
        """Deliver until stopped and nothing is left; the pause after a failure doubles up to a limit."""
        pause, connected = self._retry_s[0], False
        while True:
            self._wake.clear()
            if self._given_up.is_set():
                # The next process delivers the rest; two at a time would duplicate it.
                return
            stopping = self._stop.is_set()
            try:
                if not connected:
                    self._sink.connect()
                    self._forget_delivered(spool)
                    connected = True
                while self._deliver_batch(spool):
                    pause = self._retry_s[0]
            except Exception as error:  # an outage of the tracker never stops training
                connected = False
                if isinstance(error, UserError):
                    self._warn_once(str(error), f"{error}; until then, events wait in {self._spool_dir}")
                else:
                    self._warn_once("away", f"the tracker does not answer, events wait on disk ({_short(error)})")
                # Not `_wake`, which would retry after every step.
                if not stopping:
                    self._stop.wait(pause)
                elif isinstance(error, UserError):
                    return
                else:
                    self._given_up.wait(min(pause, 1.0))
                pause = min(2 * pause, self._retry_s[1])
                continue
            if stopping and spool.is_empty:
                return
            self._wake.wait()

    def _forget_delivered(self, spool: Spool) -> None:
        """Read the receiver's marks: an earlier process may have died between a delivery and its acknowledgement."""
        waiting = [entry.event for entry in spool.peek(self._batch) if entry.event.get("kind") == "step"]
        if waiting:
            for mark, step in self._sink.existing_marks(waiting).items():
                spool.marks[mark] = max(step, spool.marks.get(mark, step))

    def _deliver_batch(self, spool: Spool) -> bool:
        entries = batch_of(spool.peek(self._batch))
        if not entries:
            return False
        events, marks = unsent([entry.event for entry in entries], spool.marks)
        try:
            if events:
                self._sink.deliver(events)
        except RefusedEvent:
            self._deliver_singly(spool, entries)
            return True
        except PartlyDelivered as error:
            taken = entries[: num_entries_of(entries, spool.marks, error.num_taken)]
            if taken and not self._given_up.is_set():
                _, marks = unsent([entry.event for entry in taken], spool.marks)
                self._acknowledge(spool, taken[-1].end, marks)
            raise error.__cause__ or error from None
        if self._given_up.is_set():
            return False
        self._acknowledge(spool, entries[-1].end, marks)
        return True

    def _deliver_singly(self, spool: Spool, entries: Sequence[SpooledEvent]) -> None:
        for entry in entries:
            events, marks = unsent([entry.event], spool.marks)
            try:
                if events:
                    self._sink.deliver(events)
            except RefusedEvent as error:
                self._warn_once(f"refused {_short(error)}", f"the tracker refuses an event, left out: {_short(error)}")
            self._acknowledge(spool, entry.end, marks)

    def _acknowledge(self, spool: Spool, end: Position, marks: Mapping[str, int]) -> None:
        try:
            spool.acknowledge(end, marks)
        except OSError as error:
            # The receiver is well: connecting again would not help, and what it has is not sent again.
            self._warn_once(
                "state",
                f"{self._spool_dir} can't be written ({error}): if that lasts, the next attempt sends events again",
            )

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            _logger.warning("%s", text)


def batch_of(entries: Sequence[SpooledEvent]) -> Sequence[SpooledEvent]:
    """Return the entries that are sent and acknowledged together: up to an update of a checkpoint, or an end alone.

    After a lost answer an update is sent again, and must not find changes of a later event. The end of an attempt
    waits for the receiver, and may fail after all else was taken, which must then not be sent again.
    """
    for number, entry in enumerate(entries):
        kind = str(entry.event.get("kind"))
        if kind == "finish":
            return entries[: max(1, number)]
        if kind.startswith("checkpoint"):
            return entries[: number + 1]
    return entries


def unsent(events: Sequence[Event], marks: Mapping[str, int]) -> tuple[list[Event], dict[str, int]]:
    """Leave out metrics that the receiver already has, so that a replayed step is not recorded twice.

    Args:
        events: The events in order; several attempts may have recorded the same steps.
        marks: The largest delivered step of each mark.

    Returns:
        The remaining events, with new metrics only, and the marks after their delivery.
    """
    after = dict(marks)
    left: list[Event] = []
    for event in events:
        kind = event.get("kind")
        if kind == "step":
            step = int(event["step"])
            fresh = {k: v for k, v in event["metrics"].items() if step > after.get(f"metric:{k}", -1)}
            after.update({f"metric:{key}": step for key in fresh})
            if fresh:
                left.append({**event, "metrics": fresh})
        elif kind is not None:
            left.append(event)
    return left, after


def num_entries_of(entries: Sequence[SpooledEvent], marks: Mapping[str, int], num_sent: int) -> int:
    """Return how many entries precede the one whose event would be the next to be sent after so many (pure)."""
    for number, entry in enumerate(entries):
        events, marks = unsent([entry.event], marks)
        if len(events) > num_sent:
            return number
        num_sent -= len(events)
    return len(entries)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {without_secret(str(error)).splitlines()[0][:200] if str(error) else ''}"
