"""Compares the data of two runs step by step: their rows, supervised tokens and digests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.forensics.journal_checks import rows_text
from ray_ulysses.forensics.trained_steps import step_name
from ray_ulysses.forensics.verification_report import Answer, Comparison, Finding
from ray_ulysses.tracking.events import StepDone


def compare_runs(
    *,
    plan: Plan,
    steps: Sequence[StepDone],
    other: str,
    other_plan: Plan,
    other_steps: Sequence[StepDone],
) -> tuple[Comparison, list[Finding]]:
    """Compare the steps of two runs that count (pure).

    Args:
        plan: The run's plan.
        steps: Its steps, ascending.
        other: Name of the other run, for texts.
        other_plan: The other run's plan.
        other_steps: The other run's steps, ascending.
    """
    diverged = _first_step_of_other_plan(plan, other_plan)
    theirs = {step.step: step for step in other_steps}
    common = [step for step in steps if step.step in theirs and (diverged is None or step.step < diverged)]
    first = next((step for step in common if not _is_same(step, theirs[step.step])), None)
    last, other_last = (found[-1].step if found else 0 for found in (steps, other_steps))
    findings = []
    answer: Answer
    first_different = None
    if first is not None:
        answer, first_different = "different", first.step
        findings.append(_different(first, theirs[first.step], other))
    elif diverged is not None and (diverged == 1 or min(last, other_last) >= diverged):
        answer, first_different = "other_plan", diverged
        findings.append(_other_plan(plan, other_plan, diverged, other))
    else:
        answer = "same" if len(steps) == len(other_steps) == len(common) else "same_so_far"
    comparison = Comparison(
        other=other,
        answer=answer,
        common_steps=len(common),
        own_steps=len(steps),
        other_steps=len(other_steps),
        first_different_step=first_different,
    )
    return comparison, findings


def _first_step_of_other_plan(plan: Plan, other: Plan) -> int | None:
    """Return the first step for which the ids of the two plans differ; None if they are the same."""
    pairs = zip(plan.segments, other.segments, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0].plan_id == pair[1].plan_id, pairs))
    if same == len(plan.segments) == len(other.segments):
        return None
    return 1 + min(one.segments[same].base_step for one in (plan, other) if len(one.segments) > same)


def _is_same(step: StepDone, other: StepDone) -> bool:
    return (step.rows, step.tokens, step.digest) == (other.rows, other.tokens, other.digest)


def _different(step: StepDone, other_step: StepDone, other: str) -> Finding:
    if step.rows != other_step.rows:
        what = f"trained {rows_text(*step.rows)}, {other} trained {rows_text(*other_step.rows)}"
    elif step.digest != other_step.digest:
        what = f"received data of digest {step.digest:016x}, {other} of {other_step.digest:016x}"
    else:
        what = f"counted {step.tokens:,} supervised tokens, {other} {other_step.tokens:,}"
    return Finding(
        kind="comparison",
        step=step.step,
        where=f"{step_name(step)}, the first that differs",
        what=what,
        meaning="from this step on the two runs were not trained on the same data",
    )


def _other_plan(plan: Plan, other_plan: Plan, diverged: int, other: str) -> Finding:
    ours, theirs = (" > ".join(segment.plan_id for segment in one.segments) for one in (plan, other_plan))
    return Finding(
        kind="comparison",
        step=diverged,
        where=f"step {diverged}",
        what=f"the plan is {ours}, that of {other} is {theirs}",
        meaning="from this step on the rows differ, and digests can't be compared: corpora, seed, context or "
        "another data setting differs",
    )
