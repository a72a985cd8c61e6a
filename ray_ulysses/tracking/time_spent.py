"""Where a run's time went: steps that count, and everything else by name.

The time of a run is that of its commands, each from its start to the last record that the journal has of it. Every
moment of it belongs to exactly one of the parts of `TimeSpent`, so that they add up; the time between two commands,
when nothing ran, is kept apart from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.tracking.events import (
    STOP_REASONS,
    AttemptEnded,
    AttemptStarted,
    Evaluated,
    OfCommand,
    RunFinished,
)
from ray_ulysses.tracking.step_runs import Entry, StepRun, StepStack, grouped

_SPENT = np.dtype([("step", "<i8"), ("seconds", "<f8")])


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSpent:
    """Seconds of all commands of a run, by what they went into.

    Attributes:
        steps_s: In steps that count, the wait for their rows included.
        lost_steps_s: In steps whose work was thrown away by a failure, and trained again.
        startup_s: From the start of a command to its first step, apart from `waiting_s`.
        waiting_s: Of a command without a step yet: until its workers were there (nodes, processes, process group).
        recovery_s: From the last completed step of an attempt that failed to the first step of the next one.
        saves_s: Training stood still for a checkpoint.
        evaluation_s: In evaluations.
        other_s: Between steps otherwise, and in the end of a command.
        between_commands_s: From the last record of a command to the start of the next, when nothing ran: no part of
            the run's time.
    """

    steps_s: float = 0.0
    lost_steps_s: float = 0.0
    startup_s: float = 0.0
    waiting_s: float = 0.0
    recovery_s: float = 0.0
    saves_s: float = 0.0
    evaluation_s: float = 0.0
    other_s: float = 0.0
    between_commands_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All parts together: how long commands ran."""
        return float(sum(asdict(self).values())) - self.between_commands_s

    @property
    def goodput(self) -> float | None:
        """Share of the time that went into steps that count; None before the first of them."""
        return round(self.steps_s / self.total_s, 4) if self.steps_s > 0 else None

    def to_json(self) -> dict[str, float]:
        """Return the parts, and their sum, in milliseconds' precision."""
        return {name: round(seconds, 3) for name, seconds in {"total_s": self.total_s, **asdict(self)}.items()}


@dataclass(slots=True)
class _Command:
    """One ``train`` command, up to the last record of it that was added."""

    at: float
    """Up to here its time is accounted for."""
    end: float
    has_stepped: bool = False
    attempt: int = 0
    attempt_has_stepped: bool = False
    ended_well: bool = False
    evaluation_s: float = 0.0


@dataclass(slots=True)
class TimeLedger:
    """Accounts for a run's time, event by event in the journal's order."""

    _spent: dict[str, float] = field(default_factory=lambda: asdict(TimeSpent()))
    _kept: StepStack = field(default_factory=StepStack)
    _session: str | None = None
    _command: _Command | None = None

    def add(self, event: Entry) -> None:
        """Account for the time up to an event."""
        for entry in grouped((event,)):
            self._add(entry)

    def _add(self, event: Entry) -> None:
        if isinstance(event, RunFinished):
            # A later command may have said it in the name of an attempt that died before.
            return
        command = self._command_of(event)
        if event.attempt != command.attempt:
            command.attempt, command.attempt_has_stepped, command.ended_well = event.attempt, False, False
            command.evaluation_s = 0.0
            self._advance(command, event.time, "recovery_s" if command.has_stepped else "waiting_s")
        if isinstance(event, AttemptStarted):
            self._lose(self._kept.cut(event.resumed_step))
        elif isinstance(event, StepRun):
            self._add_steps(command, event)
        elif isinstance(event, Evaluated):
            command.evaluation_s += event.seconds
        elif isinstance(event, AttemptEnded) and event.reason.startswith(STOP_REASONS):
            command.ended_well = True
            self._add_pause(command, event.saving_seconds, event.time)
        command.end = max(command.end, event.end_time if isinstance(event, StepRun) else event.time)

    def spent(self) -> TimeSpent:
        """Return where the time went, up to the latest event."""
        parts = dict(self._spent)
        command = self._command
        if command is not None:
            parts[_open_part(command)] += max(0.0, command.end - command.at)
        return TimeSpent(**parts)

    def _command_of(self, event: Entry) -> _Command:
        """Return the command that an event is of; one that names none is of the command before."""
        before = self._command
        said = event if isinstance(event, OfCommand) else None
        session = self._session if said is None or said.session is None else said.session
        if isinstance(event, AttemptStarted) and event.session is None:
            # Of a version that did not say which command an attempt is of: its own.
            session = f"attempt {event.attempt}"
        if before is not None and session == self._session:
            return before
        if before is not None:
            self._advance(before, before.end, _open_part(before))
        started = event.time if said is None or said.command_started is None else said.command_started
        asked = started if said is None or said.workers_asked is None else said.workers_asked
        if before is not None:
            self._spent["between_commands_s"] += max(0.0, started - before.end)
        self._session, self._command = session, _Command(at=started, end=started)
        self._advance(self._command, asked, "startup_s")
        return self._command

    def _add_steps(self, command: _Command, run: StepRun) -> None:
        spent = np.zeros(len(run.rows), _SPENT)
        spent["step"] = run.rows["step"]
        first = run.first
        begin = first.time - first.seconds
        if command.attempt_has_stepped:
            self._add_pause(command, first.saving_seconds, begin)
        else:
            self._advance(command, begin, "recovery_s" if command.has_stepped else "startup_s")
        command.has_stepped = command.attempt_has_stepped = True
        spent["seconds"][0] = self._advance(command, first.time, "steps_s")
        spent["seconds"][1:] = self._advance_through(command, run)
        self._lose(self._kept.push(spent))

    def _advance_through(self, command: _Command, run: StepRun) -> NDArray[np.float64]:
        """Account for all steps of a run but its first, as for one after the other; return the seconds of each."""
        rows = run.rows[1:]
        if not len(rows):
            return np.zeros(0)
        ends = np.maximum.accumulate(np.append(command.at, rows["time"]))
        begin = rows["time"] - rows["seconds"]
        saved = np.maximum(ends[:-1], np.minimum(begin, ends[:-1] + rows["saving_seconds"]))
        begun = np.maximum(saved, begin)
        seconds: NDArray[np.float64] = ends[1:] - begun
        command.at = float(ends[-1])
        self._spent["saves_s"] += float((saved - ends[:-1]).sum())
        self._spent["other_s"] += float((begun - saved).sum())
        self._spent["steps_s"] += float(seconds.sum())
        return seconds

    def _add_pause(self, command: _Command, saving_s: float, until: float) -> None:
        """Account for what lies between a step and the next, or the attempt's end."""
        self._advance(command, min(until, command.at + saving_s), "saves_s")
        self._advance(command, min(until, command.at + command.evaluation_s), "evaluation_s")
        self._advance(command, until, "other_s")
        command.evaluation_s = 0.0

    def _lose(self, steps: Iterable[NDArray[np.void]]) -> None:
        seconds = sum(float(rows["seconds"].sum()) for rows in steps)
        self._spent["steps_s"] -= seconds
        self._spent["lost_steps_s"] += seconds

    def _advance(self, command: _Command, to: float, part: str) -> float:
        """Account for the time up to a moment; a clock that went back makes it none."""
        seconds = max(0.0, to - command.at)
        command.at += seconds
        self._spent[part] += seconds
        return seconds


def time_spent(events: Iterable[Entry]) -> TimeSpent:
    """Return where a run's time went (pure).

    Args:
        events: The run's journal.
    """
    ledger = TimeLedger()
    for event in grouped(events):
        ledger.add(event)
    return ledger.spent()


def _open_part(command: _Command) -> str:
    """Return what the time from the last accounted moment of a command to its end is."""
    if command.ended_well or command.attempt_has_stepped:
        return "other_s"
    return "recovery_s" if command.has_stepped else "startup_s"
