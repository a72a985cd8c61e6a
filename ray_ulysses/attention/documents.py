"""Where documents begin and end in packed rows: tables made once a step on the host and handed down.

A layer never derives them again, so attention needs no gather of positions and no host synchronisation.

Under a ring of R, a row is cut into 2 R chunks of which ring rank ``r`` holds chunk ``r`` and chunk ``2 R - 1 - r``
(zigzag: every rank then has the same share of a causal row's work), laid end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from ray_ulysses.attention.kernels.call import Spans
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.layout import zigzag_chunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Span = tuple[int, int, int]
"""``(row, start, end)``."""


class Rectangle(NamedTuple):
    """Queries of this ring rank against keys that all come before them in the same document.

    Tokens are counted in the ring ranks' own tokens, rows end to end.

    Attributes:
        step: Ring step at which the keys are here: 0 for the own ones.
        query_start: First query.
        query_stop: The query after the last.
        key_start: First key.
        key_stop: The key after the last.
        distance: Position of the first query minus that of the first key.
    """

    step: int
    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    distance: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """What attention over one ring rank's tokens is made of.

    Attributes:
        spans: Stretches that are causal inside themselves; they cover all tokens.
        borders: int64 ``[num_spans + 1]`` on the host: ``spans.borders`` as custom operators take it.
        rectangles: int64 ``[n, 6]`` on the host: the fields of each :class:`Rectangle`.
    """

    spans: Spans
    borders: torch.Tensor
    rectangles: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedDocuments:
    """The documents of ``B`` rows of ``row_tokens`` tokens each, as one ring rank sees them.

    Attributes:
        row_tokens: Length of every row in tokens, padding included.
        lengths: Per row, the lengths of its documents in order, without padding.
        full: Tables of a layer that sees its whole document. Two chunks of one document are one stretch there, since
            every key of the earlier chunk comes before every query of the later one.
        windowed: Tables of a layer with a sliding window, where distances count: stretches end at a chunk's end.
        max_position: Largest position id of a document token; what length-dependent RoPE must see.
    """

    row_tokens: int
    lengths: tuple[tuple[int, ...], ...]
    full: Tables
    windowed: Tables
    max_position: int

    @property
    def num_rows(self) -> int:
        """Number of rows, the batch size."""
        return len(self.lengths)

    @property
    def num_document_tokens(self) -> int:
        """Tokens of the fullest row without its padding."""
        return max(sum(row) for row in self.lengths)


def pack_documents(
    lengths: Sequence[Sequence[int]],
    row_tokens: int,
    device: torch.device | str = "cpu",
    *,
    ring_size: int = 1,
    ring_rank: int = 0,
) -> PackedDocuments:
    """Make the tables of a batch on the host.

    Args:
        lengths: Per row, its documents' lengths in tokens, in order; what is left of the row is padding, which attends
            to itself, so that no token is outside every stretch.
        row_tokens: Length of every row in tokens; a multiple of ``2 * ring_size`` where there is a ring.
        device: Where ``cu_seqlens`` goes.
        ring_size: Ring degree.
        ring_rank: This process's place on the ring.

    Raises:
        UserError: A length is not positive, or a row's documents are longer than the row.
    """
    spans = _global_spans(lengths, row_tokens)
    full = windowed = _tables(spans, row_tokens, ring_size, ring_rank, device, windowed=False)
    if ring_size > 1:
        windowed = _tables(spans, row_tokens, ring_size, ring_rank, device, windowed=True)
    return PackedDocuments(
        row_tokens=row_tokens,
        lengths=tuple(tuple(row) for row in lengths),
        full=full,
        windowed=windowed,
        max_position=max((length - 1 for row in lengths for length in row), default=0),
    )


def _global_spans(lengths: Sequence[Sequence[int]], row_tokens: int) -> list[Span]:
    spans: list[Span] = []
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            if length < 1:
                raise UserError(f"document_lengths[{row}] holds {length}; every document has at least 1 token")
            spans.append((row, start, start + length))
            start += length
        if start > row_tokens:
            raise UserError(
                f"document_lengths[{row}] sums to {start}, more than the row's {row_tokens} tokens; "
                "the lengths of a row's documents must sum to at most its length"
            )
        if start < row_tokens:
            spans.append((row, start, row_tokens))
    return spans


def _tables(
    spans: Sequence[Span], row_tokens: int, ring_size: int, rank: int, device: torch.device | str, *, windowed: bool
) -> Tables:
    chunks = _chunks_of(rank, ring_size, row_tokens)
    ring_tokens = row_tokens // ring_size
    local: list[tuple[int, int]] = []
    for row, start, end in spans:
        parts = [
            (row * ring_tokens + place + max(start, low) - low, row * ring_tokens + place + min(end, high) - low, low)
            for place, low, high in chunks
            if max(start, low) < min(end, high)
        ]
        # Both chunks hold a part, which are neighbours here: one stretch unless distances count and have a gap.
        has_gap = len(parts) == 2 and parts[0][2] + row_tokens // (2 * ring_size) != parts[1][2]
        if len(parts) == 2 and not (windowed and has_gap):
            local.append((parts[0][0], parts[1][1]))
        else:
            local += [(first, stop) for first, stop, _ in parts]
    local.sort()
    borders = (0, *accumulate(stop - first for first, stop in local))
    assert borders[1:] == tuple(stop for _, stop in local)
    rectangles = list(_rectangles(spans, row_tokens, ring_size, rank, own=windowed)) if ring_size > 1 else []
    return Tables(
        spans=Spans(
            cu_seqlens=torch.tensor(borders, dtype=torch.int32, device=device),
            borders=borders,
            max_seqlen=max(stop - first for first, stop in local),
        ),
        borders=torch.tensor(borders, dtype=torch.int64),
        rectangles=torch.tensor(rectangles, dtype=torch.int64).view(-1, len(Rectangle._fields)),
    )


def _chunks_of(rank: int, ring_size: int, row_tokens: int) -> list[tuple[int, int, int]]:
    """Return ``(place, low, high)`` of each chunk of a ring rank: its place there and its tokens of the row."""
    if ring_size == 1:
        return [(0, 0, row_tokens)]
    assert row_tokens % (2 * ring_size) == 0
    size = row_tokens // (2 * ring_size)
    return [
        (place * size, chunk * size, (chunk + 1) * size) for place, chunk in enumerate(zigzag_chunks(rank, ring_size))
    ]


def _rectangles(spans: Iterable[Span], row_tokens: int, ring_size: int, rank: int, *, own: bool) -> Iterable[Rectangle]:
    """Yield what each ring step adds; two chunks that do not touch share one document at most."""
    ring_tokens = row_tokens // ring_size
    mine = _chunks_of(rank, ring_size, row_tokens)
    by_row: dict[int, list[Span]] = {}
    for span in spans:
        by_row.setdefault(span[0], []).append(span)
    for step in range(0 if own else 1, ring_size):
        theirs = _chunks_of((rank - step) % ring_size, ring_size, row_tokens)
        for query_place, query_low, query_high in mine:
            for key_place, key_low, key_high in theirs:
                # The own chunks, where they touch, are one stretch already.
                if key_high > query_low or (step == 0 and key_high == query_low):
                    continue
                for row, start, end in _crossing(by_row, key_high, query_low):
                    query_first, query_last = query_low, min(end, query_high)
                    key_first = max(start, key_low)
                    base = row * ring_tokens
                    yield Rectangle(
                        step,
                        base + query_place,
                        base + query_place + query_last - query_low,
                        base + key_place + key_first - key_low,
                        base + key_place + key_high - key_low,
                        query_first - key_first,
                    )


def _crossing(by_row: dict[int, list[Span]], key_high: int, query_low: int) -> Iterable[Span]:
    """Yield the document of each row that reaches from before ``key_high`` to beyond ``query_low``."""
    for row_spans in by_row.values():
        for span in row_spans:
            if span[1] < key_high and span[2] > query_low:
                yield span
