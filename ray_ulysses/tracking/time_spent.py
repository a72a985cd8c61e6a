"""Divides a run's time into steps that count, startup, recovery, checkpoints and other parts.

The time of a run is that of its commands, each from its start to its last record in the journal. Every moment belongs
to exactly one part of `TimeSpent`, so that they add up; the time between two commands, when nothing ran, is separate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ray_ulysses.tracking.counted_steps import StepStack
from ray_ulysses.tracking.events import (
    STAGE,
    STOP_REASONS,
    AttemptEnded,
    AttemptStarted,
    CommandEvent,
    Evaluated,
    PhaseStarted,
    RunFinished,
)
from ray_ulysses.tracking.start_time import StartTime, StartTimeline
from ray_ulysses.tracking.step_groups import Entry, StepGroup, group_steps

_SPENT = np.dtype([("step", "<i8"), ("seconds", "<f8")])
_DIVIDED = {"startup_s": "starts", "waiting_s": "starts", "recovery_s": "recovery"}
"""The parts that are divided further, and the field of `TimeSpent` that holds the division."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSpent:
    """The time of all commands of a run, in seconds, by its use.

    Attributes:
        steps_s: In steps that count, including the wait for their rows.
        lost_steps_s: In steps that were lost to a failure and trained again.
        startup_s: From the start of a command to its first step, without `waiting_s`.
        waiting_s: Of a command without a step yet, until its workers were ready (nodes, processes, process group).
        recovery_s: From the last completed step of an attempt that failed to the first step of the next one.
        stages_s: From the end of a stage to the first step of the next one, in the same command.
        saves_s: Training was blocked by a checkpoint.
        evaluation_s: In evaluations.
        other_s: Between steps for other reasons, and at the end of a command.
        between_commands_s: From the last record of a command to the start of the next one; not part of the total.
        starts: The division of ``startup_s`` and ``waiting_s``.
        recovery: The division of ``recovery_s``.
    """

    steps_s: float = 0.0
    lost_steps_s: float = 0.0
    startup_s: float = 0.0
    waiting_s: float = 0.0
    recovery_s: float = 0.0
    stages_s: float = 0.0
    saves_s: float = 0.0
    evaluation_s: float = 0.0
    other_s: float = 0.0
    between_commands_s: float = 0.0
    starts: StartTime = field(default_factory=StartTime)
    recovery: StartTime = field(default_factory=StartTime)

    @property
    def total_s(self) -> float:
        """Sum of all parts: how long commands ran."""
        return float(sum(getattr(self, name) for name in _PARTS)) - self.between_commands_s

    @property
    def goodput(self) -> float | None:
        """Share of the time that went into steps that count; None before the first of them."""
        return round(self.steps_s / self.total_s, 4) if self.steps_s > 0 else None

    def to_json(self) -> dict[str, float | dict[str, float]]:
        """Return the parts and their sum, rounded to milliseconds."""
        divided = {name: _rounded(asdict(getattr(self, name))) for name in dict.fromkeys(_DIVIDED.values())}
        return {**_rounded({"total_s": self.total_s, **{name: getattr(self, name) for name in _PARTS}}), **divided}

    def metrics(self) -> dict[str, float]:
        """Return the parts, their sum and the goodput by the names of their metrics."""
        metrics: dict[str, float] = {}
        for name, value in self.to_json().items():
            if isinstance(value, dict):
                metrics |= {f"time_{name}_{part}": seconds for part, seconds in value.items()}
            else:
                metrics[f"time_{name}"] = value
        return metrics if self.goodput is None else {**metrics, "goodput": self.goodput}


_PARTS = tuple(one.name for one in fields(TimeSpent) if one.name not in _DIVIDED.values())


def _rounded(parts: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in parts.items()}


@dataclass(slots=True)
class _Command:
    """One ``train`` command up to its last record; its time is accounted for up to ``at``."""

    at: float
    end: float
    start: StartTimeline = field(default_factory=StartTimeline)
    has_stepped: bool = False
    attempt: int = 0
    attempt_has_stepped: bool = False
    ended_well: bool = False
    pause: str = "recovery_s"
    """The part that the time until the next attempt's first step belongs to, after the command's own first."""
    evaluation_s: float = 0.0


@dataclass(slots=True)
class TimeLedger:
    """Accounts for a run's time, one event after the other in the journal's order."""

    _spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    _divided: dict[str, dict[str, float]] = field(
        default_factory=lambda: {name: asdict(StartTime()) for name in _DIVIDED.values()}
    )
    _kept: StepStack = field(default_factory=StepStack)
    _session: str | None = None
    _command: _Command | None = None

    def add(self, event: Entry) -> None:
        """Account for the time up to an event."""
        for entry in group_steps((event,)):
            self._add(entry)

    def _add(self, event: Entry) -> None:
        if isinstance(event, RunFinished):
            # A later command may have recorded it for an attempt that died.
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
            command.start.phase(event)
        elif isinstance(event, AttemptStarted):
            command.start.note(event.time, "build_s")
            self._lose(self._kept.truncate(event.resumed_step))
        elif isinstance(event, StepGroup):
            self._add_steps(command, event)
        elif isinstance(event, Evaluated):
            command.evaluation_s += event.seconds
        elif isinstance(event, AttemptEnded):
            command.start.attempt_ended(event, command.end)
            command.pause = "stages_s" if event.reason == STAGE else "recovery_s"
            if event.reason.startswith(STOP_REASONS):
                command.ended_well = True
                self._add_pause(command, event.saving_seconds, event.time)
        command.end = max(command.end, event.end_time if isinstance(event, StepGroup) else event.time)

    def spent(self) -> TimeSpent:
        """Return the time up to the latest event, by its use."""
        # A copy is closed: the rest of the newest command is accounted for as what it turns out to be.
        ended = replace(
            self,
            _spent=dict(self._spent),
            _divided={name: dict(parts) for name, parts in self._divided.items()},
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
        """Return the command of an event; an event that names none belongs to the previous command."""
        before = self._command
        own = event if isinstance(event, CommandEvent) else None
        session = self._session if own is None or own.session is None else own.session
        if isinstance(event, AttemptStarted) and event.session is None:
            # An earlier version did not record the command of an attempt.
            session = f"attempt {event.attempt}"
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
        spent = np.zeros(len(group.rows), _SPENT)
        spent["step"] = group.rows["step"]
        first = group.first
        begin = first.time - first.seconds
        if command.attempt_has_stepped:
            self._add_pause(command, first.saving_seconds, begin)
        else:
            self._advance(command, begin, command.pause if command.has_stepped else "startup_s")
        command.has_stepped = command.attempt_has_stepped = True
        spent["seconds"][0] = self._advance(command, first.time, "steps_s")
        spent["seconds"][1:] = self._advance_through(command, group)
        command.start.begin(command.at, "unknown_s", has_stepped=True)
        self._lose(self._kept.push(spent))

    def _advance_through(self, command: _Command, group: StepGroup) -> NDArray[np.float64]:
        """Account for all steps of a group except the first; return the seconds of each."""
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
        """Take note of spans that were added; `timeline` keeps them."""

    def _add_pause(self, command: _Command, saving_s: float, until: float) -> None:
        """Account for the time between a step and the next one, or the end of the attempt."""
        self._advance(command, min(until, command.at + saving_s), "saves_s")
        self._advance(command, min(until, command.at + command.evaluation_s), "evaluation_s")
        self._advance(command, until, "other_s")
        command.evaluation_s = 0.0

    def _lose(self, steps: Iterable[NDArray[np.void]]) -> None:
        seconds = sum(float(rows["seconds"].sum()) for rows in steps)
        self._spent["steps_s"] -= seconds
        self._spent["lost_steps_s"] += seconds

    def _advance(self, command: _Command, to: float, part: str) -> float:
        """Account for the time up to a moment, as none if the clock went back."""
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


def time_spent(events: Iterable[Entry]) -> TimeSpent:
    """Return the time of a run by its use (pure).

    Args:
        events: The run's journal.
    """
    ledger = TimeLedger()
    for event in group_steps(events):
        ledger.add(event)
    return ledger.spent()


def _open_part(command: _Command) -> str:
    """Return the part that the time from a command's last accounted moment to its end belongs to."""
    if command.ended_well or command.attempt_has_stepped:
        return "other_s"
    return command.pause if command.has_stepped else "startup_s"
