"""Plans the stages of a run one after the other, before its first step: each from what those before leave untrained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ray_ulysses.data.corpus.repeats import refuse_repeats
from ray_ulysses.data.plan.branching import remainder_after
from ray_ulysses.data.plan.corpus_set import CorpusSet, open_sources, plan_input
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.planning import Remainder, StagePart, build_segment
from ray_ulysses.data.plan.rows import MemoryRows, Pieces
from ray_ulysses.data.plan.segment import PlanSettings, Segment, StageLength
from ray_ulysses.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """What the plan of a stage is made of."""

    name: str
    """For errors."""
    settings: PlanSettings
    shares: tuple[tuple[str, float | None], ...]
    """Path and weight of each of its corpora."""
    length: StageLength | None
    """None for the only stage of a run without stages."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NewSegment:
    """A segment that is not stored yet, and what it is made of."""

    segment: Segment
    corpora: CorpusSet
    remainder: Remainder | None
    """What the run had left to train before it; None at its beginning."""
    part: StagePart | None
    """The part of its stage that it plans; None in a run without stages."""


def num_made(plan: Plan, stages: Sequence[StagePlan], num_done: int = 0) -> int | None:
    """Return how many of the stages a plan holds, the first of them, or None if it was made from others.

    Args:
        plan: The plan.
        stages: All stages of the run.
        num_done: Stages that were trained to their end, whose corpora may be gone.

    Raises:
        UserError: A corpus of another stage can't be opened.
    """
    newest = {segment.stage_number: segment for segment in plan.segments}
    if len(newest) > len(stages):
        return None
    for number, segment in newest.items():
        stage = stages[number]
        try:
            sources = open_sources(stage.shares, segment.sources).sources
        except UserError:
            if number >= num_done:
                raise
            sources = segment.sources
        if not segment.is_made_of(stage.settings, sources, segment.branch, stage.length):
            return None
    return len(newest)


def plan_stages(
    stages: Sequence[StagePlan], before: Plan | None = None, step: int = 0, skipped: range | None = None
) -> tuple[Plan, tuple[NewSegment, ...]]:
    """Plan the stages from a step of the run on.

    Args:
        stages: All stages of the run.
        before: What of its plan is kept, whose newest segment holds the step; None for a new run.
        step: Steps that the run has completed.
        skipped: Rows of the plan after that step that are left out.

    Returns:
        The plan, and its new segments: those of the stage that the run is in, and of all later ones.

    Raises:
        UserError: A corpus can't be used, or a stage's data do not last.
    """
    number = before.newest.stage_number if before else 0
    part = None if (length := stages[number].length) is None else StagePart(length=length)
    if before is not None and part is not None:
        part = _part_after(before, step, part.length)
    first = _next(before, step, stages[number], part, skipped, is_last=number == len(stages) - 1)
    return _continued(before, [first], stages)


def plan_rest(stages: Sequence[StagePlan], before: Plan) -> tuple[Plan, tuple[NewSegment, ...]]:
    """Plan the stages that follow those of a plan."""
    return _continued(before, [], stages)


def _continued(
    before: Plan | None, new: list[NewSegment], stages: Sequence[StagePlan]
) -> tuple[Plan, tuple[NewSegment, ...]]:
    kept = before.segments if before else ()
    while True:
        plan = Plan(segments=(*kept, *(one.segment for one in new)))
        number = plan.newest.stage_number + 1
        if number >= len(stages):
            return plan, tuple(new)
        length = stages[number].length
        assert length is not None, "a run of several stages has their lengths"
        part = StagePart(length=length)
        new.append(_next(plan, plan.num_steps, stages[number], part, None, is_last=number == len(stages) - 1))


def _next(
    plan: Plan | None, step: int, stage: StagePlan, part: StagePart | None, skipped: range | None, *, is_last: bool
) -> NewSegment:
    known = plan.newest.sources if plan else ()
    corpora = open_sources(stage.shares, known)
    refuse_repeats(corpora.corpora, num_known=max(1, len(known)))
    remainder = remainder_after(plan, step, corpora.sources, stage.settings, skipped) if plan else None
    for corpus in corpora.corpora:
        corpus.check_files()
    kept: list[Pieces] = []
    take: Callable[[Pieces], None] | None = None if is_last else kept.append
    try:
        segment = build_segment(plan_input(corpora), stage.settings, remainder, part, take_pieces=take)
    except UserError as error:
        if part is None:
            raise
        raise UserError(f"stage {stage.name!r}: {error}") from error
    if not is_last:
        # The next stage begins with what this one leaves.
        assert isinstance(segment.train, MemoryRows)
        segment = replace(segment, train=replace(segment.train, all_pieces=Pieces.join(kept)))
    return NewSegment(segment=segment, corpora=corpora, remainder=remainder, part=part)


def _part_after(plan: Plan, step: int, length: StageLength) -> StagePart:
    """Return the part of a stage that is left after some of its steps."""
    number = plan.newest.stage_number
    tokens = 0
    segments = [one for one in plan.segments if one.stage_number == number]
    ends = [*(one.base_row for one in segments[1:]), plan.cursor(step).next_row]
    for segment, end in zip(segments, ends, strict=True):
        tokens += int(segment.train.stats(0, end - segment.base_row).document_tokens.sum(dtype=np.int64))
    return StagePart(length=length, steps_done=step - plan.stage_start(number), tokens_done=tokens)
