"""Consecutive steps of a journal as rows of a table: a run has a million of them, too many for one object each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.tracking.events import Event, StepDone

Rows = NDArray[np.void]
"""One-dimensional, of `STEP_ROW`."""

STEP_ROW = np.dtype(
    [
        ("attempt", "<i8"),
        ("time", "<f8"),
        ("step", "<i8"),
        ("loss", "<f8"),
        ("tokens", "<i8"),
        ("first_row", "<i8"),
        ("end_row", "<i8"),
        ("digest", "<u8"),
        ("seconds", "<f8"),
        ("saving_seconds", "<f8"),
        ("learning_rate", "<f8"),
        ("grad_norm", "<f8"),
        ("peak_memory_gib", "<f8"),
        ("mfu", "<f8"),
        ("z_loss", "<f8"),
        ("router_loss", "<f8"),
    ]
)
"""All fields of `StepDone`; one that is None is not a number."""

_Other = TypeVar("_Other")
OPTIONAL_FIELDS = ("learning_rate", "grad_norm", "peak_memory_gib", "mfu", "z_loss", "router_loss")
_MAX_STEPS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """Steps of one attempt that follow one another in its journal, with no other event between them.

    Attributes:
        rows: At least one step, in the journal's order.
    """

    rows: Rows

    @property
    def attempt(self) -> int:
        """The attempt that trained them."""
        return int(self.rows["attempt"][0])

    @property
    def time(self) -> float:
        """Time at which the first step was completed."""
        return float(self.rows["time"][0])

    @property
    def end_time(self) -> float:
        """Time at which the last step was completed."""
        return float(self.rows["time"].max())

    @property
    def first(self) -> StepDone:
        """The first step."""
        return step_of(self.rows[0])

    @property
    def last(self) -> StepDone:
        """The last step."""
        return step_of(self.rows[-1])


Entry = Event | StepGroup
"""The form in which a journal is read: its events in order, with consecutive steps in groups."""


def group_steps(entries: Iterable[Entry | _Other]) -> Iterator[Entry | _Other]:
    """Yield a journal's entries, and anything else between them, with steps gathered into groups of bounded size."""
    steps: list[StepDone] = []
    for entry in entries:
        belongs = isinstance(entry, StepDone) and (not steps or steps[-1].attempt == entry.attempt)
        if steps and not (belongs and len(steps) < _MAX_STEPS):
            yield StepGroup(step_rows(steps))
            steps = []
        if isinstance(entry, StepDone):
            steps.append(entry)
        else:
            yield entry
    if steps:
        yield StepGroup(step_rows(steps))


def ungroup_steps(entries: Iterable[Entry | _Other]) -> Iterator[Event | _Other]:
    """Yield a journal's events, and anything else between them, one by one."""
    for entry in entries:
        if isinstance(entry, StepGroup):
            yield from map(step_of, entry.rows)
        else:
            yield entry


def step_of(row: Any) -> StepDone:
    """Return the event that a row of `STEP_ROW` holds."""
    attempt, time, step, loss, tokens, first_row, end_row, digest, seconds, saving_seconds, *optional = row.item()
    there = {name: value for name, value in zip(OPTIONAL_FIELDS, optional, strict=True) if value == value}
    return StepDone(
        attempt=attempt,
        time=time,
        step=step,
        loss=loss,
        tokens=tokens,
        rows=(first_row, end_row),
        digest=digest,
        seconds=seconds,
        saving_seconds=saving_seconds,
        **there,
    )


def step_rows(steps: Sequence[StepDone]) -> Rows:
    """Return steps as rows."""
    return np.array([_row(step) for step in steps], dtype=STEP_ROW)


def _row(step: StepDone) -> tuple[Any, ...]:
    optional = [getattr(step, name) for name in OPTIONAL_FIELDS]
    return (
        step.attempt,
        step.time,
        step.step,
        step.loss,
        step.tokens,
        *step.rows,
        step.digest,
        step.seconds,
        step.saving_seconds,
        *(math.nan if value is None else value for value in optional),
    )
