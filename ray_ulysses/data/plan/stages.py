"""Plans the segments of a run: one per stage, all before the first step, and one per branch.

A segment starts from the untrained remainder of the current epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.corpus.corpus import refuse_repeats
from ray_ulysses.data.corpus.row_groups import GROUP_ROWS
from ray_ulysses.data.plan.corpus_set import (
    CorpusSet,
    PlannedSource,
    first_documents,
    open_sources,
    open_validation,
    plan_input,
)
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.planning import Remainder, StagePart, build_segment
from ray_ulysses.data.plan.rows import Fragments, Int64Array, PieceBlocks, Pieces
from ray_ulysses.data.plan.segment import Branch, PlanSettings, Segment, StageLength
from ray_ulysses.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """Inputs for planning a stage."""

    name: str
    """Stage name for error messages."""
    settings: PlanSettings
    shares: tuple[tuple[str, float | None], ...]
    """Path and weight of each corpus."""
    length: StageLength | None
    """Length of the stage; None for the only stage of a run without stages."""
    validation: tuple[str, ...] = ()
    """Path of each validation corpus."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NewSegment:
    """A planned segment that is not stored yet, and the inputs from which it was planned."""

    segment: Segment
    corpora: CorpusSet
    validation: CorpusSet
    remainder: Remainder | None
    """The run's untrained remainder at the start of the segment; None for the first segment."""
    part: StagePart | None
    """The part of a stage that the segment plans; None in a run without stages."""


def num_made(plan: Plan, stages: Sequence[StagePlan], num_done: int = 0) -> int | None:
    """Return the number of leading stages that a plan covers, or None if the plan was made for other stages.

    The corpora of the first ``num_done`` stages, which are fully trained, may be missing. Raises UserError if any other
    corpus can't be opened.
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
        validation = open_validation(stage.validation, sources).sources
        if not segment.is_made_of(stage.settings, sources, segment.branch, stage.length, validation):
            return None
    return len(newest)


def plan_stages(
    stages: Sequence[StagePlan], before: Plan | None = None, step: int = 0, skipped: range | None = None
) -> tuple[Plan, tuple[NewSegment, ...]]:
    """Plan the rest of a run's current stage, and all later stages.

    Args:
        stages: All stages of the run.
        before: The part of the plan to keep, whose newest segment contains ``step``; None for a new run.
        step: Number of completed optimizer steps.
        skipped: Rows after that step to leave out of the plan.

    Returns:
        The plan and its new segments.

    Raises:
        UserError: A corpus can't be used, or a stage has less data than its length requires.
    """
    number = before.newest.stage_number if before else 0
    part = None if (length := stages[number].length) is None else StagePart(length=length)
    if before is not None and part is not None:
        part = _part_after(before, step, part.length)
    first = _next(before, step, stages[number], part, skipped, is_last=number == len(stages) - 1)
    return _continued(before, [first], stages)


def plan_rest(stages: Sequence[StagePlan], before: Plan) -> tuple[Plan, tuple[NewSegment, ...]]:
    """Plan the stages that a plan does not cover yet, and return the extended plan and its new segments."""
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
        assert length is not None, "each of several stages has a length"
        part = StagePart(length=length)
        new.append(_next(plan, plan.num_steps, stages[number], part, None, is_last=number == len(stages) - 1))


def _next(
    plan: Plan | None, step: int, stage: StagePlan, part: StagePart | None, skipped: range | None, *, is_last: bool
) -> NewSegment:
    known = plan.newest.sources if plan else ()
    corpora = open_sources(stage.shares, known)
    refuse_repeats(corpora.corpora, num_known=max(1, len(known)))
    validation = open_validation(stage.validation, corpora.sources)
    refuse_repeats((*corpora.corpora, *validation.corpora), num_known=len(corpora.corpora), are_validation=True)
    remainder = remainder_after(plan, step, corpora.sources, stage.settings, skipped) if plan else None
    for corpus in (*corpora.corpora, *validation.corpora):
        corpus.check_files()
    kept = PieceBlocks()
    take: Callable[[Pieces], None] | None = None if is_last else kept.add
    try:
        segment = build_segment(plan_input(corpora, validation), stage.settings, remainder, part, take_pieces=take)
    except UserError as error:
        if part is None:
            raise
        raise UserError(f"stage {stage.name!r}: {error}") from error
    if not is_last:
        # These pieces determine what the segment leaves untrained, which is an input of the next stage.
        segment = replace(segment, train=replace(segment.train, all_pieces=kept))
    return NewSegment(segment=segment, corpora=corpora, validation=validation, remainder=remainder, part=part)


def _part_after(plan: Plan, step: int, length: StageLength) -> StagePart:
    """Return the part of the plan's newest stage that remains after ``step``."""
    number = plan.newest.stage_number
    tokens = 0
    segments = [one for one in plan.segments if one.stage_number == number]
    ends = [*(one.base_row for one in segments[1:]), plan.cursor(step).next_row]
    for segment, end in zip(segments, ends, strict=True):
        tokens += int(segment.train.stats(0, end - segment.base_row).document_tokens.sum(dtype=np.int64))
    return StagePart(length=length, steps_done=step - plan.stage_start(number), tokens_done=tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Done:
    """Rows of a segment that are not planned again."""

    trained: int
    """Number of leading rows that were trained."""
    skipped: range
    """Later rows that are left out, possibly none."""

    @property
    def end(self) -> int:
        """First row after the trained and skipped rows; all rows from here on are planned again."""
        return max(self.trained, self.skipped.stop)

    def holds(self, first: int, num_rows: int) -> NDArray[np.bool_]:
        rows = np.arange(first, first + num_rows)
        return (rows < self.trained) | ((rows >= self.skipped.start) & (rows < self.skipped.stop))


def remainder_after(
    plan: Plan, step: int, sources: Sequence[PlannedSource], settings: PlanSettings, skipped: range | None = None
) -> Remainder:
    """Return the untrained remainder of a run's current epoch.

    Args:
        plan: The run's plan.
        step: Step of the newest committed checkpoint.
        sources: The sources of the new segment: the plan's sources in the same order, followed by new sources.
        settings: The settings of the new segment.
        skipped: Rows after that step to leave out of the plan.

    Raises:
        UserError: The step is before the newest segment, the order of the sources changed, or ``skipped`` includes rows
            of another epoch.
    """
    newest = plan.newest
    if step < newest.base_step:
        raise UserError(
            f"the newest committed checkpoint (step {step}) is older than the last data change (step "
            f"{newest.base_step}); resume without changes until a newer checkpoint is committed, then branch"
        )
    places = [(source.fingerprint, source.num_documents) for source in newest.sources]
    if [(source.fingerprint, source.num_documents) for source in sources][: len(places)] != places:
        raise UserError("data.sources: the corpora of a run must keep their order; add new corpora at the end")
    cursor = plan.cursor(step)
    epoch = cursor.epoch
    if newest.branch is not None and step == newest.base_step:
        # The cursor belongs to the previous segment, whose last epoch may be an earlier one.
        epoch = newest.branch.epoch
    local = cursor.next_row - newest.base_row
    left_out = range(0) if skipped is None else _left_out(newest, local, epoch, skipped)
    is_done = local >= newest.train.num_rows and settings.epochs > epoch + 1
    epoch += is_done
    ends = [segment.base_row for segment in plan.segments[1:]] + [cursor.next_row]
    earlier = [_skipped_before(plan, number) for number in range(1, len(plan.segments))]
    trained = [
        (segment, _Done(trained=end - segment.base_row, skipped=rows))
        for segment, end, rows in zip(plan.segments, ends, [*earlier, left_out], strict=True)
    ]
    num_documents = int(first_documents(sources)[-1])
    taken = np.zeros(num_documents, dtype=np.bool_)
    for segment, done in trained:
        taken |= _begun(segment, epoch, done, num_documents)
    uses = np.zeros(num_documents, dtype=np.uint32)
    if any(source.weight for source in sources):
        for segment, done in trained:
            _count_uses(segment, done, uses)
    left, planned = _left_of(newest, epoch, trained[-1][1], taken)
    # Without weights, an epoch takes complete documents that it has not begun.
    source = np.searchsorted(first_documents(sources), left.document, side="right") - 1
    is_used = np.asarray([one.is_used for one in sources])[source]
    is_weighted = np.asarray([one.weight is not None for one in sources])[source]
    is_resumed = is_used & (is_weighted | taken[left.document])
    return Remainder(
        branch=Branch(
            plan_id=newest.plan_id,
            step=step,
            row=cursor.next_row,
            epoch=epoch,
            skipped=None if skipped is None else (skipped.start, skipped.stop),
        ),
        taken=taken,
        fragments=left.take(is_resumed),
        waiting=left.take(~is_resumed),
        planned=None if is_done else planned,
        keeps=_keeps(newest, sources, settings),
        uses=uses,
    )


def _keeps(newest: Segment, sources: Sequence[PlannedSource], settings: PlanSettings) -> bool:
    """Return whether a new segment uses the epoch's planned documents, because the selection has not changed."""
    known = [source.weight for source in newest.sources]
    weights = [*known, *[0.0] * (len(sources) - len(known))]
    # With weights, the selection depends on the number of tokens counted per document.
    counts = {_tokens_counted(newest.settings), _tokens_counted(settings)}
    return len(counts) == 1 and [source.weight for source in sources] == weights


def _tokens_counted(settings: PlanSettings) -> tuple[str, int] | None:
    """Return the settings that limit a document's token count, or None if the full length is counted."""
    return (settings.overlong, settings.capacity) if settings.overlong in ("truncate", "drop", "drop_whole") else None


def _left_out(newest: Segment, local: int, epoch: int, skipped: range) -> range:
    """Return the rows to leave out, numbered within the segment; raise UserError unless all belong to ``epoch``."""
    found = range(skipped.start - newest.base_row, skipped.stop - newest.base_row)
    assert local <= found.start < found.stop <= newest.train.num_rows, "only rows not trained yet can be left out"
    first, last = newest.epoch_of(found[0]), newest.epoch_of(found[-1])
    if first != last:
        raise UserError(
            f"rows {skipped.start} to {skipped.stop - 1} can't be left out: they span two epochs, and a branch can "
            "leave out rows of only one; branch the run (train --branch) with a different data.rows_per_step, which "
            "moves the step boundaries"
        )
    if last != epoch:
        raise UserError(
            f"rows {skipped.start} to {skipped.stop - 1} can't be left out: they belong to epoch {last + 1}, but the "
            f"newest checkpoint belongs to epoch {epoch + 1}; save more often (checkpoint.every_steps)"
        )
    return found


def _skipped_before(plan: Plan, number: int) -> range:
    """Return the rows that segment ``number`` left out, numbered within the previous segment."""
    before, branch = plan.segments[number - 1], plan.segments[number].branch
    if branch is None or branch.skipped is None:
        return range(0)
    return range(branch.skipped[0] - before.base_row, branch.skipped[1] - before.base_row)


def _begun(segment: Segment, epoch: int, done: _Done, num_documents: int) -> NDArray[np.bool_]:
    """Return a mask of the documents on which the segment has started training in the epoch; bool [documents]."""
    begun = np.zeros(num_documents, dtype=np.bool_)
    for pieces, is_trained in _pieces_of_epoch(segment, epoch, done):
        begun[pieces.document[is_trained]] = True
    return begun


def _count_uses(segment: Segment, done: _Done, uses: NDArray[np.uint32]) -> None:
    """Increment ``uses`` once per epoch for each document on which the segment has started training."""
    for info in segment.epochs:
        if info.first_row >= done.end:
            break
        begun = _begun(segment, info.epoch, done, uses.size)
        if info is segment.epochs[0]:
            # An earlier segment has begun these documents and counted them already.
            begun[segment.fragments.document] = False
        uses += begun


def _left_of(
    segment: Segment, epoch: int, done: _Done, taken: NDArray[np.bool_]
) -> tuple[Fragments, NDArray[np.bool_]]:
    """Return the fragments that a segment leaves untrained, and a mask of planned documents that were not started."""
    is_split = taken.copy()
    if epoch == segment.epochs[0].epoch:
        is_split[segment.fragments.document] = True
    planned = np.zeros(taken.size, dtype=np.bool_)
    parts = [_unplanned(segment, done, taken.size)]
    for pieces, is_trained in _pieces_of_epoch(segment, epoch, done):
        left = pieces.take(np.flatnonzero(~is_trained & is_split[pieces.document]))
        parts.append(Fragments(document=left.document, start=left.start, length=left.length))
        planned[pieces.document[~is_split[pieces.document]]] = True
    return _joined(parts), planned


def _unplanned(segment: Segment, done: _Done, num_documents: int) -> Fragments:
    """Return the given fragments that yielded no pieces, and the waiting fragments whose documents were not started."""
    given, waiting = segment.fragments, segment.waiting
    is_planned = np.zeros(given.size, dtype=np.bool_)
    if given.size:
        starts = _places(given.document, given.start)
        for pieces, _ in _pieces_of_epoch(segment, segment.epochs[0].epoch, done):
            # Any piece counts: a fragment's first piece may be missing because it has no label.
            at = np.searchsorted(starts, _places(pieces.document, pieces.start), side="right") - 1
            ends = given.start[at] + given.length[at]
            is_planned[at[(at >= 0) & (given.document[at] == pieces.document) & (pieces.start < ends)]] = True
    is_begun = np.zeros(num_documents, dtype=np.bool_)
    for info in segment.epochs if waiting.size else ():
        is_begun |= _begun(segment, info.epoch, done, num_documents)
    # A given fragment became no piece if it was too long for the segment or has no label.
    return _joined([given.take(~is_planned), waiting.take(~is_begun[waiting.document])])


def _joined(parts: Sequence[Fragments]) -> Fragments:
    """Concatenate and sort fragments, and merge those that are adjacent in a document."""
    found = Fragments.join(parts)
    if not found.size:
        return found
    found = found.take(np.lexsort((found.start, found.document)))
    document, start, stop = found.document, found.start, found.start + found.length
    is_first = np.ones(found.size, dtype=np.bool_)
    is_first[1:] = (document[1:] != document[:-1]) | (start[1:] != stop[:-1])
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], found.size) - 1
    return Fragments(document=document[firsts], start=start[firsts], length=stop[lasts] - start[firsts])


def _places(document: Int64Array, start: Int64Array) -> NDArray[np.uint64]:
    """Return a sort key for each token position, ordered by document, then by position."""
    return document.astype(np.uint64) << np.uint64(32) | start.astype(np.uint64)


def _pieces_of_epoch(segment: Segment, epoch: int, done: _Done) -> Iterator[tuple[Pieces, NDArray[np.bool_]]]:
    """Yield the pieces of an epoch's rows in blocks, each with a mask of the pieces in trained or skipped rows."""
    info = next((info for info in segment.epochs if info.epoch == epoch), None)
    if info is None or not info.num_rows:
        return
    stats = segment.train.stats(info.first_row, info.first_row + info.num_rows)
    is_trained = done.holds(info.first_row, info.num_rows)
    # Rows are stored in training order, pieces in closing order.
    order = np.argsort(stats.first_piece, kind="stable")
    flags = np.repeat(is_trained[order], stats.num_pieces[order])
    first = int(stats.first_piece[order[0]])
    for at in range(0, flags.size, GROUP_ROWS):
        stop = min(at + GROUP_ROWS, flags.size)
        yield segment.train.closed_pieces(first + at, first + stop), flags[at:stop]
