"""Checkpoints held against journal and plan: where each says that the data stand, and the digest that it carries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_ulysses.data.plan.cursor import Cursor
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.read.digest import MODULUS
from ray_ulysses.errors import UserError
from ray_ulysses.forensics.trained import Trained
from ray_ulysses.forensics.verdict import Finding
from ray_ulysses.tracking.events import CheckpointCommitted
from ray_ulysses.tracking.step_runs import Entry

_RESUMED = "a run resumed from it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a checkpoint, or the note of its commit in the journal, says of the data.

    Attributes:
        step: Completed steps.
        origin: Where it says so, for a person.
        digest: Sum of the digests of all steps so far, 16 hexadecimal digits; None where it says nothing.
        tokens: Supervised tokens so far; None where it says nothing.
        cursor: Where the data stand; None where it says nothing.
        problem: Why it can't be read; None where it can.
    """

    step: int
    origin: str
    digest: str | None = None
    tokens: int | None = None
    cursor: Mapping[str, Any] | None = None
    problem: str | None = None


def commits(events: Sequence[Entry], trained: Trained) -> list[Claim]:
    """Return what the journal noted of the checkpoints whose steps count (pure).

    A checkpoint of an attempt whose step was thrown away is not among them.
    """
    attempts = {step.step: step.attempt for step in trained.steps}
    return [
        Claim(
            step=event.step,
            origin=f"the commit of step {event.step} in the journal of attempt {event.attempt}",
            digest=f"{event.digest:016x}",
            tokens=event.tokens,
        )
        for event in events
        if isinstance(event, CheckpointCommitted)
        and event.digest is not None
        and attempts.get(event.step) == event.attempt
    ]


def check_claims(plan: Plan, trained: Trained, claims: Sequence[Claim]) -> list[Finding]:
    """Hold what checkpoints say against the plan and the steps that count (pure).

    Args:
        plan: The run's plan.
        trained: The steps, by what became of them.
        claims: What the checkpoints say.
    """
    findings: list[Finding] = []
    readable = []
    for claim in claims:
        if claim.problem is None:
            readable.append(claim)
            continue
        findings.append(
            Finding(
                kind="checkpoint_unreadable",
                step=claim.step,
                where=claim.origin,
                what=claim.problem,
                meaning="it is never loaded: a resume goes back to the checkpoint before it",
            )
        )
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
        stands = f"the plan stands at {expected}" if expected else f"the plan ends after step {plan.num_steps}"
        yield Finding(
            kind="checkpoint_cursor",
            step=claim.step,
            where=f"{claim.origin}, data cursor {dict(claim.cursor)}",
            what=f"after step {claim.step} {stands} ({problem})",
            meaning=f"{_RESUMED} would train rows twice, leave some out, or be refused",
        )


def _check_sums(trained: Trained, claims: Sequence[Claim]) -> Iterator[Finding]:
    """Compare running sums; a difference that stays the same from one checkpoint to the next is told once."""
    claims = sorted(claims, key=lambda claim: claim.step)
    before = trained.before
    digest, tokens, count, place = before.digest, before.tokens, before.step, 0
    shifts = {"digest": 0, "tokens": 0}
    for claim in claims:
        while place < len(trained.steps) and trained.steps[place].step <= claim.step:
            step = trained.steps[place]
            digest, tokens, count, place = (digest + step.digest) % MODULUS, tokens + step.tokens, step.step, place + 1
        if count != claim.step:
            yield Finding(
                kind="checkpoint_step",
                step=claim.step,
                where=claim.origin,
                what=f"holds {claim.step} steps, but no record of step {claim.step} counts in the journal",
                meaning="what its state was trained on can't be proved",
            )
            continue
        if before.step + place != claim.step:
            # Steps are missing before it, which is a finding of its own.
            continue
        yield from _check_tokens(claim, tokens, shifts)
        yield from _check_digest(claim, digest, shifts)


def _check_tokens(claim: Claim, tokens: int, shifts: dict[str, int]) -> Iterator[Finding]:
    if claim.tokens is None or claim.tokens - tokens == shifts["tokens"]:
        return
    shifts["tokens"] = claim.tokens - tokens
    yield Finding(
        kind="checkpoint_tokens",
        step=claim.step,
        where=claim.origin,
        what=f"counts {claim.tokens:,} supervised tokens, the steps of the journal sum to {tokens:,}",
        meaning="its state was trained on more or fewer tokens than the journal knows of",
    )


def _check_digest(claim: Claim, digest: int, shifts: dict[str, int]) -> Iterator[Finding]:
    if claim.digest is None:
        return
    try:
        found = int(claim.digest, 16)
    except ValueError:
        found = None
    if found is not None and (found - digest) % MODULUS == shifts["digest"]:
        return
    if found is not None:
        shifts["digest"] = (found - digest) % MODULUS
    yield Finding(
        kind="checkpoint_digest",
        step=claim.step,
        where=claim.origin,
        what=f"has data digest {claim.digest}, the steps of the journal up to it sum to {digest:016x}",
        meaning="its state was trained on other rows or tokens than the journal says, or one of the two was changed",
    )
