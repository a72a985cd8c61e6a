"""Making a plan: from document lengths and a seed alone, every row of a run before its first step.

Documents are drawn in a seeded order, cut, packed, and the rows put into the order of training; nothing but the lengths
and a few numbers a row is held in memory, so that a hundred million documents fit a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.plan.drawing import COUNTERS, NO_FRAGMENTS, Drawing, EpochDraw, Fragments
from ray_ulysses.data.plan.mixture import PlannedSource, check_weights, choose_documents, first_documents
from ray_ulysses.data.plan.packing import NO_PIECES, Packer, Pieces
from ray_ulysses.data.plan.permutation import Permutation
from ray_ulysses.data.plan.plan import Branch, EpochInfo, Plan, PlanSettings, Segment, Totals, segment_id
from ray_ulysses.data.plan.row_checksums import GroupChecksums, piece_columns, segment_checksums
from ray_ulysses.data.plan.rows import MemoryRows, RowWeights
from ray_ulysses.data.plan.steps import balance_windows
from ray_ulysses.data.tokenize.spans import LabelSpans
from ray_ulysses.errors import UserError

Int64Array = NDArray[np.int64]
_DOCUMENT_STREAM, _ROW_STREAM, _EVALUATION_STREAM = 1, 2, 3
_MAX_LENGTH = 2**32 - 1
_MAX_DOCUMENTS = 2**32 - 1
_MAX_CAPACITY = 2**31 - 1


class PieceSink(Protocol):
    """Where the pieces of training rows go, in the order in which rows close."""

    def add(self, pieces: Pieces) -> None:
        """Take the next pieces."""
        ...


class NoSink:
    """Lets pieces go: where only the rows' weights are asked for."""

    def add(self, pieces: Pieces) -> None:
        """Take the next pieces."""


class MemorySink:
    """Keeps pieces in memory."""

    def __init__(self) -> None:
        self._blocks: list[Pieces] = []

    def add(self, pieces: Pieces) -> None:
        """Take the next pieces."""
        self._blocks.append(pieces)

    @property
    def pieces(self) -> Pieces:
        """Return everything that was taken."""
        return Pieces(
            document=np.concatenate([block.document for block in self._blocks]),
            start=np.concatenate([block.start for block in self._blocks]),
            length=np.concatenate([block.length for block in self._blocks]),
            has_next=np.concatenate([block.has_next for block in self._blocks]),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanInput:
    """What documents there are.

    Attributes:
        sources: The corpora.
        lengths: Tokens of each document, of all sources, one after another.
        spans: Which tokens may be labels; None where all may.
    """

    sources: tuple[PlannedSource, ...]
    lengths: NDArray[np.integer]
    spans: LabelSpans | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Remainder:
    """What is left of an epoch when a plan is branched.

    Attributes:
        branch: Where the new segment begins.
        taken: bool [documents], documents of which this epoch has trained something.
        fragments: What is left of those.
        waiting: What is left of others since an earlier epoch, or of sources that are not used.
        planned: bool [documents], those that the epoch had planned and has not trained anything of; None where the
            epoch has not begun.
        uses: [documents], how often each was taken by the epochs so far, this one included.
    """

    branch: Branch
    taken: NDArray[np.bool_]
    fragments: Fragments
    waiting: Fragments
    planned: NDArray[np.bool_] | None
    uses: NDArray[np.uint32]


def build_segment(
    documents: PlanInput, settings: PlanSettings, sink: PieceSink, remainder: Remainder | None = None
) -> Segment:
    """Plan every row from the documents' lengths.

    Args:
        documents: The documents.
        settings: Seed, context and the rest.
        sink: Where the pieces of training rows go; those of evaluation rows stay in the segment.
        remainder: What a run has trained already; ``None`` at its beginning.

    Returns:
        The segment, whose training rows know their weights alone; the same arguments give the same one on every
        machine.

    Raises:
        UserError: A setting makes no plan possible, or a split is left without documents.
    """
    _check(settings, remainder)
    check_weights(documents.sources)
    lengths = _compact(documents.lengths)
    planning = _Planning(documents, lengths, settings, sink, remainder)
    evaluation, num_held, num_without = planning.evaluation()
    parts, orders, epochs = planning.train()
    weights = RowWeights.join(parts)
    order = np.concatenate(orders) if len(orders) != 1 else orders[0]
    if not weights.num_rows:
        raise UserError(
            f"data: none of {lengths.size} documents is left to train on ({num_held} are held out by "
            f"data.eval_fraction={settings.eval_fraction}, {num_without} have fewer than 2 tokens); "
            "use a smaller share, a longer corpus, or more data.epochs"
        )
    branch = remainder.branch if remainder else None
    fragments, waiting = (remainder.fragments, remainder.waiting) if remainder else (NO_FRAGMENTS, NO_FRAGMENTS)
    train = MemoryRows(weights, sink.pieces if isinstance(sink, MemorySink) else None, order)
    totals = planning.totals(weights, num_held, num_without)
    checksums = segment_checksums(train, planning.pieces, evaluation, fragments, waiting)
    return Segment(
        plan_id=segment_id(settings, documents.sources, branch, epochs, totals, checksums),
        settings=settings,
        sources=documents.sources,
        branch=branch,
        epochs=epochs,
        fragments=fragments,
        waiting=waiting,
        totals=totals,
        checksums=checksums,
        train=train,
        evaluation=evaluation,
    )


def build_plan(
    lengths: NDArray[np.integer], fingerprint: str, settings: PlanSettings, spans: LabelSpans | None = None
) -> Plan:
    """Plan one corpus in memory, pieces and all.

    Args:
        lengths: Tokens of each document.
        fingerprint: Identity of the corpus.
        settings: Seed, context and the rest.
        spans: Which tokens may be labels; None where all may.

    Raises:
        UserError: As ``build_segment``.
    """
    source = PlannedSource(path="", fingerprint=fingerprint, num_documents=int(lengths.size))
    documents = PlanInput(sources=(source,), lengths=lengths, spans=spans)
    return Plan(segments=(build_segment(documents, settings, MemorySink()),))


class _Planning:
    """One plan in the making."""

    def __init__(
        self,
        documents: PlanInput,
        lengths: NDArray[np.uint32],
        settings: PlanSettings,
        sink: PieceSink,
        remainder: Remainder | None,
    ) -> None:
        self._documents = documents
        self._lengths = lengths
        self._settings = settings
        self._sink = sink
        self._remainder = remainder
        self._bases = first_documents(documents.sources)
        assert int(self._bases[-1]) == lengths.size, "the sources' documents and the lengths differ in number"
        self.counters = np.zeros(len(COUNTERS), dtype=np.int64)
        self.pieces = GroupChecksums()

    def train(self) -> tuple[list[RowWeights], list[Int64Array], tuple[EpochInfo, ...]]:
        """Return the rows of each epoch, their order in training, and the epochs."""
        settings, remainder = self._settings, self._remainder
        first_epoch = remainder.branch.epoch if remainder else 0
        uses = self._uses_so_far()
        parts: list[RowWeights] = []
        orders: list[Int64Array] = []
        infos: list[EpochInfo] = []
        num_rows = num_pieces = 0
        for epoch in range(first_epoch, settings.epochs):
            begun = remainder if epoch == first_epoch else None
            fragments = begun.fragments if begun else NO_FRAGMENTS
            drawing = self._epoch_drawing(epoch, begun, uses)
            draw = self._draw(epoch, _DOCUMENT_STREAM)
            packed = self._packed_rows(drawing.pieces(draw, fragments, self.counters))
            packed = _with_first_pieces(packed, num_pieces)
            order = self._order(packed, epoch, num_rows)
            order += num_rows
            orders.append(order)
            infos.append(EpochInfo(epoch=epoch, first_row=num_rows, num_rows=packed.num_rows))
            num_rows += packed.num_rows
            num_pieces += int(packed.num_pieces.sum(dtype=np.int64))
            parts.append(packed)
        return parts, orders, tuple(infos)

    def _uses_so_far(self) -> NDArray[np.uint32] | None:
        """Return how often each document was taken, to be counted on; None where no source is taken in part."""
        if not any(source.weight for source in self._documents.sources):
            return None
        if self._remainder is None:
            return np.zeros(self._lengths.size, dtype=np.uint32)
        return self._remainder.uses.copy()

    def _epoch_drawing(self, epoch: int, begun: Remainder | None, uses: NDArray[np.uint32] | None) -> Drawing:
        """Return an epoch's drawing, which passes over what the epoch does not take."""
        taken = planned = None
        if begun is not None:
            # A document of which a stretch is planned is not taken whole in the same epoch.
            taken = begun.taken.copy()
            taken[begun.fragments.document] = True
            planned = None if begun.planned is None else begun.planned & ~taken
        drawing = self._drawing(taken)
        if uses is None:
            return drawing
        return self._drawing(~choose_documents(self._documents.sources, drawing, uses, epoch, planned))

    def _draw(self, epoch: int, stream: int) -> EpochDraw:
        counts = tuple(source.num_documents if source.is_used else 0 for source in self._documents.sources)
        return EpochDraw(
            counts=counts, seeds=(self._settings.seed, epoch, stream), held_out=stream == _EVALUATION_STREAM
        )

    def _packed_rows(self, blocks: Iterator[Pieces]) -> RowWeights:
        """Return the rows in the order in which they close; their parts are let go before rows are put in order."""
        closed = [self._row_weights(pieces, sizes) for pieces, sizes in self._packed(blocks)]
        return RowWeights.join([weights for weights in closed if weights is not None])

    def evaluation(self) -> tuple[MemoryRows, int, int]:
        """Return the first rows of the documents held out, how many those are, and documents without a target."""
        settings = self._settings
        drawing = self._drawing(None)
        num_held, num_without, num_usable = drawing.count_documents()
        if settings.eval_fraction > 0 and settings.eval_rows > 0 and num_usable == 0:
            raise UserError(
                f"data.eval_fraction={settings.eval_fraction}: holds out none of the {self._lengths.size} documents; "
                "use a larger share, 0 for no evaluation, or a corpus with more documents"
            )
        parts: list[RowWeights] = []
        pieces_kept: list[Pieces] = []
        num_rows = 0
        draw = self._draw(0, _EVALUATION_STREAM)
        if num_usable and settings.eval_rows:
            ignored = np.zeros(len(COUNTERS), dtype=np.int64)
            for pieces, sizes in self._packed(drawing.pieces(draw, NO_FRAGMENTS, ignored)):
                kept = sizes[: settings.eval_rows - num_rows]
                part = pieces.take(slice(0, int(kept.sum())))
                weights = self._row_weights(part, kept, is_training=False)
                if weights is not None:
                    pieces_kept.append(part)
                    parts.append(weights)
                    num_rows += weights.num_rows
                if num_rows == settings.eval_rows:
                    break
        sink = MemorySink()
        for part in pieces_kept:
            sink.add(part)
        rows = _with_first_pieces(RowWeights.join(parts), 0)
        return MemoryRows(rows, sink.pieces if pieces_kept else None), num_held, num_without

    def totals(self, weights: RowWeights, num_held: int, num_without: int) -> Totals:
        """Return what planning came to."""
        counts = dict(zip(COUNTERS, self.counters.tolist(), strict=True))
        tokens = int(weights.document_tokens.sum(dtype=np.int64))
        return Totals(
            num_documents=self._lengths.size,
            held_out_documents=num_held,
            skipped_documents=num_without,
            split_documents=counts["split"],
            truncated_documents=counts["truncated"],
            dropped_documents=counts["dropped"],
            lost_tokens=counts["lost_tokens"],
            tokens=tokens,
            supervised=int(weights.supervised.sum(dtype=np.int64)),
            padding_tokens=int(weights.padded_tokens(self._settings.pad_multiple).sum()) - tokens,
        )

    def _drawing(self, taken: NDArray[np.bool_] | None) -> Drawing:
        settings = self._settings
        return Drawing(
            self._lengths,
            self._bases,
            seed=settings.seed,
            eval_fraction=settings.eval_fraction,
            capacity=settings.capacity,
            overlong=settings.overlong,
            cut=settings.packing != "concat",
            taken=taken,
        )

    def _packed(self, blocks: Iterator[Pieces]) -> Iterator[tuple[Pieces, Int64Array]]:
        """Yield the pieces of rows that closed and the number of each row's, block after block."""
        packer = Packer(self._settings.packing, self._settings.capacity)
        for block in blocks:
            yield packer.add(block, is_last=False)
        yield packer.add(NO_PIECES, is_last=True)

    def _row_weights(self, pieces: Pieces, sizes: Int64Array, is_training: bool = True) -> RowWeights | None:
        if not sizes.size:
            return None
        if is_training:
            self._sink.add(pieces)
            self.pieces.add(piece_columns(pieces))
        starts = np.cumsum(sizes) - sizes
        labels = pieces.length - ~pieces.has_next
        if self._documents.spans is not None:
            first = pieces.start + 1
            labels = self._documents.spans.count(pieces.document, first, first + labels)
        return RowWeights(
            # Known when all rows are: until then no memory is spent on it.
            first_piece=np.broadcast_to(np.int64(0), sizes.shape),
            num_pieces=sizes.astype(np.int32),
            document_tokens=np.add.reduceat(pieces.length, starts).astype(np.int32),
            supervised=np.add.reduceat(labels, starts).astype(np.int32),
            sum_squares=np.add.reduceat(pieces.length * pieces.length, starts),
        )

    def _order(self, rows: RowWeights, epoch: int, first_row: int) -> Int64Array:
        # Rows close in an order that goes with their fill, and pieces of one document lie side by side: shuffle.
        shuffle = Permutation.seeded(rows.num_rows, self._settings.seed, epoch, _ROW_STREAM)
        order = shuffle.all()
        if self._settings.balance_steps > 1:
            costs = rows.cost(self._settings.token_cost)[order]
            settings = self._settings
            order = order[balance_windows(costs, settings.rows_per_step, settings.balance_steps, first_row)]
        return order


def _with_first_pieces(rows: RowWeights, num_pieces: int) -> RowWeights:
    """Return rows that know the places of their pieces, which follow ``num_pieces`` others."""
    first_piece = np.cumsum(rows.num_pieces, dtype=np.int64)
    first_piece -= rows.num_pieces
    first_piece += num_pieces
    return replace(rows, first_piece=first_piece)


def _check(settings: PlanSettings, remainder: Remainder | None) -> None:
    if remainder is not None and remainder.branch.epoch >= settings.epochs:
        epoch = remainder.branch.epoch + 1
        raise UserError(f"data.epochs={settings.epochs}: the run is in epoch {epoch}; use at least {epoch}")
    if settings.capacity < 1:
        raise UserError(
            f"data.context_tokens={settings.context_tokens}: is shorter than pad_multiple={settings.pad_multiple}, "
            f"which a row's length must be a multiple of; use at least {settings.pad_multiple}"
        )
    if settings.capacity > _MAX_CAPACITY:
        raise UserError(f"data.context_tokens={settings.context_tokens}: a row holds at most {_MAX_CAPACITY} tokens")
    lowest = {"data.rows_per_step": 1, "data.epochs": 1, "data.eval_rows": 0, "data.balance_steps": 1, "run.seed": 0}
    for path, least in lowest.items():
        value = getattr(settings, path.split(".")[1])
        if value < least:
            raise UserError(f"{path}={value}: must be at least {least}")
    if not 0.0 <= settings.eval_fraction <= 0.5:
        raise UserError(f"data.eval_fraction={settings.eval_fraction}: must be in [0, 0.5]")


def _compact(lengths: NDArray[np.integer]) -> NDArray[np.uint32]:
    if lengths.size > _MAX_DOCUMENTS:
        raise UserError(
            f"data: {lengths.size} documents are more than the {_MAX_DOCUMENTS} of a plan; leave some sources out"
        )
    if lengths.size and int(lengths.max()) > _MAX_LENGTH:
        raise UserError(
            f"data: document {int(lengths.argmax())} has {int(lengths.max())} tokens; a document holds at most "
            f"{_MAX_LENGTH}: cut it before `ray-ulysses prepare`"
        )
    return np.ascontiguousarray(lengths, dtype=np.uint32)
