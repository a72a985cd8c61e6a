"""Builds the history of a run from its journal and its checkpoint folders."""

from __future__ import annotations

import math
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
    Evaluated,
    Event,
    RunFailed,
    RunFinished,
    Sampled,
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
"""An attempt that trained for less than `_STREAM_STARTS_S`, or on fewer rows per rank than this, may have ended before
its stream could start: the first step's rows and the prefetched rows are always read directly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """An attempt that started to train. Attempts that died earlier have a number but no record."""

    attempt: int
    """Number of the attempt."""
    world_size: int
    """Number of ranks."""
    sp_size: int
    """Sequence-parallel size: number of ranks that share a row."""
    dp_size: int
    """Data-parallel size: number of rows that are trained in parallel."""
    ring_size: int = 1
    """Size of the ring within `sp_size`; 1 if ring attention is not used."""
    resumed_from: str | None = None
    """Source of the state that the attempt resumed from, as in `attempt_started`."""
    first_step: int | None
    """First step that the attempt completed."""
    last_step: int | None
    """Last step that the attempt completed."""
    reason: str | None
    """Reason why the attempt ended; None while it runs, or if its end was not recorded."""
    rank: int | None = None
    """The rank on which the failure started, if a failure ended the attempt."""
    node: str | None = None
    """The node of the rank on which the failure started."""
    seconds_to_first_step: float | None
    """Time from the command's start, or the previous attempt's end, until the first step completed."""
    stage: str | None = None
    """Name of the stage that the attempt trained; None in a run without stages."""
    stream_step: int | None = None
    """The first step whose rows all came from Ray Data; None if there is no such step."""
    direct_rows: int | None = None
    """Number of rows that the ranks read directly, without Ray Data; None with `data.engine: local`."""
    lacks_stream: bool = False
    """Whether Ray Data delivered no rows although the attempt trained for a minute and on 20 rows per rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """A checkpoint folder."""

    step: int
    """Number of completed steps in the checkpoint."""
    path: str
    """Folder of the checkpoint, relative to the root of the checkpoint store."""
    committed: bool
    """Whether the folder contains a manifest. A folder without a manifest is never loaded."""
    world_size: int | None
    """Number of ranks that wrote the checkpoint; None if unknown or not committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHistory:
    """The history of a run so far. A step counts if the newest attempt's training state includes it."""

    name: str
    """Name of the run."""
    status: Status
    """Status of the run."""
    step: int
    """Number of completed steps that count."""
    tokens: int
    """Number of supervised tokens in the steps that count."""
    steps: Steps
    """The steps that count, ascending. A replayed step appears once, with its last record."""
    attempts: tuple[AttemptRecord, ...]
    """All attempts, in order."""
    checkpoints: tuple[CheckpointRecord, ...]
    """All checkpoint folders, by ascending step."""
    rows_consumed: int
    """Number of data rows in the steps that count."""
    data_digest: str
    """Sum of the data digests of the steps that count, as 16 hexadecimal digits."""
    lost_steps: int
    """Number of steps that were discarded because an attempt resumed from an earlier step."""
    goodput: float | None
    """Fraction of `time_spent` that was spent in steps that count."""
    time_spent: TimeSpent = field(default_factory=TimeSpent)
    """Breakdown of the time that the run's commands took."""
    evaluation: Evaluated | None = None
    """The newest evaluation at a step that counts; None before the first."""
    samples: tuple[Sampled, ...] = ()
    """Samples: objects with `step` and `samples` as in the event `samples`, the last of each step."""
    failure: RunFailed | None = None
    """The failure that ended the run; None if no failure ended it."""
    missing_steps: tuple[tuple[int, int], ...] = ()
    """First and last missing step of each gap in the recorded steps; empty in a healthy run."""
    damaged_records: tuple[str, ...] = ()
    """Description of each damaged journal line; empty in a healthy run."""
    diagnostics: tuple[str, ...] = ()
    """Files written by the profiler, or after out-of-memory errors and hangs, relative to the run's directory."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``ray-ulysses inspect RUN --json`` prints."""
        return {
            **{one.name: getattr(self, one.name) for one in fields(self)},
            "steps": list(map(from_json, self.steps.json_lines())),
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "checkpoints": [asdict(checkpoint) for checkpoint in self.checkpoints],
            "time_spent": self.time_spent.to_json(),
            "evaluation": None if self.evaluation is None else _evaluation_fields(self.evaluation),
            "samples": [{"step": one.step, "samples": list(map(asdict, one.samples))} for one in self.samples],
            "failure": None if self.failure is None else failure_fields(self.failure),
            "missing_steps": [list(steps) for steps in self.missing_steps],
            "damaged_records": list(self.damaged_records),
            "diagnostics": list(self.diagnostics),
        }


def _evaluation_fields(evaluation: Evaluated) -> dict[str, Any]:
    found = {name: getattr(evaluation, name) for name in ("step", "loss", "tokens")}
    found["corpora"] = [asdict(corpus) for corpus in evaluation.corpora]
    # JSON has no NaN.
    for one in (found, *found["corpora"]):
        one["loss"] = one["loss"] if math.isfinite(one["loss"]) else None
    return found


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
        is_held: False if the run is known not to be training, even if its lock is held; None to check the lock.
        store: The run's checkpoint store; None for the run's directory.
        journal: The run's journal, if it has already been read.

    Raises:
        OSError: The journal can't be read or the checkpoint store can't be listed.
    """
    run_dir = place_of(run_dir)
    journal = read_journal(run_dir) if journal is None else journal
    world_sizes = {one.step: one.world_size for one in journal.entries if isinstance(one, CheckpointCommitted)}
    return build_history(
        name=run_dir.absolute().name,
        journal=journal,
        checkpoints=_read_checkpoints(store if store is not None else open_store(run_dir), world_sizes),
        owner=current_owner(run_dir) if is_held is None else None,
    )


def build_history(
    *,
    name: str,
    journal: Journal,
    checkpoints: Sequence[CheckpointRecord] = (),
    owner: LockOwner | None = None,
) -> RunHistory:
    """Build the history of a run; ``owner`` is the live process that trains the run, or None if there is none."""
    counted = steps_that_count(journal.entries)
    kept = counted.kept
    last = kept[-1].step if kept else 0
    attempts = _by_attempt(journal.entries)
    if owner is not None and _has_ended(owner, journal.entries):
        owner = None
    failure = None if owner is not None else _last_failure(journal.entries)
    before, spent = inherited_steps(journal.entries), time_spent(journal.entries)
    step = max(last, before.step)
    # After a replay, the last samples of a step count.
    samples = {one.step: one for one in journal.entries if isinstance(one, Sampled) and one.step <= step}
    return RunHistory(
        name=name,
        status="failed" if failure is not None else _status(attempts, owner),
        step=step,
        tokens=before.tokens + kept.tokens,
        steps=kept,
        attempts=tuple(map(_attempt_record, attempts, [None, *attempts])),
        checkpoints=tuple(checkpoints),
        rows_consumed=before.rows + kept.num_rows,
        data_digest=f"{(before.digest + kept.digest) % 2**64:016x}",
        lost_steps=len(counted.lost),
        goodput=spent.goodput,
        time_spent=spent,
        evaluation=next(
            (one for one in reversed(journal.entries) if isinstance(one, Evaluated) and one.step <= step), None
        ),
        samples=tuple(one for _, one in sorted(samples.items())),
        failure=failure,
        missing_steps=kept.missing_after(before.step),
        damaged_records=tuple(str(record) for record in journal.damaged),
    )


def _by_attempt(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Return the entries of each attempt that started to train, in order."""
    attempts: dict[int, list[Entry]] = {}
    for event in group_steps(entries):
        # These belong to a command, not to the attempt that they are recorded under, which may be days old.
        if not isinstance(event, StartFailed | RunFailed):
            attempts.setdefault(event.attempt, []).append(event)
    return [attempt for attempt in attempts.values() if _first(attempt, AttemptStarted) is not None]


def _first(attempt: Iterable[Entry], kind: type[_Kind]) -> _Kind | None:
    return next((event for event in attempt if isinstance(event, kind)), None)


def _end(attempt: Sequence[Entry]) -> AttemptEnded | None:
    """Return the end that was recorded last. The supervisor records last, and knows more than a single worker."""
    return _first(reversed(attempt), AttemptEnded)


def _last(events: Iterable[Entry], *kinds: type[Event]) -> Event | None:
    """Return the newest event of the given kinds, ordered by attempt and time."""
    found = (event for event in events if isinstance(event, kinds))
    return max(found, key=lambda event: (event.attempt, event.time), default=None)


def _has_ended(owner: LockOwner, events: Iterable[Entry]) -> bool:
    """Return whether the command that owns the run's lock recorded its end, after which it still renders the report."""
    last = _last(events, AttemptStarted, RunFailed, CommandEnded)
    return last is not None and not isinstance(last, AttemptStarted) and last.time >= owner.since


def _last_failure(events: Iterable[Entry]) -> RunFailed | None:
    """Return the failure that ended the run, or None if another attempt started after the failure."""
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
    """Return when the wait for an attempt began: when the previous attempt ended, or when its command started."""
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
    # The command that finished the run keeps the lock for a while. An owner that came later trains the run further.
    if finished is not None and (owner is None or owner.since <= finished.time):
        return "finished"
    if owner is not None:
        return "running"
    if not attempts:
        return "not_started"
    ended = _end(attempts[-1])
    # After a continued one, the command's next attempt has not recorded anything yet.
    if ended is None or ended.reason in CONTINUED:
        return "interrupted"
    return "stopped" if ended.reason.startswith(STOP_REASONS) else "failed"


def finished_step(entries: Iterable[Entry]) -> int | None:
    """Return the step at which a run finished by its journal, or None if its newest attempt did not finish it."""
    attempts = _by_attempt(entries)
    found = _first(attempts[-1], RunFinished) if attempts else None
    return found.step if found is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Training speed and start-up time of a run's newest attempt."""

    seconds_left: float
    """Estimated time until the run's last step, based on the newest step's duration."""
    start_s: float
    """Time from the command's start, or the previous attempt's end, until the first step completed."""


def run_pace(run_dir: Place) -> Pace | None:
    """Return the pace of the newest attempt, or None before its first step completes."""
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


def _read_checkpoints(store: Store, world_sizes: Mapping[int, int]) -> list[CheckpointRecord]:
    """Return the folders under ``checkpoints/``, without verifying their content (see `checkpoint.choice`)."""
    found = [match for key in store.list(CHECKPOINT_FOLDER) if (match := CHECKPOINT_KEY.match(key))]
    committed = {int(match["step"]) for match in found if match["name"] == MANIFEST_FILE}
    return [
        CheckpointRecord(
            step=step,
            path=step_folder(step),
            committed=step in committed,
            # Prefer the journal, because reading a manifest is slow.
            world_size=(world_sizes.get(step) or _world_size(store, step)) if step in committed else None,
        )
        for step in sorted({int(match["step"]) for match in found})
    ]


def _world_size(store: Store, step: int) -> int | None:
    try:
        world_size = from_json(store.read_whole(manifest_key(step)))["world_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return world_size if type(world_size) is int and 0 < world_size < 2**63 else None
