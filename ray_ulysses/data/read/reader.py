"""Reads a rank's slice of a row: tokens, labels shifted within each document, and positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.plan.corpus_set import CorpusSet, PlannedSource, first_documents
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.data.read.masking import Masking, document_key
from ray_ulysses.parallel.layout import held_ranges, row_multiple

IGNORE_INDEX = -100
FILLER_ROW = -1
PADDING_TOKEN = 0
Split = Literal["train", "evaluation"]
PieceMask = Callable[[Piece, NDArray[np.integer], NDArray[np.bool_]], tuple[NDArray[np.int64], NDArray[np.bool_]]]
"""Returns a piece's input ids, and which tokens are predicted, given its tokens and which of them may be."""


class TokenStore(Protocol):
    """A source of tokens, such as a ``Corpus``."""

    def read(self, document: int, start: int, length: int) -> NDArray[np.integer]:
        """Return ``length`` tokens of a document, starting at token ``start``, in any integer dtype that fits them."""
        ...

    def fetch(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Fetch token ranges ``(document, start, length)`` concurrently, so that later reads return immediately."""
        ...

    @property
    def has_weights(self) -> bool:
        """Whether any token has a loss weight other than 1."""
        ...

    def label_weights(self, document: int, first: int, last: int) -> NDArray[np.float32] | None:
        """Return the loss weight of each label among tokens ``[first, last)`` of a document, or None if all are 1.

        The weight is 0 where a token may not be a label.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowSlice:
    """One rank's part of a row: one contiguous range of tokens, or two ranges with ring attention."""

    row: int
    """Global number of the row, or -1 for a zero-weight filler row."""
    sp_rank: int
    sp_size: int
    ring_size: int = 1
    row_tokens: int
    """Length of the complete row in tokens, including padding."""
    document_lengths: tuple[int, ...]
    """Lengths of all texts in the complete row, in order, without padding: pieces, or answers of pairs."""
    input_ids: NDArray[np.int64]
    """Token ids, [row_tokens // sp_size]. Padding is token 0."""
    labels: NDArray[np.int64]
    """Label of each input token: the document's next token, or -100 if it does not exist or may not be a label. With
    masks, the token itself, or -100 if it is not predicted."""
    position_ids: NDArray[np.int64]
    """Position of each input token, counted from 0 in each piece and in the padding."""
    label_weights: NDArray[np.float32] | None = None
    """Loss weight of each input token's label, or 1 if it has no label. None if and only if no corpus has loss
    weights."""
    num_planned: int | None = None
    """With masks, number of the slice's tokens that a decoder would learn, which the plan counts; None without."""

    @property
    def is_filler(self) -> bool:
        """Whether the slice belongs to a zero-weight row that only fills a micro-batch."""
        return self.row == FILLER_ROW

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Token ranges ``(start, stop)`` of the row that are in this slice, in slice order."""
        return held_ranges(self.row_tokens, self.sp_rank, self.sp_size, self.ring_size)

    @property
    def is_masked(self) -> bool:
        """Whether labels are masked tokens."""
        return self.num_planned is not None

    @property
    def num_supervised(self) -> int:
        """Number of this slice's labels in the plan: without masks, of `labels`."""
        return int((self.labels != IGNORE_INDEX).sum()) if self.num_planned is None else self.num_planned

    @property
    def supervised_weight(self) -> float:
        """Sum of the label weights in this slice, or the number of labels without weights."""
        if self.label_weights is None:
            return float((self.labels != IGNORE_INDEX).sum())
        return float(self.label_weights[self.labels != IGNORE_INDEX].sum(dtype=np.float64))


def slice_row(
    store: TokenStore,
    row: int,
    row_tokens: int,
    pieces: Sequence[Piece],
    sp_rank: int,
    sp_size: int,
    ring_size: int = 1,
    mask: PieceMask | None = None,
) -> RowSlice:
    """Read slice ``sp_rank`` of ``sp_size`` of a row.

    Only the tokens of this slice are read or, with ``mask``, the pieces of which the slice has a part.
    ``row_tokens`` is the padded length of the row, a multiple of ``row_multiple(sp_size, ring_size)``.
    """
    multiple = row_multiple(sp_size, ring_size)
    if row_tokens % multiple:
        ring = f" with parallel.ring_size={ring_size}" if ring_size > 1 else ""
        raise ValueError(
            f"row {row} has {row_tokens} tokens, which is not a multiple of {multiple}, as required by "
            f"parallel.sp_size={sp_size}{ring}"
        )
    length = sum(piece.length for piece in pieces)
    assert length <= row_tokens, f"row {row} holds {length} tokens, more than its {row_tokens}"
    size = row_tokens // sp_size
    input_ids = np.full(size, PADDING_TOKEN, dtype=np.int64)
    labels = np.full(size, IGNORE_INDEX, dtype=np.int64)
    position_ids = np.empty(size, dtype=np.int64)
    label_weights = np.ones(size, dtype=np.float32) if store.has_weights else None
    store.fetch(slice_ranges(pieces, row_tokens, sp_rank, sp_size, ring_size, are_whole=mask is not None))
    place = num_planned = 0
    for first, last in held_ranges(row_tokens, sp_rank, sp_size, ring_size):
        for piece, inside, count, at in _held_parts(pieces, first, last):
            target = slice(place + at, place + at + count)
            position_ids[target] = np.arange(inside, inside + count)
            if mask is not None:
                part = slice(inside, inside + count)
                tokens = store.read(piece.document, piece.start, piece.num_labels + 1)
                weights = store.label_weights(piece.document, piece.start, piece.start + piece.num_labels + 1)
                is_allowed = np.ones(piece.num_labels + 1, dtype=np.bool_) if weights is None else weights > 0
                ids, is_label = mask(piece, tokens[: piece.length], is_allowed[: piece.length])
                input_ids[target] = ids[part]
                labels[target] = np.where(is_label[part], tokens[: piece.length][part], np.int64(IGNORE_INDEX))
                num_planned += int(is_allowed[1 : piece.num_labels + 1][part].sum())
                if label_weights is not None and weights is not None:
                    own_weights = weights[: piece.length][part]
                    label_weights[target] = np.where(labels[target] == IGNORE_INDEX, np.float32(1), own_weights)
                continue
            num_labels = min(count, piece.num_labels - inside)
            tokens = store.read(piece.document, piece.start + inside, max(count, num_labels + 1))
            input_ids[target] = tokens[:count]
            if num_labels > 0:
                labeled = slice(target.start, target.start + num_labels)
                first_label = piece.start + inside + 1
                weights = store.label_weights(piece.document, first_label, first_label + num_labels)
                may_be = True if weights is None else weights > 0
                labels[labeled] = np.where(may_be, tokens[1 : num_labels + 1], np.int64(IGNORE_INDEX))
                if label_weights is not None and weights is not None:
                    label_weights[labeled] = np.where(may_be, weights, np.float32(1))
        padding = max(first, length)
        if padding < last:
            position_ids[place + padding - first : place + last - first] = np.arange(padding - length, last - length)
        place += last - first
    return RowSlice(
        row=row,
        sp_rank=sp_rank,
        sp_size=sp_size,
        ring_size=ring_size,
        row_tokens=row_tokens,
        document_lengths=tuple(piece.length for piece in pieces),
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
        label_weights=label_weights,
        num_planned=None if mask is None else num_planned,
    )


def slice_ranges(
    pieces: Sequence[Piece],
    row_tokens: int,
    sp_rank: int,
    sp_size: int,
    ring_size: int = 1,
    *,
    are_whole: bool = False,
) -> list[tuple[int, int, int]]:
    """Return the ranges that ``slice_row`` reads, in order: document, first token, and number of tokens.

    ``are_whole`` selects complete pieces, which masks need.
    """
    return [
        (piece.document, piece.start, piece.num_labels + 1)
        if are_whole
        else (piece.document, piece.start + inside, max(count, min(count, piece.num_labels - inside) + 1))
        for first, last in held_ranges(row_tokens, sp_rank, sp_size, ring_size)
        for piece, inside, count, _ in _held_parts(pieces, first, last)
    ]


def _held_parts(pieces: Sequence[Piece], first: int, last: int) -> Iterator[tuple[Piece, int, int, int]]:
    """Yield the parts of pieces that lie within tokens ``[first, last)`` of a row.

    Yields:
        The piece, the index of the part's first token in the piece, the number of tokens, and the part's offset in the
        range. Reading a part also requires the piece's next token, if any, as the label of the part's last token.
    """
    begin = 0
    for piece in pieces:
        low, high = max(first, begin), min(last, begin + piece.length)
        if low < high:
            yield piece, low - begin, high - low, low - first
        begin += piece.length


class RowReader:
    """Reads any slice of any row of a plan, in any order, with masks if the model is a masked language model."""

    def __init__(self, store: TokenStore, plan: Plan, masking: Masking | None = None) -> None:
        self._store, self._plan, self._masking = store, plan, masking
        sources = (*plan.newest.sources, *plan.newest.validation)
        self._fingerprints = [source.fingerprint for source in sources]
        self._firsts = first_documents(sources)

    @property
    def sources(self) -> tuple[PlannedSource, ...]:
        """Corpora of the store, which must be a `CorpusSet`."""
        assert isinstance(self._store, CorpusSet)
        return self._store.sources

    def read(self, split: Split, row: int, sp_rank: int, sp_size: int, ring_size: int = 1) -> RowSlice:
        """Return one slice of a row.

        Raises:
            UserError: A shard can't be read.
        """
        return self.slice_of(self._store, split, row, sp_rank, sp_size, ring_size)

    def slice_of(
        self, store: TokenStore, split: Split, row: int, sp_rank: int, sp_size: int, ring_size: int = 1
    ) -> RowSlice:
        """Return one slice of a row, whose tokens are read from ``store``. It needs only the tokens of `ranges`."""
        if split == "train":
            pieces, row_tokens = self.documents(row), self._plan.row_tokens(row)
        else:
            pieces = self._documents_of(self._plan.evaluation.pieces(row))
            stats = self._plan.evaluation.stats(row, row + 1)
            row_tokens = int(stats.padded_tokens(self._plan.settings.pad_multiple)[0])
        # Every evaluation has the same masks.
        mask = self._mask(self._plan.epoch_of(row) if split == "train" else 0)
        return slice_row(store, row, row_tokens, pieces, sp_rank, sp_size, ring_size, mask)

    def ranges(self, row: int, sp_rank: int, sp_size: int, ring_size: int = 1) -> list[tuple[int, int, int]]:
        """Return the ranges that `read` reads from a training row, in order; see `slice_ranges`."""
        pieces, row_tokens = self.documents(row), self._plan.row_tokens(row)
        return slice_ranges(pieces, row_tokens, sp_rank, sp_size, ring_size, are_whole=self._masking is not None)

    def _mask(self, epoch: int) -> PieceMask | None:
        return None if self._masking is None else partial(self._masked, self._masking, epoch)

    def _masked(
        self,
        masking: Masking,
        epoch: int,
        piece: Piece,
        tokens: NDArray[np.integer],
        may_predict: NDArray[np.bool_],
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        # Not the number in the run, which depends on the other corpora.
        source = int(np.searchsorted(self._firsts, piece.document, side="right")) - 1
        key = document_key(self._fingerprints[source], piece.document - int(self._firsts[source]))
        return masking.apply(tokens, document=key, epoch=epoch, first=piece.start, may_predict=may_predict)

    def documents(self, row: int) -> Sequence[Piece]:
        """Return the parts of a training row that attend to themselves alone, in order."""
        return self._documents_of(self._plan.pieces(row))

    def _documents_of(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        return self._store.documents_of(pieces) if isinstance(self._store, CorpusSet) else pieces

    def sum_squares(self, rows: range) -> int:
        """Return the sum of the squared lengths of all documents in training rows, which attention's cost follows."""
        if not any(source.are_pairs for source in self.sources):
            return int(self._plan.stats(rows).sum_squares.sum())
        return sum(piece.length**2 for row in rows for piece in self.documents(row))

    def filler(self, sp_rank: int, sp_size: int, ring_size: int = 1) -> RowSlice:
        """Return a slice of a filler row: only padding, of the minimum length, with zero weight in every sum."""
        pad_multiple = self._plan.settings.pad_multiple
        return slice_row(self._store, FILLER_ROW, pad_multiple, (), sp_rank, sp_size, ring_size, self._mask(0))
