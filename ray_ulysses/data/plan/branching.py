"""Finds what a run has not trained yet when its data is changed, which the next segment starts from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.corpus.row_groups import GROUP_ROWS
from ray_ulysses.data.plan.drawing import Fragments
from ray_ulysses.data.plan.mixture import PlannedSource, first_documents
from ray_ulysses.data.plan.packing import Pieces
from ray_ulysses.data.plan.plan import Branch, Plan, Segment
from ray_ulysses.data.plan.planning import Remainder
from ray_ulysses.errors import UserError

Int64Array = NDArray[np.int64]


def remainder_after(plan: Plan, step: int, sources: Sequence[PlannedSource], epochs: int) -> Remainder:
    """Return what is left of the epoch that a run is in.

    Args:
        plan: The run's plan.
        step: Step of the newest committed checkpoint.
        sources: The sources of the new segment: those of the plan in their order, then new ones.
        epochs: Epochs that the run is to have.

    Raises:
        UserError: The step is before the newest segment, or the sources moved.
    """
    newest = plan.newest
    if step < newest.base_step:
        raise UserError(
            f"the newest committed checkpoint is of step {step}, before the last change of the data at step "
            f"{newest.base_step}; resume without a change until a checkpoint beyond it is committed, then branch"
        )
    places = [(source.fingerprint, source.num_documents) for source in newest.sources]
    if [(source.fingerprint, source.num_documents) for source in sources][: len(places)] != places:
        raise UserError("data.sources: the corpora of a run keep their order; add new ones after them")
    cursor = plan.cursor(step)
    epoch = cursor.epoch
    if newest.branch is not None and step == newest.base_step:
        # The cursor is of the previous segment, which may have ended an epoch earlier.
        epoch = newest.branch.epoch
    local = cursor.next_row - newest.base_row
    is_done = local >= newest.train.num_rows and epochs > epoch + 1
    epoch += is_done
    ends = [segment.base_row for segment in plan.segments[1:]] + [cursor.next_row]
    trained = [(segment, end - segment.base_row) for segment, end in zip(plan.segments, ends, strict=True)]
    num_documents = int(first_documents(sources)[-1])
    taken = np.zeros(num_documents, dtype=np.bool_)
    for segment, rows in trained:
        taken |= _begun(segment, epoch, rows, num_documents)
    uses = np.zeros(num_documents, dtype=np.uint32)
    if any(source.weight for source in sources):
        for segment, rows in trained:
            _count_uses(segment, rows, uses)
    left, planned = _left_of(newest, epoch, local, taken)
    is_resumed = _is_resumed(left, sources, taken)
    return Remainder(
        branch=Branch(plan_id=newest.plan_id, step=step, row=cursor.next_row, epoch=epoch),
        taken=taken,
        fragments=left.take(is_resumed),
        waiting=left.take(~is_resumed),
        planned=None if is_done else planned,
        uses=uses,
    )


def _begun(segment: Segment, epoch: int, trained_rows: int, num_documents: int) -> NDArray[np.bool_]:
    """Return which documents the segment has trained something of in the epoch."""
    begun = np.zeros(num_documents, dtype=np.bool_)
    for pieces, is_trained in _pieces_of_epoch(segment, epoch, trained_rows):
        begun[pieces.document[is_trained]] = True
    return begun


def _count_uses(segment: Segment, trained_rows: int, uses: NDArray[np.uint32]) -> None:
    """Count the documents that the segment has begun, once for each epoch."""
    for info in segment.epochs:
        if info.first_row >= trained_rows:
            break
        begun = _begun(segment, info.epoch, trained_rows, uses.size)
        if info is segment.epochs[0]:
            # An earlier segment has begun these, and counted them.
            begun[segment.fragments.document] = False
        uses += begun


def _is_resumed(left: Fragments, sources: Sequence[PlannedSource], taken: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which fragments the new segment takes up; without weights an epoch takes unbegun documents whole."""
    source = np.searchsorted(first_documents(sources), left.document, side="right") - 1
    is_used = np.asarray([one.is_used for one in sources])[source]
    is_weighted = np.asarray([one.weight is not None for one in sources])[source]
    return is_used & (is_weighted | taken[left.document])


def _left_of(
    segment: Segment, epoch: int, trained_rows: int, taken: NDArray[np.bool_]
) -> tuple[Fragments, NDArray[np.bool_]]:
    """Return the fragments that a segment leaves, and which whole documents the epoch had planned."""
    is_split = taken.copy()
    if epoch == segment.epochs[0].epoch:
        is_split[segment.fragments.document] = True
    planned = np.zeros(taken.size, dtype=np.bool_)
    parts = [_unplanned(segment, trained_rows, taken.size)]
    for pieces, is_trained in _pieces_of_epoch(segment, epoch, trained_rows):
        left = pieces.take(np.flatnonzero(~is_trained & is_split[pieces.document]))
        parts.append(Fragments(document=left.document, start=left.start, length=left.length))
        planned[pieces.document[~is_split[pieces.document]]] = True
    return _joined(parts), planned


def _unplanned(segment: Segment, trained_rows: int, num_documents: int) -> Fragments:
    """Return earlier fragments that the segment made no pieces of, and whose documents it did not begin."""
    given, waiting = segment.fragments, segment.waiting
    is_planned = np.zeros(given.size, dtype=np.bool_)
    if given.size:
        for pieces, _ in _pieces_of_epoch(segment, segment.epochs[0].epoch, 0):
            is_planned |= np.isin(_places(given.document, given.start), _places(pieces.document, pieces.start))
    is_begun = np.zeros(num_documents, dtype=np.bool_)
    for info in segment.epochs if waiting.size else ():
        is_begun |= _begun(segment, info.epoch, trained_rows, num_documents)
    # A given fragment without a piece was too long for the segment.
    return _joined([given.take(~is_planned), waiting.take(~is_begun[waiting.document])])


def _joined(parts: Sequence[Fragments]) -> Fragments:
    """Return all fragments, merging those that are adjacent in a document."""
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
    """Return one number for each token of each document."""
    return document.astype(np.uint64) << np.uint64(32) | start.astype(np.uint64)


def _pieces_of_epoch(segment: Segment, epoch: int, trained_rows: int) -> Iterator[tuple[Pieces, NDArray[np.bool_]]]:
    """Yield the pieces of an epoch's rows, block by block, and whether the row of each piece is trained."""
    info = next((info for info in segment.epochs if info.epoch == epoch), None)
    if info is None or not info.num_rows:
        return
    stats = segment.train.stats(info.first_row, info.first_row + info.num_rows)
    is_trained = np.arange(info.first_row, info.first_row + info.num_rows) < trained_rows
    # Rows are in training order, pieces in the order in which rows closed.
    order = np.argsort(stats.first_piece, kind="stable")
    flags = np.repeat(is_trained[order], stats.num_pieces[order])
    first = int(stats.first_piece[order[0]])
    for at in range(0, flags.size, GROUP_ROWS):
        stop = min(at + GROUP_ROWS, flags.size)
        yield segment.train.closed_pieces(first + at, first + stop), flags[at:stop]
