"""The steps of a run that count, and what became of the others."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import eq
from typing import Any, overload

import numpy as np

from ray_ulysses.tracking.events import AttemptStarted
from ray_ulysses.tracking.step_runs import Entry, Rows, StepRun, StepStack, grouped, total


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step as it counts.

    Attributes:
        step: Completed optimizer steps, from 1.
        loss: Mean loss over the step's supervised tokens, nats.
        tokens: Supervised tokens.
        rows: First row and the row after the last.
        attempt: The attempt whose step is the one that counts.
        seconds: How long it took.
        learning_rate: Its rate; None in the journal of a version that did not note it.
        grad_norm: Norm of its gradient before clipping; None as above.
    """

    step: int
    loss: float
    tokens: int
    rows: tuple[int, int]
    attempt: int
    seconds: float
    learning_rate: float | None = None
    grad_norm: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what ``inspect --json`` prints of it; "nan" and "inf" where JSON has no number."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for name in ("loss", "grad_norm"):
            if fields[name] is not None and not math.isfinite(fields[name]):
                fields[name] = str(fields[name])
        return fields


class Steps(Sequence[StepRecord]):
    """Steps of a run, each a `StepRecord` when it is asked for."""

    def __init__(self, parts: Iterable[Rows] = ()) -> None:
        """Take rows of `STEP_ROW`."""
        self.parts = tuple(parts)
        self._starts = [0, *accumulate(map(len, self.parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, place: int) -> StepRecord: ...

    @overload
    def __getitem__(self, place: slice) -> list[StepRecord]: ...

    def __getitem__(self, place: int | slice) -> StepRecord | list[StepRecord]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        number = range(len(self))[place]
        part = bisect_right(self._starts, number) - 1
        return _step_record(self.parts[part][number - self._starts[part]])

    def __iter__(self) -> Iterator[StepRecord]:
        return (_step_record(row) for part in self.parts for row in part)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    @property
    def tokens(self) -> int:
        """Their supervised tokens."""
        return total(part["tokens"] for part in self.parts)

    @property
    def num_rows(self) -> int:
        """Rows of data that they trained on."""
        return total(part["end_row"] - part["first_row"] for part in self.parts)

    @property
    def digest(self) -> int:
        """Sum of their data digests, modulo 2**64."""
        return sum(int(part["digest"].sum()) for part in self.parts) % 2**64

    def missing_after(self, step: int) -> tuple[tuple[int, int], ...]:
        """Return the first and the last of each stretch of steps beyond one that is not among them; they ascend."""
        missing: list[tuple[int, int]] = []
        for part in self.parts:
            reached = np.append(step, part["step"][part["step"] > step])
            for place in np.flatnonzero(np.diff(reached) > 1):
                missing.append((int(reached[place]) + 1, int(reached[place + 1]) - 1))
            step = int(reached[-1])
        return tuple(missing)


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedSteps:
    """The step records of a journal, by what became of them.

    Attributes:
        kept: Those that count, ascending.
        lost: Those that were thrown away because an attempt resumed before them, in the order of the journal.
        repeated: Those that came again without a resume before them; the last record of a step is the one kept.
            Empty in a sound run.
    """

    kept: Steps
    lost: Steps
    repeated: Steps


def steps_that_count(entries: Iterable[Entry]) -> CountedSteps:
    """Sort a run's steps by what became of them (pure).

    An attempt that resumed at step r starts from the state after r steps: whatever was recorded beyond is
    not in it.

    Args:
        entries: The run's journal.
    """
    kept = StepStack()
    lost: list[Rows] = []
    repeated: list[Rows] = []
    attempt = 0
    for entry in grouped(entries):
        if not isinstance(entry, AttemptStarted | StepRun):
            continue
        if entry.attempt != attempt:
            # Where the record of an attempt's start is damaged, its first step tells where it resumed.
            lost += kept.cut(entry.resumed_step if isinstance(entry, AttemptStarted) else entry.first.step - 1)
            attempt = entry.attempt
        if isinstance(entry, StepRun):
            repeated += kept.push(entry.rows)
    return CountedSteps(kept=Steps(kept.parts), lost=Steps(lost), repeated=Steps(repeated))


def _step_record(row: Any) -> StepRecord:
    attempt, _, step, loss, tokens, first_row, end_row, _, seconds, _, learning_rate, grad_norm, _, _, has = row.item()
    return StepRecord(
        step=step,
        loss=loss,
        tokens=tokens,
        rows=(first_row, end_row),
        attempt=attempt,
        seconds=seconds,
        learning_rate=learning_rate if has & 1 else None,
        grad_norm=grad_norm if has & 2 else None,
    )
