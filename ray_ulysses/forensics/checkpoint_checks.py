"""Compares checkpoints with journal and plan: the data cursor and the sums that each one claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_ulysses.checkpoint.choice import committed_steps, for_each_step
from ray_ulysses.checkpoint.manifest import ManifestError, read_facts
from ray_ulysses.data.plan.plan import Cursor, Plan
from ray_ulysses.data.read.digest import MODULUS
from ray_ulysses.errors import UserError
from ray_ulysses.forensics.journal_checks import Finding, Kind
from ray_ulysses.forensics.run_storage import open_run_storage
from ray_ulysses.forensics.trained_steps import TrainedSteps
from ray_ulysses.run_names import manifest_key
from ray_ulysses.storage import Store
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.events import CheckpointCommitted
from ray_ulysses.tracking.steps import Entry


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The claims of a manifest, or of a commit in the journal, about the data of a checkpoint."""

    step: int
    origin: str
    digest: int = 0
    """Sum of the digests of all steps so far."""
    tokens: int = 0
    cursor: Mapping[str, Any] | None = None
    """None is no claim."""
    problem: str | None = None
    """Why it can't be read."""

    def finding(self, kind: Kind, what: str, meaning: str) -> Finding:
        """Return the finding that it does not hold."""
        return Finding(kind=kind, step=self.step, where=self.origin, what=what, meaning=meaning)


def manifest_claims(run_dir: Place, *, trust_run: bool = False) -> list[Claim]:
    """Return the claim of each committed checkpoint of a run; one that is deleted meanwhile is left out."""
    store = open_run_storage(run_dir, trust_run=trust_run).store
    claims = for_each_step(committed_steps(store), lambda step: _manifest_claim(store, step))
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
    """Return the claims of the commits in the journal whose steps count, not those of steps thrown away (pure)."""
    attempts = {step.step: step.attempt for step in trained.steps}
    return [
        Claim(
            step=event.step,
            origin=f"the commit of step {event.step} in the journal of attempt {event.attempt}",
            digest=event.digest,
            tokens=event.tokens,
        )
        for event in events
        if isinstance(event, CheckpointCommitted) and attempts.get(event.step) == event.attempt
    ]


def check_claims(plan: Plan, trained: TrainedSteps, claims: Sequence[Claim]) -> list[Finding]:
    """Compare the claims of checkpoints with the plan and the steps that count (pure)."""
    meaning = "it is never loaded: a resume uses the checkpoint before it"
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
        problem = None if cursor.step == claim.step else f"it is of step {cursor.step}"
    except UserError as error:
        problem = str(error)
    if problem is not None:
        position = f"the plan is at {expected}" if expected else f"the plan ends after step {plan.num_steps}"
        yield Finding(
            kind="checkpoint_cursor",
            step=claim.step,
            where=f"{claim.origin}, data cursor {dict(claim.cursor)}",
            what=f"after step {claim.step} {position} ({problem})",
            meaning="a run resumed from it would train rows twice, leave some out, or be refused",
        )


def _check_sums(trained: TrainedSteps, claims: Sequence[Claim]) -> Iterator[Finding]:
    """Compare running sums; a difference that persists from one checkpoint to the next is reported once.

    Missing steps are a finding of their own: the first checkpoint after them adopts the difference that they make, so
    that the next ones prove the steps between them again.
    """
    claims = sorted(claims, key=lambda claim: claim.step)
    before = trained.inherited
    digest, tokens, count, place, num_missing = before.digest, before.tokens, before.step, 0, 0
    # By how much the claims differed last; None after steps that are missing.
    tokens_off: int | None = 0
    digest_off: int | None = 0
    for claim in claims:
        while place < len(trained.steps) and trained.steps[place].step <= claim.step:
            step = trained.steps[place]
            digest, tokens, count, place = (digest + step.digest) % MODULUS, tokens + step.tokens, step.step, place + 1
        if count != claim.step:
            yield claim.finding(
                "checkpoint_step",
                f"holds {claim.step} steps, but no record of step {claim.step} counts in the journal",
                "the data that its state was trained on can't be proved",
            )
            continue
        if claim.step - before.step - place != num_missing:
            num_missing = claim.step - before.step - place
            tokens_off = digest_off = None
        if tokens_off not in (None, claim.tokens - tokens):
            yield claim.finding(
                "checkpoint_tokens",
                f"counts {claim.tokens:,} supervised tokens, the steps of the journal sum to {tokens:,}",
                "its state was trained on more or fewer tokens than the journal records",
            )
        if digest_off not in (None, (claim.digest - digest) % MODULUS):
            yield claim.finding(
                "checkpoint_digest",
                f"has data digest {claim.digest:016x}, the steps of the journal up to it sum to {digest:016x}",
                "its state was trained on other rows or tokens than the journal records, or one of the two was changed",
            )
        tokens_off, digest_off = claim.tokens - tokens, (claim.digest - digest) % MODULUS
