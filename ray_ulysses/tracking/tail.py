"""Delivers a run's journal to trackers. Each tracker has a thread that follows the journal, outside the training path.

Each tracker's position in the journal is a cursor file in the run's directory, updated after each delivered batch. A
tracker outage therefore only delays delivery, and a tracker that is added later receives the run from its first step.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Protocol, cast

from pydantic import TypeAdapter

from ray_ulysses.errors import UserError, without_secret
from ray_ulysses.logging import get_logger
from ray_ulysses.run_names import cursor_key
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.tracking.events import CheckpointEvent, Event
from ray_ulysses.tracking.journal_files import JournalFile, journal_files
from ray_ulysses.tracking.journal_lines import DamagedRecord
from ray_ulysses.tracking.journal_reader import JournalFileReader, in_reading_order
from ray_ulysses.tracking.steps import Entry
from ray_ulysses.tracking.updates import AttemptBegan, AttemptOver, GoneCheckpoint, StepMetrics, Translation, Update
from ray_ulysses.validation import ContentError, Whole, read_json

_log = get_logger(__name__)
_READ_RETRY_S = 1.0


class RefusedUpdate(Exception):
    """The tracker rejected an update permanently; retrying cannot succeed."""


class PartlyDelivered(Exception):
    """The tracker accepted some updates and failed at the next one. ``__cause__`` is the error.

    Attributes:
        num_taken: Number of accepted updates, which must not be sent again.
    """

    def __init__(self, num_taken: int) -> None:
        super().__init__(num_taken)
        self.num_taken = num_taken


class Sink(Protocol):
    """A receiver of updates, such as a tracking server. Each sink is used by only one thread."""

    def connect(self) -> str:
        """Open or continue the run in the receiver.

        Returns:
            Identity of the receiver's record of the run. If the identity changes, all updates are delivered again.

        Raises:
            UserError: The connection fails until the user fixes the cause.
            Exception: The receiver can't be reached.
        """
        ...

    def existing_marks(self) -> Mapping[str, int]:
        """Return the largest step that the receiver has for each metric; empty if the receiver can't tell."""
        return {}

    def deliver(self, updates: Sequence[Update]) -> None:
        """Send updates in order. Delivery must be idempotent, because updates are repeated if a response is lost.

        Raises:
            RefusedUpdate: An update is invalid and will be dropped.
            PartlyDelivered: Only the first updates were accepted; the rest is retried.
            Exception: Any other failure; all updates are retried.
        """
        ...


End = tuple[str, int]
"""Name of a journal file, and the offset after a delivered event."""
ReadUpdates = Callable[[], Iterator[tuple[Update, End | None]]]
"""Function that yields the updates since the last call, each with its event's end, or with None if more updates of the
same event follow. It must not be called again after an error."""


@dataclass(kw_only=True, slots=True)
class _Cursor:
    """Content of a cursor file."""

    record: str = ""
    """Identity returned by `Sink.connect`."""
    files: dict[str, Whole] = field(default_factory=dict)
    """Number of bytes delivered from each journal file, by name."""


class Tail:
    """Follows a run's journal in a thread and delivers updates to a sink. Delivery errors never reach the caller.

    Failed deliveries are retried until the run ends. The run then waits only briefly for the remaining updates.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        run_dir: Place,
        open_source: Callable[[Mapping[str, int]], ReadUpdates],
        *,
        retry_s: tuple[float, float] = (1.0, 30.0),
        poll_s: float = 1.0,
        batch_updates: int = 200,
    ) -> None:
        """Prepare the thread without opening the journal or the sink.

        Args:
            name: The tracker's name, for the cursor file and for messages.
            sink: The receiver.
            run_dir: The run's directory, which contains the cursor file.
            open_source: Function that opens a source of updates, given the bytes delivered from each journal file.
            retry_s: Initial and maximum delay after a failed delivery, with exponential backoff.
            poll_s: Interval at which the journal is polled.
            batch_updates: Maximum number of updates per delivery.
        """
        self._name, self._sink, self._open_source = name, sink, open_source
        self._store, self._key = open_store(run_dir, must_exist=True), cursor_key(name)
        self._retry_s, self._poll_s, self._batch = retry_s, poll_s, batch_updates
        self._cursor: _Cursor | None = None
        self._source: ReadUpdates | None = None
        self._news: Iterator[tuple[Update, End | None]] = iter(())
        # Updates that were read but not delivered yet.
        self._pending: list[tuple[Update, End | None]] = []
        self._existing: Mapping[str, int] = {}
        self._is_connected = False
        self._stop, self._given_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"{name}-tail", daemon=True)
        self._warned: set[str] = set()

    def start(self) -> None:
        """Start the thread, which first delivers any backlog from earlier commands."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end once it has delivered everything recorded so far."""
        self._stop.set()

    def wait(self, limit_s: float) -> bool:
        """Wait for the thread after `stop`. After `limit_s` seconds, give up and return False."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._given_up.set()
            self._warn_once(
                "drain",
                f"{self._name} could not be reached in time; undelivered updates stay in the run's journal and are "
                "sent when the run is started again, even if the run is finished",
            )
        return not self._given_up.is_set()

    def _follow(self) -> None:
        """Deliver until `stop` is called and no updates are left."""
        pause = self._retry_s[0]
        while not self._given_up.is_set():
            # Check before reading the journal, so that everything recorded before `stop` is delivered.
            stopping = self._stop.is_set()
            try:
                if self._deliver_batch():
                    pause = self._retry_s[0]
                    # Warn again at the next outage.
                    self._warned -= {"away", "journal"}
                elif stopping:
                    return
                else:
                    self._stop.wait(self._poll_s)
                continue
            except _JournalAwayError as error:
                self._warn_once("journal", f"the run's journal can't be read; updates to {self._name} wait ({error})")
            except UserError as error:
                self._is_connected = False
                self._warn_once(str(error), f"{error}; until then, updates wait in the run's journal")
                if stopping:
                    return
            except Exception as error:  # a tracker outage must never stop training
                self._is_connected = False
                self._warn_once(
                    "away", f"{self._name} is unavailable; updates wait in the run's journal ({_short(error)})"
                )
            (self._given_up if stopping else self._stop).wait(min(pause, 1.0) if stopping else pause)
            pause = min(2 * pause, self._retry_s[1])

    def _deliver_batch(self) -> bool:
        """Deliver the next batch; return False if there are no updates."""
        self._refill()
        if not self._pending:
            return False
        if not self._is_connected:
            self._connect()
            # `_connect` may have reset the source.
            self._refill()
        num = _batch_size([update for update, _ in self._pending])
        fresh = [
            (number, update)
            for number, (whole, _) in enumerate(self._pending[:num])
            if (update := _unsent(whole, self._existing)) is not None
        ]
        try:
            if fresh:
                self._sink.deliver([update for _, update in fresh])
        except RefusedUpdate:
            self._deliver_singly(num)
        except PartlyDelivered as error:
            self._acknowledge(fresh[error.num_taken][0])
            raise error.__cause__ or error from None
        else:
            self._acknowledge(num)
        return True

    def _deliver_singly(self, num: int) -> None:
        for _ in range(num):
            update = _unsent(self._pending[0][0], self._existing)
            try:
                if update is not None:
                    self._sink.deliver([update])
            except RefusedUpdate as error:
                text = _short(error)
                self._warn_once(f"refused {text}", f"{self._name} refused an update, which is dropped: {text}")
            self._acknowledge(1)
            if self._given_up.is_set():
                return

    def _connect(self) -> None:
        record = self._sink.connect()
        # An earlier process may have died between a delivery and its acknowledgement.
        self._existing = self._sink.existing_marks()
        self._is_connected = True
        assert self._cursor is not None
        if self._cursor.record not in ("", record):
            # The receiver has a new, empty record of the run.
            self._cursor, self._source, self._pending = _Cursor(), None, []
        self._cursor.record = record

    def _refill(self) -> None:
        """Read more updates from the journal if none are pending.

        Raises:
            UserError: The journal can't be read until the user fixes the cause.
            _JournalAwayError: The journal can't be read now.
        """
        if self._pending:
            return
        try:
            if self._cursor is None:
                self._cursor = self._read_cursor()
            if self._source is None:
                self._source, self._news = self._open_source(self._cursor.files), iter(())
            self._pending = list(islice(self._news, self._batch))
            if not self._pending:
                self._news = self._source()
                self._pending = list(islice(self._news, self._batch))
        except Exception as error:
            # Read the partly read batch again.
            self._source = None
            if isinstance(error, UserError):
                # For example, a journal file was replaced by a pipe.
                raise
            raise _JournalAwayError(_short(error)) from error

    def _read_cursor(self) -> _Cursor:
        try:
            return read_json(TypeAdapter(_Cursor), self._store.read_whole(self._key))
        except FileNotFoundError:
            pass
        except ContentError as error:
            _log.warning("%s is damaged (%s); delivering the entire run again", self._key, error)
        return _Cursor()

    def _acknowledge(self, num: int) -> None:
        """Advance the cursor past the first pending updates, unless `wait` gave up: they are then sent again."""
        if self._given_up.is_set():
            return
        assert self._cursor is not None
        self._cursor.files.update(end for _, end in self._pending[:num] if end is not None)
        del self._pending[:num]
        try:
            self._store.replace(self._key, [json.dumps(asdict(self._cursor)).encode()])
        except OSError as error:
            # The receiver works, so do not reconnect. This process does not send these updates again.
            self._warn_once(
                "cursor",
                f"{self._store.name}/{self._key} can't be written ({error}); unless a later write succeeds, the next "
                f"command sends updates to {self._name} again",
            )

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            _log.warning("%s", text)


class _JournalAwayError(Exception):
    """The journal can't be read now."""


@contextmanager
def following(tails: Sequence[Tail], drain_s: float = 20.0) -> Iterator[None]:
    """Deliver updates to all trackers in parallel, during the ``with`` block and for a bounded time after it.

    Args:
        tails: Tails of the run's trackers.
        drain_s: Maximum time to wait at the end, in seconds.
    """
    for tail in tails:
        tail.start()
    try:
        yield
    finally:
        for tail in tails:
            tail.stop()
        end = time.monotonic() + drain_s
        for tail in tails:
            tail.wait(max(0.0, end - time.monotonic()))


class JournalSource:
    """Reads the undelivered updates from a run's journal."""

    def __init__(
        self,
        run_dir: Place,
        delivered: Mapping[str, int],
        translation: Translation,
        describe: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Create the source without reading the journal.

        Args:
            run_dir: The run's directory.
            delivered: Number of bytes delivered from each journal file, by name.
            translation: A new translation, which has not seen any event.
            describe: Function that returns the texts that describe the run, by file name.
        """
        self._run_dir, self._delivered = run_dir, dict(delivered)
        self._translation, self._describe = translation, describe
        self._readers: dict[str, JournalFileReader] = {}

    def read(self) -> Iterator[tuple[Update, End | None]]:
        """Yield the updates; see `ReadUpdates`. Raises OSError if the journal can't be read."""
        files = journal_files(self._run_dir, _READ_RETRY_S)
        for entry, end in in_reading_order(files, self._entries, lambda one: one[0].time):
            if end is None:
                self._translation.skip(entry)
                continue
            updates = self._translation.updates(cast("Event", entry))
            for number, update in enumerate(updates, 1):
                if isinstance(update, AttemptBegan):
                    update = replace(update, files=self._describe())
                yield update, end if number == len(updates) else None

    def _entries(self, attempt: int, file: JournalFile) -> Iterator[tuple[Entry, End | None]]:
        """Yield (event, end) for a file's new events; before the first, (entry, None) for each delivered entry."""
        reader = self._readers.get(file.name)
        if reader is None:
            reader = self._readers[file.name] = JournalFileReader(file, attempt)
            for entry in reader.read(stop=self._delivered.get(file.name, 0)):
                if not isinstance(entry, DamagedRecord):
                    yield entry, None
        for event, offset in reader.continue_in(file).read_singly():
            yield event, (file.name, offset)


def _batch_size(updates: Sequence[Update]) -> int:
    """Return the number of updates to send together. Checkpoint updates end a batch; an attempt's end is sent alone.

    A checkpoint update may be repeated after a lost response, and must not run after a later checkpoint's update. The
    end of an attempt waits for the receiver and may fail, in which case earlier updates must not be sent again.
    """
    for number, update in enumerate(updates):
        if isinstance(update, AttemptOver):
            return max(1, number)
        if isinstance(update, CheckpointEvent | GoneCheckpoint):
            return number + 1
    return len(updates)


def _unsent(update: Update, existing: Mapping[str, int]) -> Update | None:
    """Return an update without the metrics that the receiver already has, or None if nothing remains."""
    if not isinstance(update, StepMetrics):
        return update
    fresh = {name: value for name, value in update.metrics.items() if update.step > existing.get(name, -1)}
    return replace(update, metrics=fresh) if fresh else None


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {without_secret(str(error)).splitlines()[0][:200] if str(error) else ''}"
