from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.errors import UserError
from ray_ulysses.parallel.layout import ParallelLayout
from tests.breadth import examples


@settings(max_examples=examples(50))
@given(sp_size=st.integers(1, 9), dp_size=st.integers(1, 9))
def test_every_rank_has_one_place_and_every_place_one_rank(sp_size: int, dp_size: int) -> None:
    layout = ParallelLayout(world_size=sp_size * dp_size, sp_size=sp_size)
    assert layout.dp_size == dp_size
    places = {(layout.dp_rank(rank), layout.sp_rank(rank)) for rank in range(layout.world_size)}
    assert len(places) == layout.world_size
    ranks = range(layout.world_size)
    assert all(layout.dp_rank(rank) * layout.sp_size + layout.sp_rank(rank) == rank for rank in ranks)


@settings(max_examples=examples(50))
@given(sp_size=st.integers(1, 9), dp_size=st.integers(1, 9))
def test_the_groups_of_each_axis_hold_every_rank_once(sp_size: int, dp_size: int) -> None:
    layout = ParallelLayout(world_size=sp_size * dp_size, sp_size=sp_size)
    for groups in (layout.sp_groups(), layout.dp_groups()):
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for dp_rank, group in enumerate(layout.sp_groups()):
        assert [(layout.dp_rank(rank), layout.sp_rank(rank)) for rank in group] == [
            (dp_rank, sp_rank) for sp_rank in range(sp_size)
        ]
    for sp_rank, group in enumerate(layout.dp_groups()):
        assert {layout.sp_rank(rank) for rank in group} == {sp_rank}


def test_ranks_that_share_a_row_are_contiguous() -> None:
    layout = ParallelLayout(world_size=6, sp_size=3)
    assert layout.sp_groups() == ((0, 1, 2), (3, 4, 5))
    assert layout.dp_groups() == ((0, 3), (1, 4), (2, 5))


@pytest.mark.parametrize(
    ("world_size", "sp_size", "text"),
    [
        (16, 6, "cluster.workers=16 is not a multiple of parallel.sp_size=6; use 12 or 18 workers, or an sp_size that"),
        (2, 4, "cluster.workers=2 is not a multiple of parallel.sp_size=4; use 4 workers, or an sp_size that divides"),
        (0, 1, "cluster.workers=0 is not a multiple of parallel.sp_size=1; use 1 workers"),
        (4, 0, "parallel.sp_size=0 must be at least 1"),
    ],
)
def test_a_world_that_is_no_whole_number_of_groups_is_refused(world_size: int, sp_size: int, text: str) -> None:
    with pytest.raises(UserError, match=text.replace(".", r"\.")):
        ParallelLayout(world_size=world_size, sp_size=sp_size)


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_outside_the_world_is_our_own_mistake(rank: int) -> None:
    with pytest.raises(AssertionError, match=f"rank {rank} outside a world of 6"):
        ParallelLayout(world_size=6, sp_size=3).sp_rank(rank)
