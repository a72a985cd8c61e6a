"""Making a plan: from document lengths and a seed alone, every row of a run before its first step.

Documents are drawn in a seeded order, cut, packed, and the rows put into the order of training; nothing but the lengths
and a few numbers a row is held in memory, so that a hundred million documents fit a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.drawing import COUNTERS, NO_FRAGMENTS, Drawing, Fragments
from ray_ulysses.data.mixture import (
    PlannedSource,
    SourceWindow,
    check_weights,
    draw_of,
    epoch_windows,
    first_documents,
    next_firsts,
)
from ray_ulysses.data.packing import NO_PIECES, Packer, Pieces
from ray_ulysses.data.permutation import Permutation
from ray_ulysses.data.plan import Branch, EpochInfo, Plan, PlanSettings, Segment, Totals, segment_id
from ray_ulysses.data.rows import MemoryRows, RowWeights
from ray_ulysses.data.spans import LabelSpans
from ray_ulysses.data.steps import balance_windows
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
        firsts: Where each source's circle goes on.
        taken: bool [documents], documents of which this epoch has trained something.
        fragments: What is left of those.
        windows: What the epoch took of each source so far; None where it has not begun.
    """

    branch: Branch
    firsts: tuple[int, ...]
    taken: NDArray[np.bool_]
    fragments: Fragments
    windows: tuple[SourceWindow, ...] | None


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
    parts, orders, epochs, firsts = planning.train()
    weights = RowWeights.join(parts)
    order = np.concatenate(orders) if len(orders) != 1 else orders[0]
    if not weights.num_rows:
        raise UserError(
            f"data: none of {lengths.size} documents is left to train on ({num_held} are held out by "
            f"data.eval_fraction={settings.eval_fraction}, {num_without} have fewer than 2 tokens); "
            "use a smaller share, a longer corpus, or more data.epochs"
        )
    branch = remainder.branch if remainder else None
    counts = dict(zip(COUNTERS, planning.counters.tolist(), strict=True))
    padded = int(weights.padded_tokens(settings.pad_multiple).sum())
    tokens = int(weights.document_tokens.sum(dtype=np.int64))
    return Segment(
        plan_id=segment_id(settings, documents.sources, branch),
        settings=settings,
        sources=documents.sources,
        branch=branch,
        epochs=epochs,
        firsts=firsts,
        fragments=remainder.fragments if remainder else NO_FRAGMENTS,
        totals=Totals(
            num_documents=lengths.size,
            held_out_documents=num_held,
            skipped_documents=num_without,
            split_documents=counts["split"],
            truncated_documents=counts["truncated"],
            dropped_documents=counts["dropped"],
            lost_tokens=counts["lost_tokens"],
            tokens=tokens,
            supervised=int(weights.supervised.sum(dtype=np.int64)),
            padding_tokens=padded - tokens,
        ),
        train=MemoryRows(weights, sink.pieces if isinstance(sink, MemorySink) else None, order),
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

    def train(self) -> tuple[list[RowWeights], list[Int64Array], tuple[EpochInfo, ...], tuple[int, ...]]:
        """Return the rows of each epoch, their order in training, the epochs, and where the circles stand then."""
        settings, sources, remainder = self._settings, self._documents.sources, self._remainder
        firsts = remainder.firsts if remainder else (0,) * len(sources)
        first_epoch = remainder.branch.epoch if remainder else 0
        parts: list[RowWeights] = []
        orders: list[Int64Array] = []
        infos: list[EpochInfo] = []
        num_rows = num_pieces = 0
        for epoch in range(first_epoch, settings.epochs):
            begun = remainder if epoch == first_epoch else None
            drawing = self._drawing(begun.taken if begun else None)
            windows = epoch_windows(sources, firsts, drawing, epoch, begun.windows if begun else None)
            firsts = next_firsts(windows, sources)
            draw = draw_of(windows, seed=settings.seed, epoch=epoch, stream=_DOCUMENT_STREAM, held_out=False)
            fragments = _planned_fragments(begun.fragments, sources, self._bases) if begun else NO_FRAGMENTS
            packed = self._packed_rows(drawing.pieces(draw, fragments, self.counters))
            packed = _with_first_pieces(packed, num_pieces)
            order = self._order(packed, epoch, num_rows)
            order += num_rows
            orders.append(order)
            infos.append(EpochInfo(epoch=epoch, first_row=num_rows, num_rows=packed.num_rows, windows=windows))
            num_rows += packed.num_rows
            num_pieces += int(packed.num_pieces.sum(dtype=np.int64))
            parts.append(packed)
        return parts, orders, tuple(infos), firsts

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
        windows = tuple(
            SourceWindow(first=0, count=source.num_documents if source.is_used else 0)
            for source in self._documents.sources
        )
        draw = draw_of(windows, seed=settings.seed, epoch=0, stream=_EVALUATION_STREAM, held_out=True)
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


def _planned_fragments(
    fragments: Fragments, sources: Sequence[PlannedSource], first_documents: Int64Array
) -> Fragments:
    """Return the fragments of the sources that are used; the others wait until theirs is used again."""
    source = np.searchsorted(first_documents, fragments.document, side="right") - 1
    used = np.asarray([one.is_used for one in sources])[source]
    return Fragments(document=fragments.document[used], start=fragments.start[used], length=fragments.length[used])


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
