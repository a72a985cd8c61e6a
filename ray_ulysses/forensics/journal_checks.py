"""Checks law 3 from journal and plan alone: every planned row was trained once, with the tokens of its step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.forensics.trained_steps import TrainedSteps, step_name
from ray_ulysses.forensics.verification_report import Finding
from ray_ulysses.tracking.events import StepDone


def check_journal(plan: Plan, trained: TrainedSteps) -> list[Finding]:
    """Compare the steps of a journal with the plan (pure)."""
    wrong = list(_wrong_rows(plan, trained.steps))
    return [
        *_other_plans(plan, trained),
        *_missing_steps(plan, trained),
        *_repeated_steps(trained),
        *wrong,
        # Steps with their planned rows can't overlap.
        *(_coverage(trained) if wrong else ()),
        *_wrong_tokens(plan, trained.steps),
    ]


def rows_text(first: int, stop: int) -> str:
    """Return a range of rows in words."""
    return f"row {first}" if stop - first == 1 else f"rows {first} to {stop - 1}"


def _other_plans(plan: Plan, trained: TrainedSteps) -> Iterator[Finding]:
    ids = [segment.plan_id for segment in plan.segments]
    for attempt, plan_ids in sorted(trained.other_plans.items()):
        first = next(step.step for step in trained.steps if step.attempt == attempt)
        yield Finding(
            kind="other_plan",
            step=first,
            where=f"attempt {attempt}, from step {first} on",
            what=f"trained by plan {' > '.join(plan_ids)}, the run's plan is {' > '.join(ids)}",
            meaning="its rows are not those of the stored plan, which has replaced its own",
        )


def _missing_steps(plan: Plan, trained: TrainedSteps) -> Iterator[Finding]:
    before = trained.inherited.step
    for step in trained.steps:
        if step.step > before + 1:
            first, last = before + 1, step.step - 1
            yield Finding(
                kind="missing_steps",
                step=first,
                where=f"step {first}" if first == last else f"steps {first} to {last}",
                what=f"the journal has no record of training {_planned_rows(plan, first, last)}",
                meaning="the data that they trained on is no longer proven, which every later state contains",
            )
        before = step.step


def _planned_rows(plan: Plan, first: int, last: int) -> str:
    if first > plan.num_steps:
        return "them"
    return rows_text(plan.step_rows(first).start, plan.step_rows(min(last, plan.num_steps)).stop)


def _repeated_steps(trained: TrainedSteps) -> Iterator[Finding]:
    last = {step.step: step for step in trained.steps}
    for step in trained.repeated:
        again = last.get(step.step)
        by = f"again by attempt {again.attempt}" if again else "again"
        yield Finding(
            kind="repeated_step",
            step=step.step,
            where=step_name(step),
            what=f"was trained, and then {by}, which had not resumed before it",
            meaning=f"{rows_text(*step.rows)} went into the model's state twice",
        )


def _wrong_rows(plan: Plan, steps: Iterable[StepDone]) -> Iterator[Finding]:
    for step in steps:
        found = rows_text(*step.rows) if step.rows[1] > step.rows[0] else "no row"
        if step.step > plan.num_steps:
            what = f"trained {found}, but the plan ends after step {plan.num_steps} and {plan.num_rows} rows"
            meaning = "it trained on data that were not planned"
        else:
            planned = plan.step_rows(step.step)
            if (planned.start, planned.stop) == step.rows:
                continue
            what = f"trained {found}, the plan assigns it {rows_text(planned.start, planned.stop)}"
            meaning = "the batch of the step is not the planned one"
        yield Finding(kind="wrong_rows", step=step.step, where=step_name(step), what=what, meaning=meaning)


def _coverage(trained: TrainedSteps) -> Iterator[Finding]:
    """Find rows that several steps trained, and rows between them that no step trained."""
    reached, last = trained.inherited.rows, None
    for step in sorted(trained.steps, key=lambda step: step.rows):
        first, stop = step.rows
        if first < reached and last is not None and stop > first:
            overlap = rows_text(first, min(stop, reached))
            yield Finding(
                kind="repeated_rows",
                step=step.step,
                where=overlap,
                what=f"trained by {step_name(last)} and by {step_name(step)}",
                meaning="they count twice, although every row may be trained on only once per epoch",
            )
        elif first > reached:
            yield Finding(
                kind="untrained_rows",
                step=step.step,
                where=rows_text(reached, first),
                what=f"trained by no step, though {step_name(step)} trained beyond them",
                meaning="the model has not been trained on their tokens",
            )
        if stop > reached:
            reached, last = stop, step


def _wrong_tokens(plan: Plan, steps: Iterable[StepDone]) -> Iterator[Finding]:
    for step in steps:
        if step.step > plan.num_steps:
            continue
        planned = plan.step_tokens(step.step)
        if planned != step.tokens:
            yield Finding(
                kind="tokens",
                step=step.step,
                where=step_name(step),
                what=f"counted {step.tokens:,} supervised tokens, the plan has {planned:,}",
                meaning="its loss was divided by another number than planned, or some of its labels were different",
            )
