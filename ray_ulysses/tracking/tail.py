"""Delivers a run's journal to a tracker: a thread outside of the training path follows it, with a cursor of its own.

The cursor is a file in the run's directory, written after each delivered batch. So an outage of a tracker is lag and
nothing else, and a tracker that is added later is told of the run from its first step.
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
    """The tracker will never accept this update, no matter how often it is sent."""


class PartlyDelivered(Exception):
    """The tracker took some updates for good and failed at the next, for the reason that is the cause.

    Attributes:
        num_taken: How many it took.
    """

    def __init__(self, num_taken: int) -> None:
        super().__init__(num_taken)
        self.num_taken = num_taken


class Sink(Protocol):
    """The receiver of updates, such as a tracking server; used by one thread."""

    def connect(self) -> str:
        """Open or continue the run; raises when the receiver can't be reached, ``UserError`` until somebody acts.

        Returns:
            The identity of what the run is recorded in there. If it has changed since, all is delivered again.
        """
        ...

    def existing_marks(self) -> Mapping[str, int]:
        """Return the largest step of each metric that the receiver already has, as far as it can be asked."""
        return {}

    def deliver(self, updates: Sequence[Update]) -> None:
        """Send updates in order; ``RefusedUpdate`` drops an update, any other exception is retried.

        ``PartlyDelivered`` says that the first updates are not to be sent again. Any other update may be repeated after
        a lost answer, before a later one, and must then change nothing.
        """
        ...


End = tuple[str, int]
"""A journal file, and the offset in it behind a delivered event."""
ReadUpdates = Callable[[], Iterator[tuple[Update, End | None]]]
"""Yields each update of a run since its last call, with the end of its event; None if more updates of it follow. After
an error it is not called any more."""


@dataclass(kw_only=True, slots=True)
class _Cursor:
    """The content of a cursor's file."""

    record: str = ""
    """What `Sink.connect` returned."""
    files: dict[str, Whole] = field(default_factory=dict)
    """How much of each journal file was delivered, in bytes."""


class Tail:
    """Follows a run's journal and delivers it to a sink; never raises into the caller.

    Updates are sent once, retried forever, and waited for briefly at the end.
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
        """Open nothing before `start`.

        Args:
            name: The tracker's name, for its cursor and for people.
            sink: The receiver.
            run_dir: The run's directory, which holds the cursor.
            open_source: Opens the updates behind what a cursor says was delivered of each journal file.
            retry_s: First and longest pause after a failed delivery; each pause doubles the one before.
            poll_s: Pause before the journal is read again.
            batch_updates: Most updates sent together.
        """
        self._name, self._sink, self._open_source = name, sink, open_source
        self._store, self._key = open_store(run_dir, must_exist=True), cursor_key(name)
        self._retry_s, self._poll_s, self._batch = retry_s, poll_s, batch_updates
        self._cursor: _Cursor | None = None
        self._source: ReadUpdates | None = None
        self._news: Iterator[tuple[Update, End | None]] = iter(())
        # What was read and not delivered yet.
        self._pending: list[tuple[Update, End | None]] = []
        self._existing: Mapping[str, int] = {}
        self._is_connected = False
        self._stop, self._given_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"{name}-tail", daemon=True)
        self._warned: set[str] = set()

    def start(self) -> None:
        """Begin to deliver, first what earlier commands left."""
        self._thread.start()

    def stop(self) -> None:
        """End once everything that is in the journal now is delivered."""
        self._stop.set()

    def wait(self, limit_s: float) -> bool:
        """Wait for the end after `stop`, and give up after a time; return whether it ended before."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._given_up.set()
            self._warn_once(
                "drain",
                f"{self._name} could not be reached in time; what it lacks stays in the run's journal and is sent when "
                "the run is started again, even a finished one",
            )
        return not self._given_up.is_set()

    def _follow(self) -> None:
        """Deliver until stopped and nothing is left; the pause after a failure doubles up to a limit."""
        pause = self._retry_s[0]
        while not self._given_up.is_set():
            # Before the journal is read: what was recorded until then is delivered.
            stopping = self._stop.is_set()
            try:
                if self._deliver_batch():
                    pause = self._retry_s[0]
                    # The next outage is another one.
                    self._warned -= {"away", "journal"}
                elif stopping:
                    return
                else:
                    self._stop.wait(self._poll_s)
                continue
            except _JournalAwayError as error:
                self._warn_once("journal", f"the run's journal can't be read now, and {self._name} waits ({error})")
            except UserError as error:
                self._is_connected = False
                self._warn_once(str(error), f"{error}; until then, its updates wait in the run's journal")
                if stopping:
                    return
            except Exception as error:  # an outage of a tracker never stops training
                self._is_connected = False
                self._warn_once(
                    "away", f"{self._name} does not answer, its updates wait in the run's journal ({_short(error)})"
                )
            (self._given_up if stopping else self._stop).wait(min(pause, 1.0) if stopping else pause)
            pause = min(2 * pause, self._retry_s[1])

    def _deliver_batch(self) -> bool:
        """Deliver what is read next; return False if there is nothing."""
        self._refill()
        if not self._pending:
            return False
        if not self._is_connected:
            self._connect()
            # The source may have been opened anew.
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
                self._warn_once(f"refused {text}", f"{self._name} refuses an update, which is left out: {text}")
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
            # It has nothing of the run yet.
            self._cursor, self._source, self._pending = _Cursor(), None, []
        self._cursor.record = record

    def _refill(self) -> None:
        """Read more of the journal if nothing is pending.

        Raises:
            UserError: It can't be read until somebody acts.
            _JournalAwayError: It can't be read now.
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
            # What was read in part is read again.
            self._source = None
            if isinstance(error, UserError):
                # Such as a pipe in place of a file: nothing changes until somebody acts.
                raise
            raise _JournalAwayError(_short(error)) from error

    def _read_cursor(self) -> _Cursor:
        try:
            return read_json(TypeAdapter(_Cursor), self._store.read_whole(self._key))
        except FileNotFoundError:
            pass
        except ContentError as error:
            _log.warning("%s is damaged (%s): the whole run is delivered again", self._key, error)
        return _Cursor()

    def _acknowledge(self, num: int) -> None:
        """Move the cursor behind the first pending updates; once given up, the next process delivers them again."""
        if self._given_up.is_set():
            return
        assert self._cursor is not None
        self._cursor.files.update(end for _, end in self._pending[:num] if end is not None)
        del self._pending[:num]
        try:
            self._store.replace(self._key, [json.dumps(asdict(self._cursor)).encode()])
        except OSError as error:
            # The receiver is well: connecting again would not help, and what it has is not sent again.
            self._warn_once(
                "cursor",
                f"{self._store.name}/{self._key} can't be written ({error}): if that lasts, the next command sends "
                f"updates to {self._name} again",
            )

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            _log.warning("%s", text)


class _JournalAwayError(Exception):
    """The journal can't be read now."""


@contextmanager
def following(tails: Sequence[Tail], drain_s: float = 20.0) -> Iterator[None]:
    """Deliver while a block runs, and for a bounded time after it; no tracker waits for another.

    Args:
        tails: The tails of the run's trackers.
        drain_s: Longest time to wait at the end.
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
    """Reads updates from a run's journal, behind what was delivered before."""

    def __init__(
        self,
        run_dir: Place,
        delivered: Mapping[str, int],
        translation: Translation,
        describe: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Read nothing yet.

        Args:
            run_dir: The run's directory.
            delivered: How much of each journal file was delivered, in bytes.
            translation: Translates its events; at its beginning.
            describe: Returns the texts that describe the run, by file name.
        """
        self._run_dir, self._delivered = run_dir, dict(delivered)
        self._translation, self._describe = translation, describe
        self._readers: dict[str, JournalFileReader] = {}

    def read(self) -> Iterator[tuple[Update, End | None]]:
        """Yield the updates, as of `ReadUpdates`; raises OSError if the journal can't be read now."""
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
        """Yield what was added to a file; what was delivered before in groups of steps, and without an end."""
        reader = self._readers.get(file.name)
        if reader is None:
            reader = self._readers[file.name] = JournalFileReader(file, attempt)
            for entry in reader.read(stop=self._delivered.get(file.name, 0)):
                if not isinstance(entry, DamagedRecord):
                    yield entry, None
        for event, offset in reader.continue_in(file).read_singly():
            yield event, (file.name, offset)


def _batch_size(updates: Sequence[Update]) -> int:
    """Return how many updates are sent together: up to one of a checkpoint, or an end alone (pure).

    After a lost answer an update of a checkpoint is sent again, and must not find changes of a later one. The end of an
    attempt waits for the receiver, and may fail after all else was taken, which must then not be sent again.
    """
    for number, update in enumerate(updates):
        if isinstance(update, AttemptOver):
            return max(1, number)
        if isinstance(update, CheckpointEvent | GoneCheckpoint):
            return number + 1
    return len(updates)


def _unsent(update: Update, existing: Mapping[str, int]) -> Update | None:
    """Return an update without the metrics that the receiver already has; None if nothing is left (pure)."""
    if not isinstance(update, StepMetrics):
        return update
    fresh = {name: value for name, value in update.metrics.items() if update.step > existing.get(name, -1)}
    return replace(update, metrics=fresh) if fresh else None


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {without_secret(str(error)).splitlines()[0][:200] if str(error) else ''}"
