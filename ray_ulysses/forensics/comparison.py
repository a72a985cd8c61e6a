"""Two runs' data compared step by step: the same rows, the same supervised tokens, the same digests?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.forensics.journal_checks import rows_text
from ray_ulysses.forensics.trained import TrainedStep
from ray_ulysses.forensics.verdict import Answer, Comparison, Finding


def compare_runs(
    *,
    plan: Plan,
    steps: Sequence[TrainedStep],
    other: str,
    other_plan: Plan,
    other_steps: Sequence[TrainedStep],
) -> tuple[Comparison, list[Finding]]:
    """Compare the steps of two runs that count (pure).

    Args:
        plan: The run's plan.
        steps: Its steps, ascending.
        other: What to call the other run.
        other_plan: Its plan.
        other_steps: Its steps, ascending.
    """
    parting = _parting_step(plan, other_plan)
    theirs = {step.step: step for step in other_steps}
    common = [step for step in steps if step.step in theirs and (parting is None or step.step < parting)]
    first = next((step for step in common if not _is_same(step, theirs[step.step])), None)
    last, other_last = (found[-1].step if found else 0 for found in (steps, other_steps))
    findings = []
    answer: Answer
    first_different = None
    if first is not None:
        answer, first_different = "different", first.step
        findings.append(_different(first, theirs[first.step], other))
    elif parting is not None and (parting == 1 or min(last, other_last) >= parting):
        answer, first_different = "other_plan", parting
        findings.append(_other_plan(plan, other_plan, parting, other))
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


def _parting_step(plan: Plan, other: Plan) -> int | None:
    """Return the first step that the two plans rule differently by their ids; None where they are the same."""
    pairs = zip(plan.segments, other.segments, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0].plan_id == pair[1].plan_id, pairs))
    if same == len(plan.segments) == len(other.segments):
        return None
    return 1 + min(one.segments[same].base_step for one in (plan, other) if len(one.segments) > same)


def _is_same(step: TrainedStep, other: TrainedStep) -> bool:
    return (step.rows, step.tokens, step.digest) == (other.rows, other.tokens, other.digest)


def _different(step: TrainedStep, other_step: TrainedStep, other: str) -> Finding:
    if step.rows != other_step.rows:
        what = f"trained {rows_text(*step.rows)}, {other} trained {rows_text(*other_step.rows)}"
    elif step.digest != other_step.digest:
        what = f"received data of digest {step.digest:016x}, {other} of {other_step.digest:016x}"
    else:
        what = f"counted {step.tokens:,} supervised tokens, {other} {other_step.tokens:,}"
    return Finding(
        kind="comparison",
        step=step.step,
        where=f"{step.place}, the first that differs",
        what=what,
        meaning="from this step on the two runs were not trained on the same data",
    )


def _other_plan(plan: Plan, other_plan: Plan, parting: int, other: str) -> Finding:
    ours, theirs = (" > ".join(segment.plan_id for segment in one.segments) for one in (plan, other_plan))
    return Finding(
        kind="comparison",
        step=parting,
        where=f"step {parting}",
        what=f"the plan is {ours}, that of {other} is {theirs}",
        meaning="from this step on rows are others, and digests can't be compared: corpora, seed, context or "
        "another setting of the data differ",
    )
