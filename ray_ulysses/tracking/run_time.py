"""Breaks down a run's time into steps that count, startup, recovery, checkpoints and other categories.

A run's time is the sum over its commands, each from its start to its last journal record. Every moment belongs to
exactly one category of `TimeSpent`, so the categories add up to the total. The time between two commands, when nothing
runs, is separate. A `Timeline` contains the same breakdown as time spans, for drawing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ray_ulysses.tracking.events import (
    STAGE,
    STOP_REASONS,
    AttemptEnded,
    AttemptStarted,
    CommandEvent,
    Evaluated,
    PhaseStarted,
    RunFinished,
    Sampled,
)
from ray_ulysses.tracking.steps import Entry, StepGroup, group_steps

Moments = NDArray[np.float64]
_Spans = dict[str, list[tuple[Moments, Moments]]]
_Mark = tuple[float, str]
"""A time, and the category that begins at that time."""

_DIVIDED = {"startup_s": "starts", "waiting_s": "starts", "recovery_s": "recovery"}
"""Field of `TimeSpent` that contains a category's finer breakdown, for each category that has one."""
_PARTS_OF_PHASES = {"build": "build_s", "load": "load_s"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StartTime:
    """Breakdown of the time from a command's start, or from the last step before a failure, to the next step."""

    cut_off_s: float = 0.0
    """Time from an attempt's last completed step to its failure."""
    detect_s: float = 0.0
    """Time from a failure to its detection."""
    form_s: float = 0.0
    """Time to start the next attempt's ranks, until all ranks have joined."""
    load_s: float = 0.0
    """Time to choose, load and verify a checkpoint."""
    build_s: float = 0.0
    """Time for configuration, plan, self-test and model, and the wait for the first rows."""
    unknown_s: float = 0.0
    """Time that the journal does not attribute to a category."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSpent:
    """Time that all commands of a run spent, by category, in seconds."""

    steps_s: float = 0.0
    """Time spent on steps that count, including the wait for their rows."""
    lost_steps_s: float = 0.0
    """Time spent on steps that were lost to a failure and trained again."""
    startup_s: float = 0.0
    """Time from a command's start to its first step, excluding `waiting_s`."""
    waiting_s: float = 0.0
    """Time spent waiting for workers (nodes, processes, process group) before a command's first step."""
    recovery_s: float = 0.0
    """Time from a failed attempt's last completed step to the next attempt's first step."""
    stages_s: float = 0.0
    """Time from the end of a stage to the next stage's first step, in the same command."""
    saves_s: float = 0.0
    """Time for which checkpoints blocked training."""
    evaluation_s: float = 0.0
    """Time spent on evaluations and samples."""
    other_s: float = 0.0
    """Time spent on other pauses between steps, and on ending each command."""
    between_commands_s: float = 0.0
    """Time from a command's last record to the next command's start; not part of the total."""
    starts: StartTime = field(default_factory=StartTime)
    """Breakdown of ``startup_s`` and ``waiting_s``."""
    recovery: StartTime = field(default_factory=StartTime)
    """Breakdown of ``recovery_s``."""

    @property
    def total_s(self) -> float:
        """Time for which commands ran: the sum of all categories except `between_commands_s`."""
        return float(sum(getattr(self, name) for name in _PARTS)) - self.between_commands_s

    @property
    def goodput(self) -> float | None:
        """Fraction of `total_s` that was spent in steps that count; None before the first step."""
        return round(self.steps_s / self.total_s, 4) if self.steps_s > 0 else None

    def to_json(self) -> dict[str, float | dict[str, float]]:
        """Return the categories and their total, rounded to milliseconds."""
        divided = {name: _rounded(asdict(getattr(self, name))) for name in dict.fromkeys(_DIVIDED.values())}
        return {**_rounded({"total_s": self.total_s, **{name: getattr(self, name) for name in _PARTS}}), **divided}

    def metrics(self) -> dict[str, float]:
        """Return the categories, their total and the goodput, by metric name."""
        metrics: dict[str, float] = {}
        for name, value in self.to_json().items():
            if isinstance(value, dict):
                metrics |= {f"time/{name}_{part}": seconds for part, seconds in value.items()}
            else:
                metrics[f"time/{name}"] = value
        return metrics if self.goodput is None else {**metrics, "time/goodput": self.goodput}


_PARTS = tuple(one.name for one in fields(TimeSpent) if one.name not in _DIVIDED.values())


def _rounded(parts: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in parts.items()}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """Time spans of a run's commands by category, in seconds since the epoch."""

    spans: dict[str, tuple[Moments, Moments]]
    """Start and end times of the spans of each category, ascending. Starts and recoveries are split into the categories
    of `StartTime`. Steps that are lost later remain in ``steps_s``."""

    @property
    def begin(self) -> float:
        """Start of the first span, or 0 if there are no spans."""
        return min((float(begins[0]) for begins, _ in self.spans.values()), default=0.0)

    @property
    def end(self) -> float:
        """End of the last span, or 0 if there are no spans."""
        return max((float(ends.max()) for _, ends in self.spans.values()), default=0.0)

    def seconds_between(self, part: str, edges: Moments) -> Moments:
        """Return the seconds of a category within each interval between consecutive ``edges``, which must ascend."""
        if part not in self.spans:
            return np.zeros(len(edges) - 1)
        begins, ends = self.spans[part]
        moments = np.column_stack((begins, ends)).reshape(-1)
        passed = np.repeat(np.append(0.0, np.cumsum(ends - begins)), 2)[1:-1]
        return np.diff(np.interp(edges, moments, passed))


@dataclass(slots=True)
class _StartTimeline:
    """Categories of a command's time since its last step, derived from its events."""

    _marks: list[_Mark] = field(default_factory=list)
    _end_of_attempt: list[_Mark] = field(default_factory=list)
    _has_stepped: bool = False

    def begin(self, at: float, part: str, *, has_stepped: bool = False) -> None:
        """Discard everything before a time, at which a category begins; ``has_stepped`` if a step has just ended."""
        self._marks, self._end_of_attempt, self._has_stepped = [(at, part)], [], has_stepped

    def note(self, at: float, part: str) -> None:
        """Add the category that begins at a time."""
        self._marks.append((at, part))

    def attempt_ended(self, event: AttemptEnded, last_record: float) -> None:
        """Add the end of the attempt. If a failure was recorded several times, the last record with `fault_at` wins."""
        detected = event.time if event.detected_at is None else event.detected_at
        if event.reason.startswith(STOP_REASONS):
            self._end_of_attempt = [(event.time, "form_s")]
        elif event.fault_at is not None:
            fault = min(event.fault_at, detected)
            if self._has_stepped:
                self._marks = [(fault, "cut_off_s")]
            self._end_of_attempt = [(fault, "detect_s"), (detected, "form_s")]
        elif not self._end_of_attempt:
            self._end_of_attempt = [(min(last_record, detected), "unknown_s"), (detected, "form_s")]

    def attempt_vanished(self, last_record: float) -> None:
        """Add the end of an attempt without an end record, because another attempt has started."""
        if not self._end_of_attempt:
            self._end_of_attempt = [(last_record, "unknown_s")]

    def split(self, begin: float, end: float) -> Iterator[tuple[str, float]]:
        """Split an interval into categories; yield each with its seconds, which add up to the interval's length."""
        marks = self._marks
        if self._end_of_attempt:
            first = self._end_of_attempt[0][0]
            marks = [*(mark for mark in marks if mark[0] <= first), *self._end_of_attempt]
        at, part = begin, marks[0][1]
        for moment, following in marks:
            moment = min(max(moment, at), end)
            yield part, moment - at
            at, part = moment, following
        yield part, end - at


@dataclass(slots=True)
class _Command:
    """A ``train`` command up to its last record. Its time is accounted for up to ``at``."""

    at: float
    end: float
    start: _StartTimeline = field(default_factory=_StartTimeline)
    has_stepped: bool = False
    attempt: int = 0
    attempt_has_stepped: bool = False
    ended_well: bool = False
    pause: str = "recovery_s"
    """Category of the time until the next attempt's first step, once the command has completed a step."""
    evaluation_s: float = 0.0


@dataclass(slots=True)
class TimeLedger:
    """Accounts for a run's time, event by event, in journal order."""

    _spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    _divided: dict[str, dict[str, float]] = field(
        default_factory=lambda: {name: asdict(StartTime()) for name in _DIVIDED.values()}
    )
    _spans: _Spans | None = None
    """The spans accounted for so far; None if only totals are needed."""
    # Numbers and durations of the steps that count so far.
    _steps: array[int] = field(default_factory=lambda: array("q"))
    _seconds: array[float] = field(default_factory=lambda: array("d"))
    _session: str | None = None
    _command: _Command | None = None

    def add(self, event: Entry) -> None:
        """Account for the time up to an event."""
        for entry in group_steps((event,)):
            self._add(entry)

    def _add(self, event: Entry) -> None:
        if isinstance(event, RunFinished):
            # A later command may have recorded this event for an attempt that died.
            return
        command = self._command_of(event)
        if event.attempt != command.attempt:
            if command.attempt:
                command.start.attempt_vanished(command.end)
            if not command.ended_well:
                command.pause = "recovery_s"
            command.attempt, command.attempt_has_stepped, command.ended_well = event.attempt, False, False
            command.evaluation_s = 0.0
            self._advance(command, event.time, command.pause if command.has_stepped else "waiting_s")
            command.start.begin(event.time, "unknown_s")
        if isinstance(event, PhaseStarted):
            command.start.note(event.time, _PARTS_OF_PHASES.get(event.part or "", "unknown_s"))
        elif isinstance(event, AttemptStarted):
            command.start.note(event.time, "build_s")
            self._resume(event.resumed_step)
        elif isinstance(event, StepGroup):
            self._add_steps(command, event)
        elif isinstance(event, Evaluated | Sampled):
            command.evaluation_s += event.seconds
        elif isinstance(event, AttemptEnded):
            command.start.attempt_ended(event, command.end)
            command.pause = "stages_s" if event.reason == STAGE else "recovery_s"
            if event.reason.startswith(STOP_REASONS):
                command.ended_well = True
                self._add_pause(command, event.saving_seconds, event.time)
        command.end = max(command.end, event.end_time if isinstance(event, StepGroup) else event.time)

    def spent(self) -> TimeSpent:
        """Return the time up to the latest event, by category."""
        # Close a copy, because later events may still change the category of the newest command's open time.
        ended = replace(
            self,
            _spent=dict(self._spent),
            _divided={name: dict(parts) for name, parts in self._divided.items()},
            _spans=None,
            _command=None if self._command is None else replace(self._command),
        )
        ended.close()
        starts, recovery = (StartTime(**ended._divided[name]) for name in ("starts", "recovery"))
        return TimeSpent(**ended._spent, starts=starts, recovery=recovery)

    def close(self) -> None:
        """Account for the rest of the newest command, up to its last record."""
        if self._command is not None:
            self._advance(self._command, self._command.end, _open_part(self._command))

    def _command_of(self, event: Entry) -> _Command:
        """Return the command of an event. An event without a session belongs to the current command."""
        before = self._command
        own = event if isinstance(event, CommandEvent) else None
        session = self._session if own is None or own.session is None else own.session
        if before is not None and session == self._session:
            return before
        if before is not None:
            self._advance(before, before.end, _open_part(before))
        started = event.time if own is None or own.command_started is None else own.command_started
        asked = started if own is None or own.workers_asked is None else own.workers_asked
        if before is not None:
            self._spent["between_commands_s"] += max(0.0, started - before.end)
        self._session, self._command = session, _Command(at=started, end=started)
        self._command.start.begin(started, "build_s")
        self._advance(self._command, asked, "startup_s")
        self._command.start.begin(asked, "unknown_s" if own is None or own.workers_asked is None else "form_s")
        return self._command

    def _add_steps(self, command: _Command, group: StepGroup) -> None:
        first = group.first
        begin = first.time - first.seconds
        if command.attempt_has_stepped:
            self._add_pause(command, first.saving_seconds, begin)
        else:
            # Has an effect only if the record of the attempt's start is damaged.
            self._resume(first.step - 1)
            # A run is evaluated before its first step.
            self._advance(command, begin - command.evaluation_s, command.pause if command.has_stepped else "startup_s")
            self._advance(command, begin, "evaluation_s" if command.evaluation_s else "startup_s")
            command.evaluation_s = 0.0
        command.has_stepped = command.attempt_has_stepped = True
        self._seconds.append(self._advance(command, first.time, "steps_s"))
        self._seconds.frombytes(self._advance_through(command, group).tobytes())
        self._steps.frombytes(group.rows["step"].tobytes())
        command.start.begin(command.at, "unknown_s", has_stepped=True)

    def _resume(self, step: int) -> None:
        """Reclassify the time of the steps after ``step``, from which an attempt resumed, as lost."""
        is_lost = np.array(self._steps) > step
        if is_lost.any():
            seconds = np.array(self._seconds)
            lost_s = float(seconds[is_lost].sum())
            self._spent["steps_s"] -= lost_s
            self._spent["lost_steps_s"] += lost_s
            self._steps = array("q", np.array(self._steps)[~is_lost].tobytes())
            self._seconds = array("d", seconds[~is_lost].tobytes())

    def _advance_through(self, command: _Command, group: StepGroup) -> NDArray[np.float64]:
        """Account for all steps of a group except the first; return the duration of each step."""
        rows = group.rows[1:]
        if not len(rows):
            return np.zeros(0)
        ends = np.maximum.accumulate(np.append(command.at, rows["time"]))
        begin = rows["time"] - rows["seconds"]
        saved = np.maximum(ends[:-1], np.minimum(begin, ends[:-1] + rows["saving_seconds"]))
        begun = np.maximum(saved, begin)
        seconds: NDArray[np.float64] = ends[1:] - begun
        command.at = float(ends[-1])
        for part, begins, stops in (
            ("saves_s", ends[:-1], saved),
            ("other_s", saved, begun),
            ("steps_s", begun, ends[1:]),
        ):
            self._spent[part] += float((stops - begins).sum())
            self._note(part, begins, stops)
        return seconds

    def _note(self, part: str, begins: ArrayLike, ends: ArrayLike) -> None:
        if self._spans is not None:
            self._spans.setdefault(part, []).append((np.atleast_1d(begins), np.atleast_1d(ends)))

    def _add_pause(self, command: _Command, saving_s: float, until: float) -> None:
        """Account for the time between a step and the next step or the attempt's end."""
        self._advance(command, min(until, command.at + saving_s), "saves_s")
        self._advance(command, min(until, command.at + command.evaluation_s), "evaluation_s")
        self._advance(command, until, "other_s")
        command.evaluation_s = 0.0

    def _advance(self, command: _Command, to: float, part: str) -> float:
        """Account for the time up to ``to``, and return its seconds: 0 if the clock went backwards."""
        at, seconds = command.at, max(0.0, to - command.at)
        self._spent[part] += seconds
        shares = command.start.split(at, at + seconds) if part in _DIVIDED else [(part, seconds)]
        for name, share in shares:
            if part in _DIVIDED:
                self._divided[_DIVIDED[part]][name] += share
            self._note(name, at, at + share)
            at += share
        command.at += seconds
        return seconds


def time_spent(entries: Iterable[Entry]) -> TimeSpent:
    """Return the time that a run's journal accounts for, by category."""
    return _ledger(entries, None).spent()


def run_timeline(entries: Iterable[Entry]) -> Timeline:
    """Return the time that a run's journal accounts for, as spans."""
    found: _Spans = {}
    _ledger(entries, found).close()
    return Timeline(spans={part: spans for part, ones in found.items() if (spans := _joined(ones)) is not None})


def _ledger(entries: Iterable[Entry], spans: _Spans | None) -> TimeLedger:
    ledger = TimeLedger(_spans=spans)
    for entry in group_steps(entries):
        ledger.add(entry)
    return ledger


def _open_part(command: _Command) -> str:
    """Return the category of a command's time after ``at``."""
    if command.ended_well or command.attempt_has_stepped:
        return "other_s"
    return command.pause if command.has_stepped else "startup_s"


def _joined(found: list[tuple[Moments, Moments]]) -> tuple[Moments, Moments] | None:
    """Return all non-empty spans, ascending, or None if there are none."""
    begins = np.concatenate([one for one, _ in found])
    ends = np.concatenate([one for _, one in found])
    order = np.flatnonzero(ends > begins)
    order = order[np.argsort(begins[order], kind="stable")]
    return (begins[order], ends[order]) if len(order) else None
