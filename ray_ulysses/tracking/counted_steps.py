"""The steps of a run that count, separated from those that were lost or repeated."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import eq
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.tracking.events import AttemptStarted, StepDone
from ray_ulysses.tracking.inherited_steps import InheritedSteps
from ray_ulysses.tracking.step_groups import Entry, Rows, StepGroup, group_steps, step_of

_FEW_STEPS = 256


class Steps(Sequence[StepDone]):
    """Steps of a run, stored as rows of a table; each becomes an object when it is accessed."""

    def __init__(self, parts: Iterable[Rows] = ()) -> None:
        """Take rows of `STEP_ROW`."""
        self.parts = tuple(part for part in parts if len(part))
        self._starts = [0, *accumulate(map(len, self.parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> StepDone: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepDone]: ...

    def __getitem__(self, index: int | slice) -> StepDone | list[StepDone]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        part = bisect_right(self._starts, number) - 1
        return step_of(self.parts[part][number - self._starts[part]])

    def __iter__(self) -> Iterator[StepDone]:
        return (step_of(row) for part in self.parts for row in part)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    @property
    def tokens(self) -> int:
        """Their supervised tokens."""
        return _total(part["tokens"] for part in self.parts)

    @property
    def num_rows(self) -> int:
        """Rows of data that they trained on."""
        return _total(part["end_row"] - part["first_row"] for part in self.parts)

    @property
    def digest(self) -> int:
        """Sum of their data digests, modulo 2**64."""
        return sum(int(part["digest"].sum()) for part in self.parts) % 2**64

    def missing_after(self, step: int) -> tuple[tuple[int, int], ...]:
        """Return the first and last of each range of steps beyond ``step`` that is missing here; the steps ascend."""
        missing: list[tuple[int, int]] = []
        for part in self.parts:
            reached = np.append(step, part["step"][part["step"] > step])
            for place in np.flatnonzero(np.diff(reached) > 1):
                missing.append((int(reached[place]) + 1, int(reached[place + 1]) - 1))
            step = int(reached[-1])
        return tuple(missing)

    def to_json(self) -> Iterator[dict[str, Any]]:
        """Yield the object of each step in ``inspect --json``; an unknown loss is null, and infinity "inf"."""
        for part in self.parts:
            for row in part:
                attempt, _, step, loss, tokens, first, end, _, seconds, _, rate, norm, *_ = row.item()
                yield {
                    "step": step,
                    "loss": _number(loss),
                    "tokens": tokens,
                    "rows": [first, end],
                    "attempt": attempt,
                    "seconds": seconds,
                    "learning_rate": _number(rate),
                    "grad_norm": _number(norm),
                }


class StepStack:
    """Rows with a field ``step``, each step once and ascending: those that count so far."""

    def __init__(self) -> None:
        self.parts: list[Rows] = []

    def truncate(self, step: int) -> list[Rows]:
        """Remove the steps beyond ``step``, and return them in order."""
        removed: list[Rows] = []
        while self.parts and self.parts[-1]["step"][-1] > step:
            part = self.parts.pop()
            place = int(part["step"].searchsorted(step, side="right"))
            removed.append(part[place:])
            if place:
                self.parts.append(part[:place])
        return removed[::-1]

    def push(self, rows: Rows) -> list[Rows]:
        """Add steps, and return the earlier rows of the same steps, which they replace."""
        steps = rows["step"]
        is_ascending = len(rows) == 1 or bool((steps[1:] > steps[:-1]).all())
        if is_ascending and (not self.parts or steps[0] > self.parts[-1]["step"][-1]):
            if self.parts and len(self.parts[-1]) + len(rows) <= _FEW_STEPS:
                rows = np.concatenate((self.parts.pop(), rows))
            self.parts.append(rows)
            return []
        mixed = np.concatenate((*self.truncate(int(steps.min()) - 1), rows))
        # The last of several rows of a step is kept.
        _, places = np.unique(mixed["step"][::-1], return_index=True)
        places = len(mixed) - 1 - places
        self.parts.append(mixed[places])
        replaced = np.delete(mixed, places)
        return [replaced] if len(replaced) else []


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedSteps:
    """The steps of a journal.

    Attributes:
        kept: Those that count, ascending.
        lost: Those that were thrown away because an attempt resumed before them, in the order of the journal.
        repeated: Those that were recorded again without a resume before them; the last record of a step is kept. Empty
            in a sound run.
    """

    kept: Steps
    lost: Steps
    repeated: Steps


def steps_that_count(entries: Iterable[Entry]) -> CountedSteps:
    """Separate the steps of a run that count from the others (pure).

    An attempt that resumed at step r starts from the state after r steps, which contains no step beyond r.

    Args:
        entries: The run's journal.
    """
    kept = StepStack()
    lost: list[Rows] = []
    repeated: list[Rows] = []
    attempt = 0
    for entry in group_steps(entries):
        if not isinstance(entry, AttemptStarted | StepGroup):
            continue
        if entry.attempt != attempt:
            # Where the record of an attempt's start is damaged, its first step shows where it resumed.
            resumed = entry.resumed_step if isinstance(entry, AttemptStarted) else entry.first.step - 1
            lost += kept.truncate(resumed)
            attempt = entry.attempt
        if isinstance(entry, StepGroup):
            repeated += kept.push(entry.rows)
    return CountedSteps(kept=Steps(kept.parts), lost=Steps(lost), repeated=Steps(repeated))


def inherited_steps(entries: Iterable[Entry]) -> InheritedSteps:
    """Return the steps of another run that the newest attempts build on (pure).

    Args:
        entries: The run's journal.
    """
    found = InheritedSteps()
    for event in entries:
        if isinstance(event, AttemptStarted):
            if event.taken_over is not None:
                found = event.taken_over
            elif event.resumed_step == 0:
                found = InheritedSteps()
    return found


def _total(columns: Iterable[NDArray[Any]]) -> int:
    """Return the exact sum of non-negative integers, however large it is."""
    return sum((int((column >> 32).sum()) << 32) + int((column & 0xFFFFFFFF).sum()) for column in columns)


def _number(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)
