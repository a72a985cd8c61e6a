"""Steps of a journal as rows of a table: a run has a million of them, and as objects they would take gigabytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.tracking.events import Event, StepDone

Rows = NDArray[np.void]

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
        # One bit for each of `_OPTIONAL` that the record has.
        ("has", "u1"),
    ]
)
"""All fields of `StepDone`."""

_Other = TypeVar("_Other")
_OPTIONAL = ("learning_rate", "grad_norm", "peak_memory_gib", "mfu")
_MOST_ROWS = 4096
_FEW_ROWS = 256


@dataclass(frozen=True, slots=True, eq=False)
class StepRun:
    """Steps of one attempt that follow one another in its journal, with no other event between them.

    Attributes:
        rows: At least one row of `STEP_ROW`, in the journal's order.
    """

    rows: Rows

    @property
    def attempt(self) -> int:
        """The attempt that trained them."""
        return int(self.rows["attempt"][0])

    @property
    def time(self) -> float:
        """When the first of them was completed."""
        return float(self.rows["time"][0])

    @property
    def end_time(self) -> float:
        """When the last of them was completed."""
        return float(self.rows["time"].max())

    @property
    def first(self) -> StepDone:
        """The first step."""
        return step_of(self.rows[0])

    @property
    def last(self) -> StepDone:
        """The last step."""
        return step_of(self.rows[-1])


Entry = Event | StepRun
"""What a journal is read as: its events in order, in which steps stand together."""


def grouped(entries: Iterable[Entry | _Other]) -> Iterator[Entry | _Other]:
    """Yield a journal's entries, and what else stands between them, with steps gathered into runs of bounded length."""
    steps: list[StepDone] = []
    for entry in entries:
        belongs = isinstance(entry, StepDone) and (not steps or steps[-1].attempt == entry.attempt)
        if steps and not (belongs and len(steps) < _MOST_ROWS):
            yield _run_of(steps)
            steps = []
        if isinstance(entry, StepDone):
            steps.append(entry)
        else:
            yield entry
    if steps:
        yield _run_of(steps)


def single(entries: Iterable[Entry | _Other]) -> Iterator[Event | _Other]:
    """Yield a journal's events, and what else stands between them, one by one."""
    for entry in entries:
        if isinstance(entry, StepRun):
            yield from map(step_of, entry.rows)
        else:
            yield entry


def step_of(row: Any) -> StepDone:
    """Return the event that a row of `STEP_ROW` holds."""
    attempt, time, step, loss, tokens, first_row, end_row, digest, seconds, saving_seconds, *optional, has = row.item()
    known = {name: value for bit, (name, value) in enumerate(zip(_OPTIONAL, optional, strict=True)) if has >> bit & 1}
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
        **known,
    )


def total(columns: Iterable[NDArray[Any]]) -> int:
    """Return the sum of whole numbers from 0 on, exactly, however large it is."""
    return sum((int((column >> 32).sum()) << 32) + int((column & 0xFFFFFFFF).sum()) for column in columns)


class StepStack:
    """Rows with a field ``step``, each step once and ascending: those that count so far."""

    def __init__(self) -> None:
        """Begin without any."""
        self.parts: list[Rows] = []

    def cut(self, step: int) -> list[Rows]:
        """Take away what lies beyond a step, and return it in order."""
        gone: list[Rows] = []
        while self.parts and self.parts[-1]["step"][-1] > step:
            part = self.parts.pop()
            place = int(part["step"].searchsorted(step, side="right"))
            gone.append(part[place:])
            if place:
                self.parts.append(part[:place])
        return gone[::-1]

    def push(self, rows: Rows) -> list[Rows]:
        """Add steps, and return the rows of those that were there already, which they replace."""
        steps = rows["step"]
        is_ascending = len(rows) == 1 or bool((steps[1:] > steps[:-1]).all())
        if is_ascending and (not self.parts or steps[0] > self.parts[-1]["step"][-1]):
            if self.parts and len(self.parts[-1]) + len(rows) <= _FEW_ROWS:
                rows = np.concatenate((self.parts.pop(), rows))
            self.parts.append(rows)
            return []
        mixed = np.concatenate((*self.cut(int(steps.min()) - 1), rows))
        # Of equal steps the last one is kept.
        _, places = np.unique(mixed["step"][::-1], return_index=True)
        places = len(mixed) - 1 - places
        self.parts.append(mixed[places])
        replaced = np.delete(mixed, places)
        return [replaced] if len(replaced) else []


def _run_of(steps: Sequence[StepDone]) -> StepRun:
    return StepRun(np.array([_row(step) for step in steps], dtype=STEP_ROW))


def _row(step: StepDone) -> tuple[Any, ...]:
    optional = [getattr(step, name) for name in _OPTIONAL]
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
        sum(1 << bit for bit, value in enumerate(optional) if value is not None),
    )
