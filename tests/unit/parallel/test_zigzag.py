"""The ranges of a row on each rank, and the groups of Ulysses and ring ranks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.parallel.layout import ParallelLayout, automatic_ring_size, held_ranges, row_multiple

splits = st.tuples(st.integers(1, 7), st.integers(1, 7))


@given(split=splits, units=st.integers(1, 5))
def test_the_ranges_of_all_ranks_partition_the_row(split: tuple[int, int], units: int) -> None:
    ulysses_size, ring_size = split
    sp_size = ulysses_size * ring_size
    row_tokens = units * row_multiple(sp_size, ring_size)
    held = [held_ranges(row_tokens, rank, sp_size, ring_size) for rank in range(sp_size)]
    tokens = sorted(token for ranges in held for start, stop in ranges for token in range(start, stop))
    assert tokens == list(range(row_tokens))
    for ranges in held:
        assert sum(stop - start for start, stop in ranges) == row_tokens // sp_size
        assert 1 <= len(ranges) <= 2
        assert all(start < stop for start, stop in ranges)
        # In row order, with adjacent ranges merged.
        assert all(one[1] < other[0] for one, other in itertools.pairwise(ranges))


def test_a_rank_has_parts_of_an_early_and_a_late_chunk() -> None:
    assert [held_ranges(16, rank, 2, 2) for rank in range(2)] == [((0, 4), (12, 16)), ((4, 12),)]
    assert [held_ranges(24, rank, 6, 2) for rank in range(3)] == [((0, 4),), ((4, 6), (18, 20)), ((20, 24),)]


@given(split=splits, units=st.integers(1, 5))
def test_ring_ranks_have_equal_work_under_a_causal_mask(split: tuple[int, int], units: int) -> None:
    ulysses_size, ring_size = split
    sp_size = ulysses_size * ring_size
    row_tokens = units * row_multiple(sp_size, ring_size)
    work = [0] * ring_size
    for rank in range(sp_size):
        for start, stop in held_ranges(row_tokens, rank, sp_size, ring_size):
            # Token t attends to t + 1 tokens.
            work[rank // ulysses_size] += sum(range(start + 1, stop + 1))
    assert set(work) == {row_tokens * (row_tokens + 1) // 2 // ring_size}


@given(num_heads=st.integers(1, 48), sp_size=st.integers(1, 200))
def test_a_ring_is_chosen_only_beyond_the_heads_and_leaves_level_ranks(num_heads: int, sp_size: int) -> None:
    ring = automatic_ring_size(sp_size, num_heads)
    assert sp_size % ring == 0 and sp_size // ring <= num_heads
    if sp_size <= num_heads:
        assert ring == 1
        return
    level = [size for size in range(1, sp_size + 1) if sp_size % size == 0 and num_heads % (sp_size // size) == 0]
    assert ring == min(size for size in level if sp_size // size <= num_heads)


@given(split=splits, dp_size=st.integers(1, 4))
def test_ulysses_and_ring_groups_hold_every_rank_once_and_cross_in_one(split: tuple[int, int], dp_size: int) -> None:
    ulysses_size, ring_size = split
    sp_size = ulysses_size * ring_size
    layout = ParallelLayout(world_size=sp_size * dp_size, sp_size=sp_size, ring_size=ring_size)
    assert layout.ulysses_size == ulysses_size
    for groups, size in ((layout.ulysses_groups(), ulysses_size), (layout.ring_groups(), ring_size)):
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        assert {len(group) for group in groups} == {size}
    for rank in range(layout.world_size):
        (ulysses,) = (group for group in layout.ulysses_groups() if rank in group)
        (ring,) = (group for group in layout.ring_groups() if rank in group)
        assert {*ulysses} & {*ring} == {rank}
        assert {layout.dp_rank(other) for other in (*ulysses, *ring)} == {layout.dp_rank(rank)}
        ring_rank, ulysses_rank = divmod(layout.sp_rank(rank), ulysses_size)
        assert ulysses[ulysses_rank] == rank == ring[ring_rank]
