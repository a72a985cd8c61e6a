from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.errors import UserError
from ray_ulysses.parallel.layout import assign_heads, part_of

heads = st.builds(lambda kv, group: (kv * group, kv), st.integers(1, 12), st.integers(1, 8))


@given(heads=heads, share=st.floats(0, 1))
def test_every_query_head_is_on_one_rank_with_its_key_value_head(heads: tuple[int, int], share: float) -> None:
    num_heads, num_kv_heads = heads
    ranks = max(1, round(share * num_heads))
    plan = assign_heads(num_heads, num_kv_heads, ranks)
    served = [
        (head, kv)
        for rank in plan.ranks
        for head, kv in zip(
            range(rank.first, rank.stop), [kv for kv, count in rank.groups for _ in range(count)], strict=True
        )
    ]
    assert served == [(head, head // (num_heads // num_kv_heads)) for head in range(num_heads)]
    sizes = {rank.num_heads for rank in plan.ranks}
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert plan.max_heads == max(sizes)


@given(heads=heads, share=st.floats(0, 1))
def test_calls_cover_a_ranks_heads_in_equal_groups(heads: tuple[int, int], share: float) -> None:
    plan = assign_heads(*heads, max(1, round(share * heads[0])))
    for rank in plan.ranks:
        query, kv = 0, 0
        for query_heads, kv_heads in rank.calls():
            assert (query_heads.start, kv_heads.start) == (query, kv)
            query, kv = query_heads.stop, kv_heads.stop
            sizes = {count for _, count in rank.groups[kv_heads]}
            assert len(sizes) == 1
            assert (query_heads.stop - query_heads.start) == sizes.pop() * (kv_heads.stop - kv_heads.start)
        assert (query, kv) == (rank.num_heads, rank.num_kv_heads)


@given(heads=heads, share=st.floats(0, 1), parts=st.integers(1, 5))
def test_parts_of_a_plan_make_the_whole(heads: tuple[int, int], share: float, parts: int) -> None:
    plan = assign_heads(*heads, max(1, round(share * heads[0])))
    for place, rank in enumerate(plan.ranks):
        pieces = [part_of(plan, part, parts).ranks[place] for part in range(parts)]
        assert sum((piece.groups for piece in pieces), ()) == rank.groups
        assert sum(piece.num_heads for piece in pieces) == rank.num_heads
        assert all(piece.first_kv == piece.groups[0][0] for piece in pieces if piece.groups)


@pytest.mark.parametrize(
    ("kv_heads", "heads", "ranks", "text"),
    [
        (2, 4, 8, r"4 attention heads are not enough for 8 ranks.*set parallel\.ring_size"),
        (3, 8, 2, "3 key-value heads, "),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(kv_heads: int, heads: int, ranks: int, text: str) -> None:
    with pytest.raises(UserError, match=text):
        assign_heads(heads, kv_heads, ranks)
