"""Which nodes get how many workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.elastic.placement import WorkerRange, is_worth_growing, place_workers


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
        pytest.param({"a": 2, "b": 2, "c": 3}, wanted(4, 8, 4), {"c": 3, "a": 1}, id="one group spans"),
        pytest.param({"a": 4, "b": 3, "c": 4}, wanted(5, 10, 5), {"a": 4, "c": 4, "b": 2}, id="two groups span"),
        pytest.param({"a": 8, "b": 8, "c": 8}, wanted(16, 16, 16), {"a": 8, "b": 8}, id="no more than the most span"),
        pytest.param({"a": 8, "b": 7, "c": 7}, wanted(8, 16, 8), {"a": 8}, id="none spans beside a whole one"),
        pytest.param({"a": 3}, wanted(4, 8, 4), None, id="too little room"),
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
    elif whole:
        assert world == run.least
    else:
        # No node holds a group: they hold as many as have room on all nodes together.
        assert world == min(sum(room.values()) // sp_size * sp_size, run.most)


def test_nodes_that_are_named_first_come_before_those_that_hold_as_many_groups() -> None:
    """Those with workers that are there: nobody else has to start."""
    assert place_workers({"a": 2, "b": 2, "c": 2}, wanted(2, 4, 2), {"c"}) == {"c": 2, "a": 2}
    assert place_workers({"a": 4, "b": 2, "c": 2}, wanted(2, 4, 2), {"c"}) == {"a": 4}


@pytest.mark.parametrize(
    ("workers", "possible", "seconds_left", "restart_s", "grows"),
    [
        pytest.param(4, 8, 1000.0, 50.0, True, id="half of 1,000 s are ten times 50 s"),
        pytest.param(4, 8, 990.0, 50.0, False, id="a little less is not worth it"),
        pytest.param(4, 5, None, 50.0, True, id="a long run"),
        pytest.param(8, 8, None, 1.0, False, id="nothing to gain"),
        pytest.param(1000, 1001, 10 * 365 * 86400.0, 50.0, False, id="years are counted for a day"),
    ],
)
def test_growth_must_save_ten_times_what_it_costs(
    workers: int, possible: int, seconds_left: float | None, restart_s: float, grows: bool
) -> None:
    assert is_worth_growing(workers, possible, seconds_left=seconds_left, restart_s=restart_s) is grows
