"""Classifies the steps of a journal by whether they count, given each attempt's plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.read.digest import add_digests
from ray_ulysses.tracking.events import AttemptStarted, InheritedSteps, StepDone
from ray_ulysses.tracking.steps import Entry, Steps, inherited_steps, step_of, steps_that_count


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedSteps:
    """The steps of a run, grouped by whether they count."""

    steps: tuple[StepDone, ...]
    superseded: tuple[StepDone, ...]
    """Steps that the next attempt will discard, because the plan was branched at an earlier step."""
    lost: tuple[StepDone, ...]
    """Steps that were discarded because an attempt resumed from an earlier step."""
    repeated: tuple[StepDone, ...]
    """Earlier records of steps that were recorded twice without a resume in between."""
    other_plans: Mapping[int, tuple[str, ...]]
    """Plan ids, by attempt, of attempts whose steps count although they followed a plan other than the run's."""
    inherited: InheritedSteps = field(default_factory=InheritedSteps)

    @property
    def digest(self) -> int:
        """Sum of the digests of the steps that count and of the inherited steps."""
        return add_digests(self.inherited.digest, *(step.digest for step in self.steps))

    @property
    def tokens(self) -> int:
        """Number of supervised tokens in the steps that count and in the inherited steps."""
        return self.inherited.tokens + sum(step.tokens for step in self.steps)


def step_name(step: StepDone) -> str:
    """Describe a step and its attempt."""
    return f"step {step.step} of attempt {step.attempt}"


def trained_steps(entries: Sequence[Entry], plan: Plan, *, row: int | None = None) -> TrainedSteps:
    """Classify the steps of a journal.

    Args:
        entries: The run's journal.
        plan: The run's current plan.
        row: Select only steps that trained this row; None selects all steps.
    """
    counted = steps_that_count(entries)
    ids = tuple(segment.plan_id for segment in plan.segments)
    plans = {entry.attempt: entry.plan_ids for entry in entries if isinstance(entry, AttemptStarted)}
    steps: list[StepDone] = []
    superseded: list[StepDone] = []
    for step in _steps(counted.kept, row):
        (superseded if _is_superseded(step, plans, ids, plan) else steps).append(step)
    attempts = {step.attempt for step in steps}
    return TrainedSteps(
        steps=tuple(steps),
        superseded=tuple(superseded),
        lost=tuple(_steps(counted.lost, row)),
        repeated=tuple(_steps(counted.repeated, row)),
        inherited=inherited_steps(entries),
        other_plans={
            attempt: plan_ids
            for attempt, plan_ids in plans.items()
            if attempt in attempts and plan_ids != ids[: len(plan_ids)]
        },
    )


def _is_superseded(step: StepDone, plans: Mapping[int, tuple[str, ...]], ids: tuple[str, ...], plan: Plan) -> bool:
    """Return whether the plan was branched before a step, but no attempt has trained on the branch yet."""
    known = plans.get(step.attempt, ids)
    if known != ids[: len(known)] or len(known) == len(ids):
        return False
    is_continued = any(len(later) > len(known) for attempt, later in plans.items() if attempt > step.attempt)
    return not is_continued and step.step > plan.segments[len(known)].base_step


def _steps(steps: Steps, row: int | None) -> Iterator[StepDone]:
    rows = steps.rows
    if row is not None:
        rows = rows[(rows["first_row"] <= row) & (row < rows["end_row"])]
    yield from map(step_of, rows)
