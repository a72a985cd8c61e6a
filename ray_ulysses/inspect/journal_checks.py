"""Checks law 3 using journals, manifests and plans: each planned row was trained once, identically in two runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from typing import Any, Literal

from ray_ulysses.checkpoint.choice import begun_steps, for_each_step
from ray_ulysses.checkpoint.manifest import ManifestError, read_facts
from ray_ulysses.data.plan.plan import Cursor, Plan
from ray_ulysses.data.read.digest import MODULUS
from ray_ulysses.errors import UserError
from ray_ulysses.inspect.run_data import open_run_storage
from ray_ulysses.inspect.trained_steps import TrainedSteps, step_name
from ray_ulysses.run_names import manifest_key
from ray_ulysses.storage import Store
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.events import CheckpointCommitted, StepDone
from ray_ulysses.tracking.steps import Entry

Kind = Literal[
    "missing_steps",
    "repeated_step",
    "wrong_rows",
    "repeated_rows",
    "untrained_rows",
    "other_plan",
    "tokens",
    "digest",
    "unreadable_rows",
    "checkpoint_unreadable",
    "checkpoint_step",
    "checkpoint_cursor",
    "checkpoint_tokens",
    "checkpoint_digest",
    "comparison",
]
Answer = Literal["same", "same_so_far", "different", "other_plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A violation that a check found."""

    kind: Kind
    step: int | None
    """The first affected step; None if no step is affected."""
    where: str
    """The affected step, rows or checkpoint, in words."""
    what: str
    """Difference between the observed and the expected state."""
    meaning: str
    """Consequence of the difference for the run."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.meaning}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Step-by-step comparison of the data of two runs."""

    other: str
    answer: Answer
    """``same``: equal in every step; ``same_so_far``: equal, but one run has trained further; ``different``: different
    data from ``first_different_step`` on; ``other_plan``: different plans from ``first_different_step`` on."""
    common_steps: int
    """Number of steps that both runs trained according to the same plan."""
    own_steps: int
    other_steps: int
    first_different_step: int | None
    """The first step whose rows, supervised tokens, digest or plan differ; None if there is no difference."""


def check_journal(plan: Plan, trained: TrainedSteps) -> list[Finding]:
    """Compare the steps of a journal with the plan."""
    wrong = list(_wrong_rows(plan, trained.steps))
    return [
        *_other_plans(plan, trained),
        *_missing_steps(plan, trained),
        *_repeated_steps(trained),
        *wrong,
        # Steps can overlap only if some of them trained the wrong rows.
        *(_coverage(trained) if wrong else ()),
        *_wrong_tokens(plan, trained.steps),
    ]


def rows_text(first: int, stop: int) -> str:
    """Describe a range of rows, excluding ``stop``."""
    return f"row {first}" if stop - first == 1 else f"rows {first} to {stop - 1}"


def _other_plans(plan: Plan, trained: TrainedSteps) -> Iterator[Finding]:
    ids = [segment.plan_id for segment in plan.segments]
    for attempt, plan_ids in sorted(trained.other_plans.items()):
        first = next(step.step for step in trained.steps if step.attempt == attempt)
        yield Finding(
            kind="other_plan",
            step=first,
            where=f"attempt {attempt}, from step {first} on",
            what=f"trained by plan {' > '.join(plan_ids)}, but the run's plan is {' > '.join(ids)}",
            meaning="the attempt's plan was replaced, and its rows are not those of the stored plan",
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
                meaning="the data of these steps can't be verified, although every later state depends on them",
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
            what=f"was trained, and then {by} without a resume from an earlier step",
            meaning=f"{rows_text(*step.rows)} contributed to the model twice",
        )


def _wrong_rows(plan: Plan, steps: Iterable[StepDone]) -> Iterator[Finding]:
    for step in steps:
        found = rows_text(*step.rows) if step.rows[1] > step.rows[0] else "no row"
        if step.step > plan.num_steps:
            what = f"trained {found}, but the plan ends after step {plan.num_steps} and {plan.num_rows} rows"
            meaning = "the step trained on data that is not in the plan"
        else:
            planned = plan.step_rows(step.step)
            if (planned.start, planned.stop) == step.rows:
                continue
            what = f"trained {found}, but the plan assigns {rows_text(planned.start, planned.stop)}"
            meaning = "the step's batch is not the planned batch"
        yield Finding(kind="wrong_rows", step=step.step, where=step_name(step), what=what, meaning=meaning)


def _coverage(trained: TrainedSteps) -> Iterator[Finding]:
    """Find rows that were trained by several steps, and skipped rows that were not trained by any step."""
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
                meaning="these rows contributed twice, although each row may be trained only once per epoch",
            )
        elif first > reached:
            yield Finding(
                kind="untrained_rows",
                step=step.step,
                where=rows_text(reached, first),
                what=f"not trained by any step, although {step_name(step)} trained later rows",
                meaning="the model was not trained on these tokens",
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
                what=f"counted {step.tokens:,} supervised tokens, but the plan has {planned:,}",
                meaning="the loss was divided by the wrong token count, or some labels were wrong",
            )


def compare_runs(
    *,
    plan: Plan,
    steps: Sequence[StepDone],
    other: str,
    other_plan: Plan,
    other_steps: Sequence[StepDone],
) -> tuple[Comparison, list[Finding]]:
    """Compare the data of two runs, step by step.

    Args:
        plan: The run's plan.
        steps: The run's steps that count, ascending.
        other: Name of the other run, for messages.
        other_plan: The other run's plan.
        other_steps: The other run's steps that count, ascending.
    """
    diverged = _first_step_of_other_plan(plan, other_plan)
    theirs = {step.step: step for step in other_steps}
    common = [step for step in steps if step.step in theirs and (diverged is None or step.step < diverged)]
    received = attrgetter("rows", "tokens", "digest")
    first = next((step for step in common if received(step) != received(theirs[step.step])), None)
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
    """Return the first step at which the ids of the two plans differ, or None if the plans are the same."""
    pairs = zip(plan.segments, other.segments, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0].plan_id == pair[1].plan_id, pairs))
    if same == len(plan.segments) == len(other.segments):
        return None
    return 1 + min(one.segments[same].base_step for one in (plan, other) if len(one.segments) > same)


def _different(step: StepDone, other_step: StepDone, other: str) -> Finding:
    if step.rows != other_step.rows:
        what = f"trained {rows_text(*step.rows)}, but {other} trained {rows_text(*other_step.rows)}"
    elif step.digest != other_step.digest:
        what = f"received data with digest {step.digest:016x}, but {other} received {other_step.digest:016x}"
    else:
        what = f"counted {step.tokens:,} supervised tokens, but {other} counted {other_step.tokens:,}"
    return Finding(
        kind="comparison",
        step=step.step,
        where=f"{step_name(step)}, the first difference",
        what=what,
        meaning="from this step on, the two runs were trained on different data",
    )


def _other_plan(plan: Plan, other_plan: Plan, diverged: int, other: str) -> Finding:
    ours, theirs = (" > ".join(segment.plan_id for segment in one.segments) for one in (plan, other_plan))
    return Finding(
        kind="comparison",
        step=diverged,
        where=f"step {diverged}",
        what=f"the plan is {ours}, but the plan of {other} is {theirs}",
        meaning="from this step on, the rows differ and digests can't be compared, because the corpora, the seed, the "
        "context or another data setting is different",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A checkpoint's data totals, as recorded in its manifest or in the journal's commit event."""

    step: int
    origin: str
    digest: int = 0
    """Sum of the digests of all steps up to the checkpoint."""
    tokens: int = 0
    cursor: Mapping[str, Any] | None = None
    """Position in the data; None in a claim from the journal, which does not include the position."""
    problem: str | None = None
    """Reason why the manifest can't be read, or None if it was read."""

    def finding(self, kind: Kind, what: str, meaning: str) -> Finding:
        """Return a finding about this claim."""
        return Finding(kind=kind, step=self.step, where=self.origin, what=what, meaning=meaning)


def manifest_claims(run_dir: Place, *, trust_run: bool = False) -> list[Claim]:
    """Return the claims of a run's committed checkpoints, except for checkpoints deleted during the read."""
    store = open_run_storage(run_dir, trust_run=trust_run).store
    claims = for_each_step(begun_steps(store), lambda step: _manifest_claim(store, step))
    return [claim for claim in claims if claim is not None]


def _manifest_claim(store: Store, step: int) -> Claim | None:
    origin = manifest_key(step)
    try:
        _, meta = read_facts(store, step)
    except ManifestError as error:
        is_gone = isinstance(error.__cause__, FileNotFoundError)
        return None if is_gone else Claim(step=step, origin=origin, problem=str(error))
    return Claim(step=step, origin=origin, digest=int(meta.digest, 16), tokens=meta.tokens, cursor=dict(meta.cursor))


def journal_claims(events: Sequence[Entry], trained: TrainedSteps) -> list[Claim]:
    """Return the claims of the journal's commit events, except for commits of discarded steps."""
    attempts = {step.step: step.attempt for step in trained.steps}
    return [
        Claim(
            step=event.step,
            origin=f"commit of step {event.step} in the journal of attempt {event.attempt}",
            digest=event.digest,
            tokens=event.tokens,
        )
        for event in events
        if isinstance(event, CheckpointCommitted) and attempts.get(event.step) == event.attempt
    ]


def check_claims(plan: Plan, trained: TrainedSteps, claims: Sequence[Claim]) -> list[Finding]:
    """Compare checkpoint claims with the plan and the steps that count."""
    meaning = "this checkpoint is never loaded; a resume uses the previous checkpoint"
    findings = [
        claim.finding("checkpoint_unreadable", claim.problem, meaning) for claim in claims if claim.problem is not None
    ]
    readable = [claim for claim in claims if claim.problem is None]
    for claim in readable:
        findings += _check_cursor(plan, claim)
    return [*findings, *_check_sums(trained, readable)]


def _check_cursor(plan: Plan, claim: Claim) -> Iterator[Finding]:
    if claim.cursor is None:
        return
    expected = plan.cursor(claim.step).to_json() if claim.step <= plan.num_steps else None
    try:
        cursor = Cursor.from_json(dict(claim.cursor))
        plan.check_cursor(cursor)
        problem = None if cursor.step == claim.step else f"the cursor is for step {cursor.step}"
    except UserError as error:
        problem = str(error)
    if problem is not None:
        position = f"the plan is at {expected}" if expected else f"the plan ends after step {plan.num_steps}"
        yield Finding(
            kind="checkpoint_cursor",
            step=claim.step,
            where=f"{claim.origin}, data cursor {dict(claim.cursor)}",
            what=f"after step {claim.step} {position} ({problem})",
            meaning="a run resumed from this checkpoint would repeat or skip rows, or be refused",
        )


def _check_sums(trained: TrainedSteps, claims: Sequence[Claim]) -> Iterator[Finding]:
    """Compare each claim with the running totals of the steps; report a persistent difference only once.

    Missing steps are a separate finding. The first checkpoint after them sets a new baseline, so that later checkpoints
    verify the steps in between again.
    """
    claims = sorted(claims, key=lambda claim: claim.step)
    before = trained.inherited
    digest, tokens, count, place, num_missing = before.digest, before.tokens, before.step, 0, 0
    # The difference at the previous claim; None if steps are missing since then.
    tokens_off: int | None = 0
    digest_off: int | None = 0
    for claim in claims:
        while place < len(trained.steps) and trained.steps[place].step <= claim.step:
            step = trained.steps[place]
            digest, tokens, count, place = (digest + step.digest) % MODULUS, tokens + step.tokens, step.step, place + 1
        if count != claim.step:
            yield claim.finding(
                "checkpoint_step",
                f"contains {claim.step} steps, but the journal has no record of step {claim.step} that counts",
                "the data that this checkpoint was trained on can't be verified",
            )
            continue
        if claim.step - before.step - place != num_missing:
            num_missing = claim.step - before.step - place
            tokens_off = digest_off = None
        if tokens_off not in (None, claim.tokens - tokens):
            yield claim.finding(
                "checkpoint_tokens",
                f"records {claim.tokens:,} supervised tokens, but the journal's steps sum to {tokens:,}",
                "this checkpoint was trained on more or fewer tokens than the journal records",
            )
        if digest_off not in (None, (claim.digest - digest) % MODULUS):
            yield claim.finding(
                "checkpoint_digest",
                f"has data digest {claim.digest:016x}, but the journal's steps sum to {digest:016x}",
                "this checkpoint was trained on other data than the journal records, or one of the two was modified",
            )
        tokens_off, digest_off = claim.tokens - tokens, (claim.digest - digest) % MODULUS
