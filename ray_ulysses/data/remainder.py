"""What a run has not trained yet, when its data is edited: the ground of a new segment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.drawing import NO_FRAGMENTS, Fragments
from ray_ulysses.data.mixture import PlannedSource, SourceWindow, first_documents
from ray_ulysses.data.packing import Pieces
from ray_ulysses.data.plan import Branch, Plan, Segment
from ray_ulysses.data.planning import Remainder
from ray_ulysses.data.row_files import FileRows
from ray_ulysses.data.row_groups import GROUP_ROWS
from ray_ulysses.data.rows import MemoryRows
from ray_ulysses.errors import UserError

Int64Array = NDArray[np.int64]


def remainder_after(plan: Plan, step: int, sources: Sequence[PlannedSource], epochs: int) -> Remainder:
    """Return what is left of the epoch that a run is in.

    Args:
        plan: The run's plan.
        step: Steps completed, of which the state is committed.
        sources: The sources of the new segment: those of the plan in their places, then new ones.
        epochs: Epochs that the run is to have.

    Raises:
        UserError: The step lies before the newest segment, or the sources moved.
    """
    newest = plan.newest
    if step < newest.base_step:
        raise UserError(
            f"the newest committed checkpoint is of step {step}, before the last change of the data at step "
            f"{newest.base_step}; resume without a change until a checkpoint beyond it is committed, then branch"
        )
    places = [(source.fingerprint, source.num_documents) for source in newest.sources]
    if [(source.fingerprint, source.num_documents) for source in sources][: len(places)] != places:
        raise UserError("data.sources: the corpora of a run keep their places; add new ones behind them")
    cursor = plan.cursor(step)
    epoch = cursor.epoch
    if newest.branch is not None and step == newest.base_step:
        # The cursor is the segment's before, which may have ended an epoch earlier.
        epoch = newest.branch.epoch
    local = cursor.next_row - newest.base_row
    is_done = local >= newest.train.num_rows
    if is_done and epochs > epoch + 1:
        return Remainder(
            branch=Branch(plan_id=newest.plan_id, step=step, row=cursor.next_row, epoch=epoch + 1),
            firsts=_extended(newest.firsts, sources),
            taken=np.empty(0, dtype=np.bool_),
            fragments=NO_FRAGMENTS,
            windows=None,
        )
    taken = np.zeros(int(first_documents(sources)[-1]), dtype=np.bool_)
    ends = [segment.base_row for segment in plan.segments[1:]] + [cursor.next_row]
    for segment, end in zip(plan.segments, ends, strict=True):
        _mark_taken(segment, epoch, end - segment.base_row, taken)
    return Remainder(
        branch=Branch(plan_id=newest.plan_id, step=step, row=cursor.next_row, epoch=epoch),
        firsts=_extended(tuple(window.first for window in _windows_of(newest, epoch)), sources),
        taken=taken,
        fragments=_fragments_left(newest, epoch, local, taken),
        windows=_windows_of(newest, epoch),
    )


def _extended(firsts: tuple[int, ...], sources: Sequence[PlannedSource]) -> tuple[int, ...]:
    return firsts + (0,) * (len(sources) - len(firsts))


def _windows_of(segment: Segment, epoch: int) -> tuple[SourceWindow, ...]:
    return next(info.windows for info in segment.epochs if info.epoch == epoch)


def _mark_taken(segment: Segment, epoch: int, trained_rows: int, taken: NDArray[np.bool_]) -> None:
    """Mark the documents of which the segment has trained something in the epoch."""
    for pieces, is_trained in _pieces_of_epoch(segment, epoch, trained_rows):
        taken[pieces.document[is_trained]] = True


def _fragments_left(segment: Segment, epoch: int, trained_rows: int, taken: NDArray[np.bool_]) -> Fragments:
    """Return the stretches that are left of documents of which something is trained, neighbours joined."""
    is_continued = segment.branch is not None and segment.branch.epoch == epoch
    given = segment.fragments if is_continued else NO_FRAGMENTS
    is_planned = np.zeros(given.size, dtype=np.bool_)
    parts = [(given.document[:0], given.start[:0], given.length[:0])]
    for pieces, is_trained in _pieces_of_epoch(segment, epoch, trained_rows):
        left = pieces.take(np.flatnonzero(~is_trained & taken[pieces.document]))
        parts.append((left.document, left.start, left.length))
        is_planned |= np.isin(_places(given.document, given.start), _places(pieces.document, pieces.start))
    # What became no piece still waits: it is of a source that the segment did not use, or was too long for it.
    parts.append((given.document[~is_planned], given.start[~is_planned], given.length[~is_planned]))
    document, start, length = (np.concatenate(column) for column in zip(*parts, strict=True))
    if not document.size:
        return NO_FRAGMENTS
    order = np.lexsort((start, document))
    document, start, stop = document[order], start[order], (start + length)[order]
    is_first = np.ones(document.size, dtype=np.bool_)
    is_first[1:] = (document[1:] != document[:-1]) | (start[1:] != stop[:-1])
    firsts = np.flatnonzero(is_first)
    lasts = np.append(firsts[1:], document.size) - 1
    return Fragments(document=document[firsts], start=start[firsts], length=stop[lasts] - start[firsts])


def _places(document: Int64Array, start: Int64Array) -> NDArray[np.uint64]:
    """Return one number for each token of each document."""
    return document.astype(np.uint64) << np.uint64(32) | start.astype(np.uint64)


def _pieces_of_epoch(segment: Segment, epoch: int, trained_rows: int) -> Iterator[tuple[Pieces, NDArray[np.bool_]]]:
    """Yield the pieces of an epoch's rows, block by block, and of each whether its row is trained."""
    info = next((info for info in segment.epochs if info.epoch == epoch), None)
    if info is None or not info.num_rows:
        return
    weights = segment.train.weights(info.first_row, info.first_row + info.num_rows)
    is_trained = np.arange(info.first_row, info.first_row + info.num_rows) < trained_rows
    # Rows lie in the order of training, pieces in the order in which rows closed.
    order = np.argsort(weights.first_piece, kind="stable")
    flags = np.repeat(is_trained[order], weights.num_pieces[order])
    first = int(weights.first_piece[order[0]])
    rows = segment.train
    if isinstance(rows, MemoryRows):
        yield rows.all_pieces.take(slice(first, first + flags.size)), flags
        return
    assert isinstance(rows, FileRows)
    for at in range(0, flags.size, GROUP_ROWS):
        stop = min(at + GROUP_ROWS, flags.size)
        yield rows.all_pieces(first + at, first + stop), flags[at:stop]
