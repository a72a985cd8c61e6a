"""Tables of the documents in packed rows, built on the host once per batch.

All layers share them, so attention needs no gather of positions and no host synchronization.

With a ring of R ranks, a row is divided into 2 R chunks, and ring rank ``r`` holds chunks ``r`` and ``2 R - 1 - r``
concatenated (zigzag, which gives every rank the same share of a causal row's work).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, product
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
    """Queries of this ring rank against keys that all precede them in the same document.

    Tokens are indexed within each ring rank's tokens, rows concatenated.
    """

    step: int
    """Ring step at which this rank holds the keys; 0 for its own."""
    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    distance: int
    """Position of the first query minus position of the first key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """The spans and rectangles that make up attention over one ring rank's tokens."""

    spans: Spans
    """Ranges with causal attention; they cover all tokens."""
    borders: torch.Tensor
    """int64 ``[num_spans + 1]`` on the host: ``spans.borders`` as a tensor, for custom operators."""
    rectangles: torch.Tensor
    """int64 ``[n, 6]`` on the host: the fields of each :class:`Rectangle`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedDocuments:
    """The documents of ``B`` rows of ``row_tokens`` tokens each, for one ring rank."""

    row_tokens: int
    """Length of every row in tokens, including padding."""
    lengths: tuple[tuple[int, ...], ...]
    """Per row, the lengths of its documents in order, without padding."""
    full: Tables
    """Tables for full attention. Two chunks of one document form one span, since every key of the earlier chunk
    precedes every query of the later one."""
    windowed: Tables
    """Tables for sliding windows. Distances matter, so spans end at the end of a chunk."""
    max_position: int
    """Largest position id of a document token, for length-dependent RoPE."""

    @property
    def num_rows(self) -> int:
        """Number of rows, the batch size."""
        return len(self.lengths)

    @property
    def num_document_tokens(self) -> int:
        """Largest number of tokens in a row, without padding."""
        return max(sum(row) for row in self.lengths)


def pack_documents(
    lengths: Sequence[Sequence[int]],
    row_tokens: int,
    device: torch.device | str = "cpu",
    *,
    ring_size: int = 1,
    ring_rank: int = 0,
) -> PackedDocuments:
    """Build the tables of a batch on the host.

    Args:
        lengths: Per row, the lengths of its documents in tokens, in order. The rest of the row is padding, which
            attends to itself, so that every token is in a span.
        row_tokens: Length of every row in tokens; with a ring, a multiple of ``2 * ring_size``.
        device: Device of ``cu_seqlens``.
        ring_size: Number of ranks of the ring.
        ring_rank: This process's rank in the ring.

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


def local_span_tables(documents: PackedDocuments, local_span: int, *, ring_size: int = 1, ring_rank: int = 0) -> Tables:
    """Build the tables of layers with causal attention within local spans of each document, on the host.

    A document's first span starts at its first token.
    """
    spans = [
        (row, first, min(first + local_span, end))
        for row, start, end in _global_spans(documents.lengths, documents.row_tokens)
        for first in range(start, end, local_span)
    ]
    device = documents.full.spans.cu_seqlens.device
    return _tables(spans, documents.row_tokens, ring_size, ring_rank, device, windowed=False)


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
        # The parts in both chunks are adjacent on this rank: one span, unless distances matter and the row has a gap.
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
            cu_seqlens=on_device(torch.tensor(borders, dtype=torch.int32, device="cpu"), device),
            borders=borders,
            max_seqlen=max(stop - first for first, stop in local),
        ),
        borders=torch.tensor(borders, dtype=torch.int64),
        rectangles=torch.tensor(rectangles, dtype=torch.int64).view(-1, len(Rectangle._fields)),
    )


def on_device(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a host tensor to a device without waiting for work that is queued on a GPU."""
    if torch.device(device).type != "cuda":
        return host.to(device)
    # The caching host allocator keeps the pinned memory until the copy has ended.
    return host.pin_memory().to(device, non_blocking=True)


def _chunks_of(rank: int, ring_size: int, row_tokens: int) -> list[tuple[int, int, int]]:
    """Return ``(place, low, high)`` of each chunk of a ring rank: its start on the rank, and its range of the row."""
    if ring_size == 1:
        return [(0, 0, row_tokens)]
    assert row_tokens % (2 * ring_size) == 0
    size = row_tokens // (2 * ring_size)
    return [
        (place * size, chunk * size, (chunk + 1) * size) for place, chunk in enumerate(zigzag_chunks(rank, ring_size))
    ]


def _rectangles(spans: Sequence[Span], row_tokens: int, ring_size: int, rank: int, *, own: bool) -> Iterable[Rectangle]:
    """Yield the rectangles of each ring step; two chunks that are not adjacent share at most one document of a row."""
    ring_tokens = row_tokens // ring_size
    mine = _chunks_of(rank, ring_size, row_tokens)
    for step in range(0 if own else 1, ring_size):
        theirs = _chunks_of((rank - step) % ring_size, ring_size, row_tokens)
        for (query_place, query_low, query_high), (key_place, key_low, key_high) in product(mine, theirs):
            # This rank's own chunks are already one span if they are adjacent.
            if key_high > query_low or (step == 0 and key_high == query_low):
                continue
            # Documents that start before the keys end and end after the queries begin.
            for row, start, end in (span for span in spans if span[1] < key_high and span[2] > query_low):
                key_first = max(start, key_low)
                base = row * ring_tokens
                yield Rectangle(
                    step,
                    base + query_place,
                    base + query_place + min(end, query_high) - query_low,
                    base + key_place + key_first - key_low,
                    base + key_place + key_high - key_low,
                    query_low - key_first,
                )
