"""Tensors are read in parts within one stored interval, and in batches that fit a buffer."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.export.stream import ElementRange, batches, divide
from ray_ulysses.export.tensors import Stored

WIDE = Stored(key="fp32/a", shape=(1000,), dtype=torch.float32, published=torch.bfloat16)


@given(
    st.integers(0, 999),
    st.integers(0, 1000),
    st.sets(st.integers(1, 999), max_size=8),
    st.sampled_from([16, 64, 256, 8192]),
)
def test_a_range_is_divided_at_intervals_and_at_their_blocks(
    start: int, length: int, inner: set[int], most: int
) -> None:
    stop = min(start + length, 1000)
    borders = [0, *sorted(inner)]
    parts = list(divide(ElementRange(stored=WIDE, start=start, stop=stop), borders, most))
    reached = start
    for part in parts:
        assert part.start == reached < part.stop
        assert part.stored_bytes <= most
        begin = max(border for border in borders if border <= part.start)
        assert all(not part.start < border < part.stop for border in borders)
        assert part.start == start or (part.start - begin) * 4 % most == 0
        reached = part.stop
    assert reached == max(start, stop)


@given(st.lists(st.integers(1, 50), max_size=40))
def test_batches_keep_the_order_and_fit_a_buffer(lengths: list[int]) -> None:
    parts = [ElementRange(stored=WIDE, start=0, stop=length) for length in lengths]
    found = list(batches(parts, 1024))
    assert [part for batch in found for part in batch] == parts
    assert all(batch for batch in found)
    for batch in found:
        # Parts are aligned to 64 bytes.
        assert sum(-(-part.stored_bytes // 64) * 64 for part in batch) <= 1024
