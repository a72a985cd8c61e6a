from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.attention.documents import PackedDocuments, Rectangle, Tables, local_span_tables, pack_documents
from ray_ulysses.attention.kernels.reference import visible_tokens
from ray_ulysses.attention.ring import RingLayer, _blocks
from ray_ulysses.parallel.layout import held_ranges
from tests.breadth import examples


def layer_of(tables: Tables, window: int | None, causal: bool) -> RingLayer:
    return RingLayer(
        kernel="auto",
        scale=1.0,
        window=window,
        causal=causal,
        softcap=None,
        spans=tables.spans,
        rectangles=tuple(Rectangle(*fields) for fields in tables.rectangles.tolist()),
        calls=((slice(0, 1), slice(0, 1)),),
        ring=None,
    )


def seen_through_the_ring(
    documents: list[PackedDocuments], window: int | None, local_span: int | None = None, *, causal: bool = True
) -> torch.Tensor:
    """Return how often each query sees each key in the kernel calls of all ring ranks."""
    ring_size, rows, tokens = len(documents), documents[0].num_rows, documents[0].row_tokens
    places = []
    for rank in range(ring_size):
        held = [t for start, stop in held_ranges(tokens, rank, ring_size, ring_size) for t in range(start, stop)]
        places.append([row * tokens + token for row in range(rows) for token in held])
    seen = torch.zeros(rows * tokens, rows * tokens, dtype=torch.int64)
    for rank, packed in enumerate(documents):
        tables = packed.full if window is None else packed.windowed
        if local_span is not None:
            tables = local_span_tables(packed, local_span, ring_size=ring_size, ring_rank=rank)
        layer = layer_of(tables, window, causal)
        for step in range(ring_size):
            theirs = places[(rank - step) % ring_size]
            for block in _blocks(layer, step):
                queries, keys = places[rank][block.query], theirs[block.key]
                borders = (0, len(queries)) if block.spans is None else block.spans.borders
                for start, stop in pairwise(borders):
                    own = keys if block.spans is None else keys[start:stop]
                    shift = len(own) - (stop - start)
                    for i, query in enumerate(queries[start:stop]):
                        for j, key in enumerate(own):
                            late = causal and block.spans is not None and j > i + shift
                            late = late or (block.right is not None and j > i + shift + block.right)
                            early = block.left is not None and j < i + shift - block.left
                            seen[query, key] += not (late or early)
    return seen


Rows = list[list[int]]
ROWS = st.lists(st.lists(st.integers(1, 14), max_size=4), min_size=1, max_size=2)


def packed(rows: Rows, extra: int, ring_size: int) -> list[PackedDocuments]:
    """Return the documents of each ring rank, in rows with padding."""
    multiple = 2 * ring_size if ring_size > 1 else 1
    row_tokens = max(multiple, -(-(max(sum(row) for row in rows) + extra) // multiple) * multiple)
    return [pack_documents(rows, row_tokens, ring_size=ring_size, ring_rank=rank) for rank in range(ring_size)]


@settings(max_examples=examples(60))
@given(
    ring_size=st.integers(1, 4),
    rows=ROWS,
    extra=st.integers(0, 9),
    window=st.none() | st.integers(1, 20),
    causal=st.booleans(),
)
def test_the_kernel_calls_of_a_ring_see_each_visible_pair_once(
    ring_size: int, rows: Rows, extra: int, window: int | None, causal: bool
) -> None:
    documents = packed(rows, extra, ring_size)
    assert documents[0].lengths == tuple(map(tuple, rows))
    assert documents[0].num_document_tokens == max(map(sum, rows))
    visible = [visible_tokens(row, documents[0].row_tokens, window, causal=causal).long() for row in rows]
    assert torch.equal(seen_through_the_ring(documents, window, causal=causal), torch.block_diag(*visible))


@settings(max_examples=examples(60))
@given(ring_size=st.integers(1, 4), rows=ROWS, extra=st.integers(0, 9), local_span=st.integers(1, 20))
def test_local_spans_begin_with_their_document_on_every_ring(
    ring_size: int, rows: Rows, extra: int, local_span: int
) -> None:
    documents = packed(rows, extra, ring_size)
    wanted = []
    for row in rows:
        lengths = (*row, documents[0].row_tokens - sum(row))
        place_T = torch.cat([torch.arange(length) for length in lengths])
        document_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        is_seen_TT = (document_T[:, None] == document_T) & (place_T[:, None] // local_span == place_T // local_span)
        wanted.append((is_seen_TT & (place_T[:, None] >= place_T)).long())
    assert torch.equal(seen_through_the_ring(documents, None, local_span), torch.block_diag(*wanted))
