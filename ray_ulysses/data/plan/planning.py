"""Plans every row of a run before the first step, using only the document lengths and a seed.

Documents are drawn in a seeded order, split and packed, and the rows are put into training order. Only the lengths and
a few numbers per row are in memory, so a hundred million documents can be planned on a laptop.

Without weights, an epoch uses every document of every source once. With weights, an epoch uses every document of the
source that is smallest relative to its weight, and tokens of the other sources in proportion to their weights.
Remainders of partly trained documents count towards these tokens, and are used even if they exceed the proportion. If
an epoch uses only some documents of a source, the least used ones come first, in a seeded order: no document is used
twice before all others were used once, even if the run's data change, and none is used twice in one epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.plan.corpus_set import PlanInput, first_documents
from ray_ulysses.data.plan.drawing import COUNTERS, REFUSED, Drawing, Permutation
from ray_ulysses.data.plan.packing import Packer
from ray_ulysses.data.plan.rows import (
    Fragments,
    GroupChecksums,
    Int64Array,
    Pieces,
    Rows,
    RowStats,
    checksums_of,
    fragment_columns,
)
from ray_ulysses.data.plan.segment import (
    Branch,
    Checksums,
    EpochInfo,
    PlannedStage,
    PlanSettings,
    Segment,
    StageLength,
    Totals,
)
from ray_ulysses.data.plan.steps import balance_windows
from ray_ulysses.errors import UserError

_DOCUMENT_STREAM, _ROW_STREAM, _EVALUATION_STREAM = 1, 2, 3
_MAX_DOCUMENTS = 2**32 - 1
_MAX_CAPACITY = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Remainder:
    """Untrained remainder of an epoch at the step where a plan is branched."""

    branch: Branch
    """Position at which the new segment begins."""
    taken: NDArray[np.bool_]
    """[documents], true if this epoch has trained on at least a part of the document."""
    fragments: Fragments
    """Untrained parts of documents that the new segment trains on."""
    waiting: Fragments
    """Untrained parts that the new segment skips: the source is unused, or the complete document is drawn instead."""
    planned: NDArray[np.bool_] | None
    """[documents], true if the epoch includes the document but has not started it; None if the epoch has not begun."""
    keeps: bool
    """Whether a weighted run's epoch still uses exactly the ``planned`` documents: the selection is unchanged."""
    uses: NDArray[np.uint32]
    """[documents], number of times that each document has been used in this epoch and all earlier epochs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePart:
    """The part of a stage that a segment plans: the rest after ``steps_done`` steps and ``tokens_done`` tokens."""

    length: StageLength
    steps_done: int = 0
    tokens_done: int = 0


def build_segment(
    documents: PlanInput,
    settings: PlanSettings,
    remainder: Remainder | None = None,
    stage: StagePart | None = None,
    *,
    take_pieces: Callable[[Pieces], None] | None = None,
) -> Segment:
    """Plan every row of a segment from the document lengths.

    Args:
        documents: The documents to plan.
        settings: The settings of the segment.
        remainder: The run's untrained remainder; ``None`` for a new run.
        stage: The part of a stage to plan; ``None`` in a run without stages.
        take_pieces: Called with the training rows' pieces, in the order in which the rows are closed.

    Returns:
        The segment. Its training rows have token counts but no pieces. Equal arguments give equal segments on every
        machine.

    Raises:
        UserError: The settings allow no plan, or leave no documents for training or for evaluation.
    """
    _check(documents, settings, remainder)
    planning = _Planning(documents, settings, remainder, take_pieces)
    evaluation, num_held, num_without = planning.evaluation()
    evaluation = _with_validation(evaluation, documents, settings)
    train, epochs = planning.train()
    branch = remainder.branch if remainder else None
    if not train.num_rows:
        if branch is not None and branch.skipped is not None:
            way = f"end it there (run.stop_step={branch.step}), or " if branch.step else ""
            raise UserError(
                f"rows {branch.skipped[0]} to {branch.skipped[1] - 1} can't be left out: no other rows are left to "
                f"train on after step {branch.step}; {way}branch the run (train --branch) and increase data.epochs"
            )
        if planning.unlabelled_rows:
            raise UserError(
                f"data: none of the {planning.unlabelled_rows} planned rows has a label (data.overlong="
                f"{settings.overlong}, data.context_tokens={settings.context_tokens}); if the labels are at the end of "
                "documents, set data.overlong=split or increase data.context_tokens"
            )
        raise UserError(
            f"data: none of the {documents.lengths.size} documents is left for training ({num_held} are held out by "
            f"data.eval_fraction={settings.eval_fraction}, {num_without} have fewer than 2 tokens); decrease "
            "data.eval_fraction, add documents to the corpus, or increase data.epochs"
        )
    planned_stage = None if stage is None else _planned_stage(stage, branch.step if branch else 0, train, settings)
    fragments, waiting = (
        (remainder.fragments, remainder.waiting) if remainder else (Fragments.empty(), Fragments.empty())
    )
    totals = planning.totals(train.stats(0, train.num_rows), num_held, num_without)
    checksums = Checksums(
        rows=checksums_of(block.stored() for block in train.stats_blocks()),
        pieces=planning.checksums.text(),
        evaluation_rows=checksums_of(block.stored() for block in evaluation.stats_blocks()),
        evaluation_pieces=checksums_of([evaluation.closed_pieces().stored()]),
        fragments=checksums_of([fragment_columns(fragments, waiting)]),
    )
    return Segment(
        settings=settings,
        sources=documents.sources,
        branch=branch,
        stage=planned_stage,
        epochs=epochs,
        fragments=fragments,
        waiting=waiting,
        totals=totals,
        checksums=checksums,
        train=train,
        evaluation=evaluation,
        validation=documents.validation_sources,
        source_tokens=tuple(planning.source_tokens),
    )


def _with_validation(held_out: Rows, documents: PlanInput, settings: PlanSettings) -> Rows:
    """Append up to ``eval_rows`` rows of each validation corpus to the rows of held-out documents.

    A corpus's rows depend only on the corpus and the settings, whatever the run trains on.
    """
    first = int(first_documents(documents.sources)[-1])
    stats, pieces = [held_out.stats(0, held_out.num_rows)], [held_out.closed_pieces()]
    for one in documents.validation:
        try:
            if not (one.lengths >= 2).any():
                raise UserError("no document has two tokens")
            rows, _, _ = _Planning(one, replace(settings, eval_fraction=1.0), None, None).evaluation()
            if not rows.num_rows:
                raise UserError("no document has a label")
        except UserError as error:
            path = one.sources[0].path
            raise UserError(f"data.validation={path}: {error}; remove the corpus, or change it") from error
        found = rows.closed_pieces()
        stats.append(rows.stats(0, rows.num_rows))
        pieces.append(replace(found, document=found.document + first))
        first += one.lengths.size
    return Rows(entries=_with_first_pieces(RowStats.join(stats), 0), all_pieces=Pieces.join(pieces))


class _Planning:
    def __init__(
        self,
        documents: PlanInput,
        settings: PlanSettings,
        remainder: Remainder | None,
        take_pieces: Callable[[Pieces], None] | None,
    ) -> None:
        self._documents, self._settings, self._remainder = documents, settings, remainder
        self._take_pieces = take_pieces
        self._lengths = lengths = np.ascontiguousarray(documents.lengths, dtype=np.uint32)
        self._bases = first_documents(documents.sources)
        assert int(self._bases[-1]) == lengths.size, "the sources' documents and the lengths differ in number"
        self._counts = [source.num_documents if source.is_used else 0 for source in documents.sources]
        self._counters = np.zeros(len(COUNTERS), dtype=np.int64)
        self.unlabelled_rows = 0
        self.checksums = GroupChecksums()
        self.source_tokens: list[tuple[int, ...]] = []
        # Number of times that each document was taken so far; None without weights.
        self._uses: NDArray[np.uint32] | None = None
        if any(source.weight for source in documents.sources):
            self._uses = remainder.uses.copy() if remainder else np.zeros(lengths.size, dtype=np.uint32)

    def train(self) -> tuple[Rows, tuple[EpochInfo, ...]]:
        settings, remainder = self._settings, self._remainder
        first_epoch = remainder.branch.epoch if remainder else 0
        parts: list[RowStats] = []
        infos: list[EpochInfo] = []
        num_rows = num_pieces = 0
        for epoch in range(first_epoch, settings.epochs):
            begun = remainder if epoch == first_epoch else None
            drawing, fragments = self._epoch_drawing(epoch, begun)
            seeds = (settings.seed, epoch, _DOCUMENT_STREAM)
            blocks = drawing.pieces(self._counts, seeds, fragments, self._counters)
            packed = _with_first_pieces(RowStats.join(list(self._train_rows(blocks))), num_pieces)
            parts.append(packed.take(self._order(packed, epoch, num_rows)))
            infos.append(EpochInfo(epoch=epoch, first_row=num_rows, num_rows=packed.size))
            num_rows += packed.size
            num_pieces += int(packed.num_pieces.sum(dtype=np.int64))
        return Rows(entries=RowStats.join(parts), all_pieces=None), tuple(infos)

    def evaluation(self) -> tuple[Rows, int, int]:
        """Return the evaluation rows, and how many documents are held out and how many have no target."""
        settings = self._settings
        drawing = Drawing(self._lengths, self._bases, settings)
        num_held, num_without, num_usable = drawing.count_documents()
        if settings.eval_fraction > 0 and settings.eval_rows > 0 and num_usable == 0:
            raise UserError(
                f"data.eval_fraction={settings.eval_fraction}: none of the {self._lengths.size} documents is held out; "
                "use a larger fraction, 0 for no evaluation, or a corpus with more documents"
            )
        stats: list[RowStats] = []
        pieces: list[Pieces] = []
        num_left = settings.eval_rows if num_usable else 0
        ignored = np.zeros(len(COUNTERS), dtype=np.int64)
        seeds = (settings.seed, 0, _EVALUATION_STREAM)
        blocks = drawing.pieces(self._counts, seeds, Fragments.empty(), ignored, held_out=True)
        for closed, closed_rows, _ in self._packed(blocks) if num_left else ():
            stats.append(closed_rows.take(slice(0, num_left)))
            pieces.append(closed.take(slice(0, int(stats[-1].num_pieces.sum()))))
            num_left -= stats[-1].size
            if not num_left:
                break
        rows = _with_first_pieces(RowStats.join(stats), 0)
        return Rows(entries=rows, all_pieces=Pieces.join(pieces)), num_held, num_without

    def totals(self, stats: RowStats, num_held: int, num_without: int) -> Totals:
        counts = dict(zip(COUNTERS[:REFUSED], self._counters.tolist(), strict=False))
        tokens = int(stats.document_tokens.sum(dtype=np.int64))
        return Totals(
            num_documents=self._lengths.size,
            held_out_documents=num_held,
            skipped_documents=num_without,
            **counts,
            unlabelled_rows=self.unlabelled_rows,
            tokens=tokens,
            supervised=int(stats.supervised.sum(dtype=np.int64)),
            padding_tokens=int(stats.padded_tokens(self._settings.pad_multiple).sum()) - tokens,
        )

    def _epoch_drawing(self, epoch: int, begun: Remainder | None) -> tuple[Drawing, Fragments]:
        """Return a `Drawing` of the epoch's documents, and the fragments to draw together with the documents."""
        taken, planned, fragments, keeps = None, None, Fragments.empty(), False
        if begun is not None:
            # A document with a planned fragment is not taken again in full in the same epoch.
            fragments, keeps = begun.fragments, begun.keeps
            taken = begun.taken.copy()
            taken[fragments.document] = True
            planned = None if begun.planned is None else begun.planned & ~taken
        drawing = Drawing(self._lengths, self._bases, self._settings, taken)
        if self._uses is None:
            return drawing, fragments
        return self._chosen(drawing, epoch, fragments, planned, keeps=keeps), fragments

    def _chosen(
        self, drawing: Drawing, epoch: int, fragments: Fragments, planned: NDArray[np.bool_] | None, *, keeps: bool
    ) -> Drawing:
        """Choose an epoch's documents by the sources' weights, count the documents' uses, and return their `Drawing`.

        If a branch continues the epoch, ``planned`` [documents] marks the documents that the epoch planned but has not
        started. They are chosen if ``keeps`` is set, or if a weighted source has no tokens left, which ends the epoch.
        """
        assert self._uses is not None, "some source has a weight"
        sources = self._documents.sources
        weights = [source.weight or 0.0 for source in sources]
        resumed = drawing.fragment_tokens(fragments)
        available = [
            drawing.available_tokens(number) + resumed[number] if weight else 0 for number, weight in enumerate(weights)
        ]
        empty = [source for source, tokens in zip(sources, available, strict=True) if source.weight and not tokens]
        if empty and planned is None:
            raise UserError(
                f"data.sources: {empty[0].path} has weight {empty[0].weight} but no tokens left for epoch {epoch}; "
                "set its weight to 0, or add documents"
            )
        chosen = np.zeros(self._uses.size, dtype=np.bool_)
        if planned is not None and (empty or keeps):
            chosen |= planned
        else:
            total = sum(weights)
            length = min(tokens * total / weight for tokens, weight in zip(available, weights, strict=True) if weight)
            for number, weight in enumerate(weights):
                if weight:
                    drawing.choose(number, max(0, round(length * weight / total) - resumed[number]), self._uses, chosen)
        self._uses += chosen
        taken = drawing.among(chosen)
        tokens = (
            taken.available_tokens(number) + resumed[number] if weight else 0 for number, weight in enumerate(weights)
        )
        self.source_tokens.append(tuple(tokens))
        return taken

    def _packed(self, blocks: Iterator[Pieces]) -> Iterator[tuple[Pieces, RowStats, int]]:
        """Yield each block's closed rows with labels (pieces and token counts), and the number of unlabelled rows."""
        packer = Packer(self._settings.packing, self._settings.capacity)
        for block in blocks:
            yield self._labelled(*packer.add(block, is_last=False))
        yield self._labelled(*packer.add(Pieces.empty(), is_last=True))

    def _labelled(self, pieces: Pieces, sizes: Int64Array) -> tuple[Pieces, RowStats, int]:
        """Drop rows without labels, since a step with only such rows would have no loss."""
        rows = self._row_stats(pieces, sizes)
        has_label = rows.supervised > 0
        if has_label.all():
            return pieces, rows, 0
        return pieces.take(np.repeat(has_label, sizes)), rows.take(has_label), sizes.size - int(has_label.sum())

    def _train_rows(self, blocks: Iterator[Pieces]) -> Iterator[RowStats]:
        """Yield the token counts of the rows closed by each block, and pass their pieces to ``take_pieces``."""
        for pieces, rows, num_unlabelled in self._packed(blocks):
            self.unlabelled_rows += num_unlabelled
            if rows.size and self._take_pieces is not None:
                self._take_pieces(pieces)
            self.checksums.add(pieces.stored())
            yield rows

    def _row_stats(self, pieces: Pieces, sizes: Int64Array) -> RowStats:
        if not sizes.size:
            return RowStats.empty()
        starts = np.cumsum(sizes) - sizes
        labels = pieces.length - ~pieces.has_next
        if self._documents.spans is not None:
            first = pieces.start + 1
            labels = self._documents.spans.count(pieces.document, first, first + labels)
        return RowStats(
            # Filled in once all rows are known; the broadcast array takes no memory.
            first_piece=np.broadcast_to(np.int64(0), sizes.shape),
            num_pieces=sizes.astype(np.int32),
            document_tokens=np.add.reduceat(pieces.length, starts).astype(np.int32),
            supervised=np.add.reduceat(labels, starts).astype(np.int32),
            sum_squares=np.add.reduceat(pieces.length * pieces.length, starts),
        )

    def _order(self, rows: RowStats, epoch: int, first_row: int) -> Int64Array:
        # Rows are shuffled because the closing order depends on their fill and keeps a document's pieces together.
        settings = self._settings
        order = Permutation.seeded(rows.size, settings.seed, epoch, _ROW_STREAM).elements(0, rows.size)
        if settings.balance_steps > 1:
            costs = rows.cost(settings.token_cost)[order]
            order = order[balance_windows(costs, settings.rows_per_step, settings.balance_steps, first_row)]
        if settings.row_order == "costliest":
            # The other rows keep their order, since losses of steps sorted by cost are not comparable.
            first = np.argsort(-rows.cost(settings.token_cost), kind="stable")[: settings.rows_per_step]
            order = np.concatenate([first, order[~np.isin(order, first)]])
        return order


def _planned_stage(part: StagePart, base_step: int, train: Rows, settings: PlanSettings) -> PlannedStage:
    """Return the stage with its end step; raise UserError if its data end earlier or its length is already reached."""
    length, name = part.length, f"stages.{part.length.number}"
    num_steps = steps = -(-train.num_rows // settings.rows_per_step)
    if length.steps is not None:
        name, steps = f"{name}.steps={length.steps}", length.steps - part.steps_done
    elif length.tokens is not None:
        tokens = train.stats(0, train.num_rows).document_tokens
        ends = np.cumsum(np.add.reduceat(tokens, np.arange(0, tokens.size, settings.rows_per_step), dtype=np.int64))
        name, left = f"{name}.tokens={length.tokens}", length.tokens - part.tokens_done
        steps = int(np.searchsorted(ends, left)) + 1 if left > 0 else 0
    if steps > num_steps:
        raise UserError(
            f"{name}: the stage runs out of data after {part.steps_done + num_steps} steps; shorten the stage, add "
            "documents, or increase data.epochs"
        )
    if steps < 1:
        raise UserError(f"{name}: the stage has already trained {part.steps_done} steps; increase this length")
    return PlannedStage(length=length, end_step=base_step + steps)


def _with_first_pieces(rows: RowStats, num_pieces: int) -> RowStats:
    """Set ``first_piece`` for rows whose pieces are preceded by ``num_pieces`` others."""
    first_piece = np.cumsum(rows.num_pieces, dtype=np.int64)
    first_piece -= rows.num_pieces
    first_piece += num_pieces
    return replace(rows, first_piece=first_piece)


def _check(documents: PlanInput, settings: PlanSettings, remainder: Remainder | None) -> None:
    if remainder is not None and remainder.branch.epoch >= settings.epochs:
        epoch = remainder.branch.epoch + 1
        raise UserError(f"data.epochs={settings.epochs}: the run is already in epoch {epoch}; use at least {epoch}")
    if settings.capacity < 1:
        raise UserError(
            f"data.context_tokens={settings.context_tokens}: is less than pad_multiple={settings.pad_multiple}, and "
            f"every row's length is a multiple of pad_multiple; use at least {settings.pad_multiple}"
        )
    if settings.capacity > _MAX_CAPACITY:
        raise UserError(f"data.context_tokens={settings.context_tokens}: is too large; use at most {_MAX_CAPACITY}")
    num_documents = documents.lengths.size
    if num_documents > _MAX_DOCUMENTS:
        raise UserError(
            f"data: the sources have {num_documents} documents, but a plan is limited to {_MAX_DOCUMENTS}; use fewer"
        )
