"""Recovers steps whose journal record is damaged from the sums in the next checkpoint's record."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from ray_ulysses.tracking.events import AttemptStarted, CheckpointCommitted, Event, StepDone
from ray_ulysses.tracking.inherited_steps import InheritedSteps

_MODULUS = 2**64


def recovered_steps(events: Sequence[Event], lost: Sequence[tuple[int, int]]) -> list[StepDone | None]:
    """Return the step of each lost record (pure).

    The sums of a checkpoint, less all other steps up to it, are the tokens, rows and digest of the one step without a
    record. Its loss and its duration stay unknown.

    Args:
        events: The events of a journal without the lost ones.
        lost: For each lost record the number of events before it and its attempt, in order.

    Returns:
        For each lost record its step; None where the record was not of a step, where two steps are missing before the
        next checkpoint, or where no checkpoint follows.
    """
    found: list[StepDone | None] = []
    place, totals = 0, {0: InheritedSteps()}
    for next_place, attempt in lost:
        for event in events[place:next_place]:
            _count(event, totals)
        place = next_place
        step = _step_at(events, place, attempt, totals)
        if step is not None:
            _count(step, totals)
        found.append(step)
    return found


def _count(event: Event, totals: dict[int, InheritedSteps]) -> None:
    """Update the sums up to each step; their ``rows`` is the row after the step's last."""
    if isinstance(event, AttemptStarted):
        if event.taken_over is not None:
            totals[event.taken_over.step] = event.taken_over
        for step in [step for step in totals if step > event.resumed_step]:
            del totals[step]
    elif isinstance(event, StepDone) and event.step - 1 in totals:
        before = totals[event.step - 1]
        totals[event.step] = InheritedSteps(
            step=event.step,
            tokens=before.tokens + event.tokens,
            rows=event.rows[1],
            digest=(before.digest + event.digest) % _MODULUS,
        )


def _step_at(
    events: Sequence[Event], place: int, attempt: int, totals: Mapping[int, InheritedSteps]
) -> StepDone | None:
    """Return the step that is missing at a place, if the next checkpoint's sums leave exactly one."""
    last = _last_event(events, place, attempt)
    before = None if last is None else totals.get(last[1])
    if last is None or before is None:
        return None
    later: list[StepDone] = []
    for event in itertools.takewhile(lambda event: event.attempt == attempt, events[place:]):
        if isinstance(event, StepDone):
            later.append(event)
        elif isinstance(event, CheckpointCommitted) and event.step > before.step:
            others = [step for step in later if step.step <= event.step]
            expected = range(before.step + 2, event.step + 1)
            # A damaged step number may be huge: the lengths are compared first.
            if len(others) != len(expected) or [step.step for step in others] != list(expected):
                return None
            return _difference(event, before, others, time=last[0])
    return None


def _last_event(events: Sequence[Event], place: int, attempt: int) -> tuple[float, int] | None:
    """Return the time of an attempt's last step (or start) before a place, and the completed steps by then."""
    for event in reversed(events[:place]):
        if event.attempt != attempt:
            return None
        if isinstance(event, StepDone):
            return event.time, event.step
        if isinstance(event, AttemptStarted):
            return event.time, event.resumed_step
    return None


def _difference(
    commit: CheckpointCommitted, before: InheritedSteps, others: Sequence[StepDone], *, time: float
) -> StepDone | None:
    """Return the step that completes the sums of a checkpoint."""
    end = others[0].rows[0] if others else commit.next_row
    if commit.digest is None or commit.tokens is None or end is None:
        # Written by a version that did not record them.
        return None
    tokens = commit.tokens - before.tokens - sum(step.tokens for step in others)
    if tokens < 0 or end < before.rows:
        return None
    return StepDone(
        time=time,
        attempt=commit.attempt,
        step=before.step + 1,
        loss=math.nan,
        tokens=tokens,
        rows=(before.rows, end),
        digest=(commit.digest - before.digest - sum(step.digest for step in others)) % _MODULUS,
        seconds=0.0,
    )
