"""Steps of a journal as rows of a NumPy table, because one object per step is too slow for a million steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.tracking.events import AttemptStarted, Event, InheritedSteps, StepDone

Rows = NDArray[np.void]
"""One-dimensional array of dtype `STEP_ROW`."""

OPTIONAL_FIELDS = (
    "learning_rate", "grad_norm", "peak_memory_gib", "mfu", "z_loss", "router_loss", "router_imbalance", "dead_experts",
    "router_entropy", "pair_accuracy", "pair_margin", "chosen_reward", "pair_kl", "accuracy",
)  # fmt: skip
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
        *((name, "<f8") for name in OPTIONAL_FIELDS),
    ]
)
"""All numeric fields of `StepDone`; NaN represents None."""

_Other = TypeVar("_Other")
_COLUMNS: tuple[str, ...] = STEP_ROW.names or ()
_MAX_STEPS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class StepGroup:
    """Consecutive steps in an attempt's journal, with no other event between them."""

    rows: Rows
    """Rows of the steps, at least one, in journal order."""

    @property
    def attempt(self) -> int:
        """The attempt that trained the steps."""
        return int(self.rows["attempt"][0])

    @property
    def time(self) -> float:
        """Time at which the first step completed."""
        return float(self.rows["time"][0])

    @property
    def end_time(self) -> float:
        """Time at which the last step completed."""
        return float(self.rows["time"].max())

    @property
    def first(self) -> StepDone:
        """Event of the first step in the group."""
        return step_of(self.rows[0])

    @property
    def last(self) -> StepDone:
        """Event of the last step in the group."""
        return step_of(self.rows[-1])


Entry = Event | StepGroup
"""An event, or a group of consecutive steps."""


def group_steps(entries: Iterable[Entry | _Other]) -> Iterator[Entry | _Other]:
    """Gather consecutive steps into groups of bounded size, and yield everything else unchanged."""
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
    """Replace each group with its individual steps, and yield everything else unchanged."""
    for entry in entries:
        if isinstance(entry, StepGroup):
            yield from map(step_of, entry.rows)
        else:
            yield entry


def step_of(row: Any) -> StepDone:
    """Return the event of a row of dtype `STEP_ROW`."""
    found = dict(zip(_COLUMNS, row.item(), strict=True))
    rows = found.pop("first_row"), found.pop("end_row")
    # A loss may be NaN.
    return StepDone(rows=rows, **{name: value for name, value in found.items() if value == value or name == "loss"})


def step_rows(steps: Sequence[StepDone]) -> Rows:
    """Convert steps to rows, from which `step_of` restores them."""
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


class Steps(Sequence[StepDone]):
    """Steps of a run, stored as table rows and converted to objects on access."""

    def __init__(self, rows: Rows | None = None) -> None:
        self.rows = np.empty(0, STEP_ROW) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> StepDone: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepDone]: ...

    def __getitem__(self, index: int | slice) -> StepDone | list[StepDone]:
        found = self.rows[index]
        return list(map(step_of, found)) if isinstance(index, slice) else step_of(found)

    def __iter__(self) -> Iterator[StepDone]:
        return map(step_of, self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    @property
    def tokens(self) -> int:
        """Number of supervised tokens in the steps."""
        return _total(self.rows["tokens"])

    @property
    def num_rows(self) -> int:
        """Number of data rows in the steps."""
        return _total(self.rows["end_row"] - self.rows["first_row"])

    @property
    def digest(self) -> int:
        """Sum of the steps' data digests, modulo 2**64."""
        return int(self.rows["digest"].sum())

    def missing_after(self, step: int) -> tuple[tuple[int, int], ...]:
        """Return the first and last step of each gap after ``step``; the steps must ascend."""
        reached = np.append(step, self.rows["step"][self.rows["step"] > step])
        places = np.flatnonzero(np.diff(reached) > 1)
        return tuple((int(reached[place]) + 1, int(reached[place + 1]) - 1) for place in places)

    def json_lines(self) -> Iterator[str]:
        """Yield each step's JSON object for ``inspect --json``, with NaN as null and infinity as "inf"."""
        floats, integers = ("loss", "seconds", "learning_rate", "grad_norm"), ("step", "tokens", "attempt")
        for begin in range(0, len(self.rows), _MAX_STEPS):
            part = self.rows[begin : begin + _MAX_STEPS]
            columns = (*map(_numbers, map(part.__getitem__, floats)), *(part[name].tolist() for name in integers))
            ranges = part["first_row"].tolist(), part["end_row"].tolist()
            # A template is three times as fast as calling `json.dumps` for each object.
            for loss, seconds, rate, norm, step, tokens, attempt, first, end in zip(*columns, *ranges, strict=True):
                yield (
                    f'{{"step": {step}, "loss": {loss}, "tokens": {tokens}, "rows": [{first}, {end}], '
                    f'"attempt": {attempt}, "seconds": {seconds}, "learning_rate": {rate}, "grad_norm": {norm}}}'
                )


def _numbers(column: NDArray[np.float64]) -> list[float | str]:
    """Return finite numbers unchanged, and the JSON text of non-finite ones."""
    return [x if math.isfinite(x) else "null" if math.isnan(x) else f'"{x}"' for x in column.tolist()]


def _total(column: NDArray[Any]) -> int:
    """Return the exact sum of non-negative integers, which may exceed 64 bits."""
    return (int((column >> 32).sum()) << 32) + int((column & 0xFFFFFFFF).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedSteps:
    """The steps of a journal, grouped by whether they count."""

    kept: Steps
    """Steps that count, ascending."""
    lost: Steps
    """Steps that were discarded because an attempt resumed from an earlier step, in journal order."""
    repeated: Steps
    """Earlier records of steps that were recorded twice without a resume in between; empty in a healthy run."""


def steps_that_count(entries: Iterable[Entry]) -> CountedSteps:
    """Separate the steps of a run's journal that count from the others.

    An attempt that resumed at step r starts from the state after r steps, so all earlier records of later steps are
    lost.
    """
    attempts: list[tuple[int, list[Rows]]] = []
    attempt = 0
    for entry in group_steps(entries):
        if not isinstance(entry, AttemptStarted | StepGroup):
            continue
        if entry.attempt != attempt:
            # If the record of the attempt's start is damaged, the first step implies the resumed step.
            resumed = entry.resumed_step if isinstance(entry, AttemptStarted) else entry.first.step - 1
            attempts.append((resumed, []))
            attempt = entry.attempt
        if isinstance(entry, StepGroup):
            attempts[-1][1].append(entry.rows)
    kept: list[Rows] = []
    lost: list[Rows] = []
    limit = 2**63
    for resumed, parts in reversed(attempts):
        for rows in reversed(parts):
            is_lost = rows["step"] > limit
            if is_lost.any():
                lost.append(rows[is_lost])
                rows = rows[~is_lost]
            kept.append(rows)
        limit = min(limit, resumed)
    rows, repeated = _last_of_each(_joined(kept[::-1]))
    return CountedSteps(kept=Steps(rows), lost=Steps(_joined(lost[::-1])), repeated=Steps(repeated))


def _joined(parts: Sequence[Rows]) -> Rows:
    return np.concatenate((np.empty(0, STEP_ROW), *parts))


def _last_of_each(rows: Rows) -> tuple[Rows, Rows]:
    """Return the last row of each step, by ascending step, and the remaining rows."""
    if bool((np.diff(rows["step"]) > 0).all()):
        return rows, rows[:0]
    _, places = np.unique(rows["step"][::-1], return_index=True)
    places = len(rows) - 1 - places
    return rows[places], np.delete(rows, places)


def inherited_steps(entries: Iterable[Entry]) -> InheritedSteps:
    """Return the totals of the steps inherited from another run, according to the run's journal."""
    found = InheritedSteps()
    for event in entries:
        if isinstance(event, AttemptStarted):
            if event.taken_over is not None:
                found = event.taken_over
            elif event.resumed_step == 0:
                found = InheritedSteps()
    return found
