"""Reads from the journal how fast a run trains and starts."""

from __future__ import annotations

from dataclasses import dataclass

from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.events import AttemptStarted, StepDone
from ray_ulysses.tracking.history import build_history
from ray_ulysses.tracking.journal_files import attempt_numbers
from ray_ulysses.tracking.journal_reader import read_head_and_tail, read_journal


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The pace of a run's newest attempt.

    Attributes:
        seconds_left: Until the run's last step, at the duration of the newest one; None where the last step is not
            known.
        start_s: From its command's start, or from the end of the attempt before it, to the end of its first step.
    """

    seconds_left: float | None
    start_s: float


def run_pace(run_dir: Place) -> Pace | None:
    """Return the pace of the newest attempt; None before the end of its first step."""
    numbers = attempt_numbers(run_dir)
    events = read_head_and_tail(run_dir, numbers[-1]) if numbers else []
    started = next((event for event in events if isinstance(event, AttemptStarted)), None)
    newest = next((event for event in reversed(events) if isinstance(event, StepDone)), None)
    if started is None or newest is None:
        return None
    attempts = build_history(name="", journal=read_journal(run_dir, ends_only=True)).attempts
    start_s = attempts[-1].seconds_to_first_step if attempts else None
    if start_s is None:
        return None
    end = started.run_last_step or started.last_step
    left = None if end is None else (end - newest.step) * newest.seconds
    return Pace(seconds_left=left, start_s=start_s)
