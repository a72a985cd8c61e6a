"""Which steps of a journal count, held beside the plan that each attempt trained by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.read.digest import add_digests
from ray_ulysses.tracking.counted_steps import Steps, steps_that_count
from ray_ulysses.tracking.events import AttemptStarted, TakenOver
from ray_ulysses.tracking.step_runs import Entry, step_of
from ray_ulysses.tracking.taken_over import taken_over


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedStep:
    """One step as the journal has it.

    Attributes:
        step: Completed steps, from 1.
        attempt: The attempt that trained it.
        rows: First row and the row after the last.
        tokens: Supervised tokens.
        digest: Sum of the digests of the rows that the model received.
    """

    step: int
    attempt: int
    rows: tuple[int, int]
    tokens: int
    digest: int

    @property
    def place(self) -> str:
        """Return how a person is told of it."""
        return f"step {self.step} of attempt {self.attempt}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The steps of a run, by what became of them.

    Attributes:
        steps: Those that count, ascending; each step once.
        superseded: Those that a branch of the plan has left behind, whose next attempt has not started yet: it will
            throw them away.
        lost: Those that were thrown away, because an attempt resumed before them.
        repeated: Those that an attempt trained, and then again without resuming before them.
        before: What was taken over from another run.
        other_plans: The plan ids of each attempt whose steps count though it trained by a plan that is not the run's.
    """

    steps: tuple[TrainedStep, ...]
    superseded: tuple[TrainedStep, ...]
    lost: tuple[TrainedStep, ...]
    repeated: tuple[TrainedStep, ...]
    other_plans: Mapping[int, tuple[str, ...]]
    before: TakenOver = field(default_factory=TakenOver)

    @property
    def digest(self) -> int:
        """Return the sum of the digests of the steps that count."""
        return add_digests(self.before.digest, *(step.digest for step in self.steps))

    @property
    def tokens(self) -> int:
        """Return the supervised tokens of the steps that count."""
        return self.before.tokens + sum(step.tokens for step in self.steps)


def trained_steps(entries: Sequence[Entry], plan: Plan, *, row: int | None = None) -> Trained:
    """Sort the steps of a journal by what became of them (pure).

    Args:
        entries: The run's journal.
        plan: The run's plan as it is now.
        row: Only the steps that trained this row of it; None for all.
    """
    counted = steps_that_count(entries)
    ids = tuple(segment.plan_id for segment in plan.segments)
    plans = {
        entry.attempt: entry.plan_ids
        for entry in entries
        if isinstance(entry, AttemptStarted) and entry.plan_ids is not None
    }
    steps: list[TrainedStep] = []
    superseded: list[TrainedStep] = []
    for step in _steps(counted.kept, row):
        (superseded if _is_superseded(step, plans, ids, plan) else steps).append(step)
    attempts = {step.attempt for step in steps}
    return Trained(
        steps=tuple(steps),
        superseded=tuple(superseded),
        lost=tuple(_steps(counted.lost, row)),
        repeated=tuple(_steps(counted.repeated, row)),
        before=taken_over(entries),
        other_plans={
            attempt: plan_ids
            for attempt, plan_ids in plans.items()
            if attempt in attempts and plan_ids != ids[: len(plan_ids)]
        },
    )


def _is_superseded(step: TrainedStep, plans: Mapping[int, tuple[str, ...]], ids: tuple[str, ...], plan: Plan) -> bool:
    """Return whether a branch that no attempt has taken up yet begins before a step."""
    known = plans.get(step.attempt, ids)
    if known != ids[: len(known)] or len(known) == len(ids):
        return False
    is_taken_up = any(len(later) > len(known) for attempt, later in plans.items() if attempt > step.attempt)
    return not is_taken_up and step.step > plan.segments[len(known)].base_step


def _steps(steps: Steps, row: int | None) -> Iterator[TrainedStep]:
    for part in steps.parts:
        for found in part if row is None else part[(part["first_row"] <= row) & (row < part["end_row"])]:
            step = step_of(found)
            yield TrainedStep(
                step=step.step, attempt=step.attempt, rows=step.rows, tokens=step.tokens, digest=step.digest
            )
