"""The history of a run, read from its journal and the folders of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar

from pydantic_core import from_json

from ray_ulysses.run_names import CHECKPOINT_FOLDER, CHECKPOINT_KEY, MANIFEST_FILE, manifest_key, step_folder
from ray_ulysses.storage import LockOwner, Store, current_owner
from ray_ulysses.storage.place import Place, open_store, place_of
from ray_ulysses.tracking.events import (
    CONTINUED,
    STOP_REASONS,
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CommandEnded,
    CommandEvent,
    Event,
    RunFailed,
    RunFinished,
    StartFailed,
    StepDone,
    StreamStarted,
)
from ray_ulysses.tracking.failures import failure_fields
from ray_ulysses.tracking.journal_files import attempt_numbers
from ray_ulysses.tracking.journal_reader import Journal, read_journal
from ray_ulysses.tracking.run_time import TimeSpent, time_spent
from ray_ulysses.tracking.steps import (
    Entry,
    StepGroup,
    Steps,
    group_steps,
    inherited_steps,
    steps_that_count,
    ungroup_steps,
)

Status = Literal["not_started", "running", "interrupted", "stopped", "failed", "finished"]

_Kind = TypeVar("_Kind")


_STREAM_STARTS_S = 60.0
_STREAM_STARTS_ROWS = 20
"""An attempt that ends earlier, or with fewer rows per rank, may have done so while its stream was starting: rows of
the first step, and those that were read ahead, are read directly however soon it is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """One attempt of a run that came to train; an attempt that died before has a number and no record."""

    attempt: int
    """Its number."""
    world_size: int
    """Number of ranks."""
    sp_size: int
    """Number of ranks that share a row."""
    dp_size: int
    """Number of rows in flight at once."""
    ring_size: int = 1
    """Size of the ring within `sp_size`; 1 without one."""
    resumed_from: str | None = None
    """Source of the state that it started from, as in `attempt_started`."""
    first_step: int | None
    """The first step that it completed."""
    last_step: int | None
    """The last step that it completed."""
    reason: str | None
    """Why it ended; None while it runs, or if its end was not recorded."""
    rank: int | None = None
    """The rank on which the failure that ended it started."""
    node: str | None = None
    """The node of that rank."""
    seconds_to_first_step: float | None
    """To the end of its first step, from the start of its command or the end of the attempt before it."""
    stage: str | None = None
    """Name of the stage that it trained; None in a run without stages."""
    stream_step: int | None = None
    """The first step whose rows all came through Ray Data; None if there was none."""
    direct_rows: int | None = None
    """Rows that the ranks read themselves before it, or all if there was none; None with `data.engine: local`."""
    lacks_stream: bool = False
    """Whether it trained for a minute and 20 rows per rank without its stream ever starting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """One checkpoint folder."""

    step: int
    """Completed steps that it holds."""
    path: str
    """Its folder, relative to the root of the checkpoint store."""
    committed: bool
    """Whether it has a manifest; a folder without one is never loaded."""
    world_size: int | None
    """Number of ranks that wrote it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """The history of a run up to now, by the steps that count: those in the state of the newest attempt."""

    name: str
    """Name of the run."""
    status: Status
    """State of the run."""
    step: int
    """Completed steps that count."""
    tokens: int
    """Supervised tokens of these steps."""
    steps: Steps
    """These steps, ascending; a replayed step appears once, as it was last trained."""
    attempts: tuple[AttemptRecord, ...]
    """Every attempt, in order."""
    checkpoints: tuple[CheckpointRecord, ...]
    """Every checkpoint folder, ascending."""
    rows_consumed: int
    """Rows that these steps trained on."""
    data_digest: str
    """Sum of the data digests of these steps, 16 digits."""
    lost_steps: int
    """Steps that were thrown away because an attempt resumed before them."""
    goodput: float | None
    """Share of `time_spent` that went into steps that count."""
    time_spent: TimeSpent = field(default_factory=TimeSpent)
    """Where the time of the run's commands went."""
    failure: RunFailed | None = None
    """The failure that has ended the run."""
    missing_steps: tuple[tuple[int, int], ...] = ()
    """First and last of each range of steps without a record; empty in a sound run."""
    damaged_records: tuple[str, ...] = ()
    """Each damaged line of the journal, in words; empty in a sound run."""
    diagnostics: tuple[str, ...] = ()
    """Files left by profiles, out-of-memory errors and hangs, relative to the run's directory."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``ray-ulysses inspect RUN --json`` prints."""
        return {
            **{one.name: getattr(self, one.name) for one in fields(self)},
            "steps": list(map(from_json, self.steps.json_lines())),
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "checkpoints": [asdict(checkpoint) for checkpoint in self.checkpoints],
            "time_spent": self.time_spent.to_json(),
            "failure": None if self.failure is None else failure_fields(self.failure),
            "missing_steps": [list(steps) for steps in self.missing_steps],
            "damaged_records": list(self.damaged_records),
            "diagnostics": list(self.diagnostics),
        }


def read_history(
    run_dir: Place | str,
    *,
    is_held: Literal[False] | None = None,
    store: Store | None = None,
    journal: Journal | None = None,
) -> RunHistory:
    """Read the history of a run, which may be running or interrupted.

    Args:
        run_dir: ``<storage>/<name>``.
        is_held: False if nobody trains it, whoever holds the run; None asks who does.
        store: The store of its checkpoints; None for the run's directory.
        journal: Its journal, if it has been read already.

    Raises:
        OSError: The store can't be listed.
    """
    run_dir = place_of(run_dir)
    journal = read_journal(run_dir) if journal is None else journal
    return build_history(
        name=run_dir.absolute().name,
        journal=journal,
        checkpoints=_read_checkpoints(store if store is not None else open_store(run_dir), _world_sizes(journal)),
        owner=current_owner(run_dir) if is_held is None else None,
    )


def build_history(
    *,
    name: str,
    journal: Journal,
    checkpoints: Sequence[CheckpointRecord] = (),
    owner: LockOwner | None = None,
) -> RunHistory:
    """Return the history of a run (pure).

    Args:
        name: The run's name.
        journal: Its journal.
        checkpoints: Its checkpoint folders.
        owner: The live process that trains it; None without one.
    """
    counted = steps_that_count(journal.entries)
    kept = counted.kept
    last = kept[-1].step if kept else 0
    attempts = _by_attempt(journal.entries)
    if owner is not None and _has_ended(owner, journal.entries):
        owner = None
    failure = None if owner is not None else _last_failure(journal.entries)
    before, spent = inherited_steps(journal.entries), time_spent(journal.entries)
    return RunHistory(
        name=name,
        status="failed" if failure is not None else _status(attempts, owner),
        step=max(last, before.step),
        tokens=before.tokens + kept.tokens,
        steps=kept,
        attempts=tuple(map(_attempt_record, attempts, [None, *attempts])),
        checkpoints=tuple(checkpoints),
        rows_consumed=before.rows + kept.num_rows,
        data_digest=f"{(before.digest + kept.digest) % 2**64:016x}",
        lost_steps=len(counted.lost),
        goodput=spent.goodput,
        time_spent=spent,
        failure=failure,
        missing_steps=kept.missing_after(before.step),
        damaged_records=tuple(str(record) for record in journal.damaged),
    )


def _by_attempt(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Return the entries of each attempt that started, in order."""
    attempts: dict[int, list[Entry]] = {}
    for event in group_steps(entries):
        # These belong to no attempt: they are recorded beside the newest one, which may be days old.
        if not isinstance(event, StartFailed | RunFailed):
            attempts.setdefault(event.attempt, []).append(event)
    return [attempt for attempt in attempts.values() if _first(attempt, AttemptStarted) is not None]


def _first(attempt: Iterable[Entry], kind: type[_Kind]) -> _Kind | None:
    return next((event for event in attempt if isinstance(event, kind)), None)


def _end(attempt: Sequence[Entry]) -> AttemptEnded | None:
    """Return the last end recorded: the supervisor, which writes last, knows more than a single worker."""
    return _first(reversed(attempt), AttemptEnded)


def _last(events: Iterable[Entry], *kinds: type[Event]) -> Event | None:
    """Return the last event of the newest attempt that has one of some kinds."""
    found = (event for event in events if isinstance(event, kinds))
    return max(found, key=lambda event: (event.attempt, event.time), default=None)


def _has_ended(owner: LockOwner, events: Iterable[Entry]) -> bool:
    """Return whether the command that holds the run has recorded its end: it draws its last report while it does."""
    last = _last(events, AttemptStarted, RunFailed, CommandEnded)
    return last is not None and not isinstance(last, AttemptStarted) and last.time >= owner.since


def _last_failure(events: Iterable[Entry]) -> RunFailed | None:
    """Return the failure that has ended the run, unless another attempt started after it."""
    last = _last(events, AttemptStarted, RunFinished, RunFailed)
    return last if isinstance(last, RunFailed) else None


def _attempt_record(attempt: Sequence[Entry], before: Sequence[Entry] | None) -> AttemptRecord:
    started = _first(attempt, AttemptStarted)
    assert started is not None
    groups = [entry for entry in attempt if isinstance(entry, StepGroup)]
    ended, stream = _end(attempt), _first(attempt, StreamStarted)
    direct_rows, lacks_stream = None if stream is None else stream.direct_rows, False
    if started.streams and stream is None:
        direct_rows = sum(int((group.rows["end_row"] - group.rows["first_row"]).sum()) for group in groups)
        lacks_stream = (
            direct_rows >= _STREAM_STARTS_ROWS * started.dp_size
            and groups[-1].end_time - groups[0].time >= _STREAM_STARTS_S
        )
    return AttemptRecord(
        attempt=started.attempt,
        world_size=started.world_size,
        sp_size=started.sp_size,
        dp_size=started.dp_size,
        ring_size=started.ring_size,
        resumed_from=started.resumed_from,
        first_step=groups[0].first.step if groups else None,
        last_step=groups[-1].last.step if groups else None,
        reason=ended.reason if ended is not None else None,
        rank=ended.rank if ended is not None else None,
        node=ended.node if ended is not None else None,
        seconds_to_first_step=round(groups[0].time - _start_time(attempt, before), 3) if groups else None,
        stage=started.stage,
        stream_step=None if stream is None else stream.step,
        direct_rows=direct_rows,
        lacks_stream=lacks_stream,
    )


def _start_time(attempt: Sequence[Entry], before: Sequence[Entry] | None) -> float:
    """Return when the wait for an attempt began: at the end of the previous one, or with its command."""
    session = _session(attempt)
    if before is not None and session is not None and _session(before) == session:
        return max(entry.end_time if isinstance(entry, StepGroup) else entry.time for entry in before)
    first = attempt[0]
    started = first.command_started if isinstance(first, CommandEvent) else None
    return first.time if started is None else started


def _session(attempt: Iterable[Entry]) -> str | None:
    sessions = (event.session for event in attempt if isinstance(event, CommandEvent))
    return next((session for session in sessions if session is not None), None)


def _status(attempts: Sequence[Sequence[Entry]], owner: LockOwner | None) -> Status:
    finished = _first(attempts[-1], RunFinished) if attempts else None
    # The command that has finished it holds it a while longer; a later one trains it further.
    if finished is not None and (owner is None or owner.since <= finished.time):
        return "finished"
    if owner is not None:
        return "running"
    if not attempts:
        return "not_started"
    ended = _end(attempts[-1])
    if ended is None:
        return "interrupted"
    if ended.reason in CONTINUED:
        # The next attempt of its command has not begun to write.
        return "interrupted"
    return "stopped" if ended.reason.startswith(STOP_REASONS) else "failed"


def finished_step(entries: Iterable[Entry]) -> int | None:
    """Return the step at which a run finished (pure); None if its last attempt did not finish it.

    Args:
        entries: The run's journal.
    """
    attempts = _by_attempt(entries)
    found = _first(attempts[-1], RunFinished) if attempts else None
    return found.step if found is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How fast the newest attempt of a run trains and starts."""

    seconds_left: float
    """Until the run's last step, at the duration of the newest one."""
    start_s: float
    """From its command's start, or from the end of the attempt before it, to the end of its first step."""


def run_pace(run_dir: Place) -> Pace | None:
    """Return the pace of the newest attempt; None before the end of its first step."""
    numbers = attempt_numbers(run_dir)
    if not numbers:
        return None
    journal = read_journal(run_dir, ends_only=True)
    events = [event for event in ungroup_steps(journal.entries) if event.attempt == numbers[-1]]
    started = next((event for event in events if isinstance(event, AttemptStarted)), None)
    newest = next((event for event in reversed(events) if isinstance(event, StepDone)), None)
    if started is None or newest is None:
        return None
    attempts = build_history(name="", journal=journal).attempts
    start_s = attempts[-1].seconds_to_first_step if attempts else None
    if start_s is None:
        return None
    end = started.run_last_step or started.last_step
    return Pace(seconds_left=(end - newest.step) * newest.seconds, start_s=start_s)


def _world_sizes(journal: Journal) -> dict[int, int]:
    """Return the world size of each checkpoint whose commit is in the journal, by step."""
    commits = (entry for entry in journal.entries if isinstance(entry, CheckpointCommitted))
    return {commit.step: commit.world_size for commit in commits}


def _read_checkpoints(store: Store, world_sizes: Mapping[int, int]) -> list[CheckpointRecord]:
    """Return the folders under ``checkpoints/``; `checkpoint.choice` decides whether they are intact."""
    steps, committed = set(), set()
    for key in store.list(CHECKPOINT_FOLDER):
        match = CHECKPOINT_KEY.match(key)
        if match:
            steps.add(int(match["step"]))
            if match["name"] == MANIFEST_FILE:
                committed.add(int(match["step"]))
    return [
        CheckpointRecord(
            step=step,
            path=step_folder(step),
            committed=step in committed,
            # Reading a manifest takes a while.
            world_size=(world_sizes.get(step) or _world_size(store, step)) if step in committed else None,
        )
        for step in sorted(steps)
    ]


def _world_size(store: Store, step: int) -> int | None:
    """Return the world size in a checkpoint's manifest, if it can be read."""
    try:
        world_size = from_json(store.read_whole(manifest_key(step)))["world_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return world_size if type(world_size) is int and 0 < world_size < 2**63 else None
