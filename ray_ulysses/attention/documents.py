"""Document tables of packed rows, built on the host once per batch.

All layers share the tables, so attention neither gathers positions nor synchronizes with the host.

With a ring of R ranks, a row is divided into 2 R chunks, and ring rank ``r`` processes the concatenation of chunks
``r`` and ``2 R - 1 - r`` (zigzag sharding, which balances causal attention across ranks).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

import torch

from ray_ulysses.attention.kernels.call import Spans
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.layout import zigzag_chunks

Span = tuple[int, int, int]
"""A range of tokens in a row: ``(row, start, end)``."""


class Rectangle(NamedTuple):
    """A block of this ring rank's queries and of earlier or later keys in the same document. It needs no mask.

    Indices refer to a ring rank's tokens, with all rows concatenated.
    """

    step: int
    """Ring step in which this rank has the keys; 0 for the rank's own keys."""
    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    distance: int
    """Document position of the first query minus document position of the first key; negative for later keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """Spans and rectangles that together cover attention for one ring rank's queries."""

    spans: Spans
    """Token ranges with attention among themselves, which together cover all tokens."""
    borders: torch.Tensor
    """``spans.borders`` as a tensor for custom operators, int64 ``[num_spans + 1]`` on the host."""
    rectangles: torch.Tensor
    """Rectangles as an int64 tensor ``[n, 6]`` on the host, with one :class:`Rectangle` per row of the tensor. Causal
    attention skips the rectangles of later keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedDocuments:
    """The documents packed into ``B`` rows, and their tables for one ring rank."""

    row_tokens: int
    """Length of every row in tokens, including padding."""
    lengths: tuple[tuple[int, ...], ...]
    """Lengths in tokens of each row's documents, in order, without padding."""
    full: Tables
    """Tables for full attention. A document's tokens in both chunks form one span, because every key in the earlier
    chunk precedes every query in the later chunk."""
    windowed: Tables
    """Tables for sliding windows. Windows are defined by distances, so spans never cross gaps between chunks."""
    max_position: int
    """Largest document position in the batch, used by length-dependent RoPE."""

    @property
    def num_rows(self) -> int:
        """Number of rows in the batch."""
        return len(self.lengths)

    @property
    def num_document_tokens(self) -> int:
        """Largest number of document tokens in a row."""
        return max(sum(row) for row in self.lengths)


def pack_documents(
    lengths: Sequence[Sequence[int]],
    row_tokens: int,
    device: torch.device | str = "cpu",
    *,
    ring_size: int = 1,
    ring_rank: int = 0,
) -> PackedDocuments:
    """Build the document tables of a batch.

    Args:
        lengths: Lengths in tokens of each row's documents, in order. The remainder of a row is padding, which is
            treated as one more document, so that every token belongs to a span.
        row_tokens: Length of every row in tokens. With a ring, it must be a multiple of ``2 * ring_size``.
        device: Device for ``cu_seqlens``. All other tables stay on the host.
        ring_size: Number of ranks in the ring.
        ring_rank: This process's rank in the ring.

    Raises:
        UserError: A length is not positive, or a row's documents do not fit into the row.
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
    """Build the document tables for chunked attention, which is causal within spans of ``local_span`` tokens.

    A document's first span starts at the document's first token.
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
                raise UserError(f"document_lengths[{row}] contains {length}; every length must be at least 1")
            spans.append((row, start, start + length))
            start += length
        if start > row_tokens:
            raise UserError(
                f"document_lengths[{row}] sums to {start}, but the row has only {row_tokens} tokens; shorten or drop "
                "documents"
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
        # A document's parts in the two chunks are adjacent on this rank, so they form one span. With a window they do
        # so only if the chunks are adjacent in the row too.
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
    """Copy a host tensor to a device without waiting for work queued on the GPU."""
    if torch.device(device).type != "cuda":
        return host.to(device)
    # The caching host allocator does not reuse the pinned memory until the copy has finished.
    return host.pin_memory().to(device, non_blocking=True)


def _chunks_of(rank: int, ring_size: int, row_tokens: int) -> list[tuple[int, int, int]]:
    """Return ``(offset, low, high)`` for each of a ring rank's chunks: offset on the rank, and range in the row."""
    if ring_size == 1:
        return [(0, 0, row_tokens)]
    assert row_tokens % (2 * ring_size) == 0
    size = row_tokens // (2 * ring_size)
    return [
        (place * size, chunk * size, (chunk + 1) * size) for place, chunk in enumerate(zigzag_chunks(rank, ring_size))
    ]


def _rectangles(spans: Sequence[Span], row_tokens: int, ring_size: int, rank: int, *, own: bool) -> Iterable[Rectangle]:
    """Yield the rectangles of all ring steps, including step 0 (this rank's own keys) if ``own`` is set."""
    ring_tokens = row_tokens // ring_size
    mine = _chunks_of(rank, ring_size, row_tokens)
    for step in range(0 if own else 1, ring_size):
        theirs = _chunks_of((rank - step) % ring_size, ring_size, row_tokens)
        for (query_place, query_low, query_high), (key_place, key_low, key_high) in product(mine, theirs):
            # A span covers a chunk's own keys, and this rank's own chunks if they are adjacent in the row.
            if step == 0 and max(query_low, key_low) <= min(query_high, key_high):
                continue
            # Only documents that start before the earlier chunk ends and end after the later chunk starts have both.
            first_end, last_start = min(query_high, key_high), max(query_low, key_low)
            for row, start, end in (span for span in spans if span[1] < first_end and span[2] > last_start):
                query_first, key_first = max(start, query_low), max(start, key_low)
                base = row * ring_tokens
                yield Rectangle(
                    step,
                    base + query_place + query_first - query_low,
                    base + query_place + min(end, query_high) - query_low,
                    base + key_place + key_first - key_low,
                    base + key_place + min(end, key_high) - key_low,
                    query_first - key_first,
                )
