"""Which nodes get how many workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.elastic.placement import WorkerRange, place_workers


def wanted(least: int, most: int, sp_size: int) -> WorkerRange:
    return WorkerRange(least=least, most=most, sp_size=sp_size)


@pytest.mark.parametrize(
    ("room", "run", "placed"),
    [
        pytest.param({"a": 8, "b": 8}, wanted(4, 16, 4), {"a": 8, "b": 8}, id="both nodes, whole"),
        pytest.param({"a": 8, "b": 8}, wanted(4, 8, 4), {"a": 8}, id="no more than the most, on the fewest nodes"),
        pytest.param({"a": 3, "b": 6}, wanted(4, 16, 4), {"b": 4}, id="a group stays on one node"),
        pytest.param({"a": 3, "b": 6}, wanted(8, 8, 4), {"a": 3, "b": 5}, id="unless too few were left"),
        pytest.param({"a": 8, "b": 6, "c": 2}, wanted(16, 16, 4), {"a": 8, "b": 6, "c": 2}, id="aligned nodes first"),
        pytest.param({"a": 4, "b": 4}, wanted(8, 8, 8), {"a": 4, "b": 4}, id="a group larger than any node"),
        pytest.param({"a": 3}, wanted(4, 8, 4), None, id="too little room"),
        pytest.param({}, wanted(1, 1, 1), None, id="no node"),
    ],
)
def test_groups_stay_whole_where_a_node_can_hold_one(
    room: dict[str, int], run: WorkerRange, placed: dict[str, int] | None
) -> None:
    found = place_workers(room, run)
    assert found == placed
    assert found is None or list(found) == list(placed or {})


@given(
    room=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 12)),
    sp_size=st.integers(1, 8),
    groups=st.tuples(st.integers(1, 6), st.integers(0, 6)),
)
def test_every_placement_is_a_world_that_fits(room: dict[str, int], sp_size: int, groups: tuple[int, int]) -> None:
    run = wanted(groups[0] * sp_size, (groups[0] + groups[1]) * sp_size, sp_size)
    placed = place_workers(room, run)
    if placed is None:
        assert sum(room.values()) < run.least
        return
    world = sum(placed.values())
    assert run.least <= world <= run.most and world % sp_size == 0
    assert all(0 < workers <= room[node] for node, workers in placed.items())
    whole = sum(workers // sp_size for workers in room.values()) * sp_size
    if whole >= run.least:
        # No group spans nodes, and no whole group that may be had is left out.
        assert all(workers % sp_size == 0 for workers in placed.values()) and world == min(whole, run.most)
    else:
        assert world == run.least
