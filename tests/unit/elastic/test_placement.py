"""Which nodes get how many workers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.elastic.placement import (
    SETTLE_S,
    Resize,
    Sizing,
    WorkerRange,
    decide_placement,
    decide_resize,
    is_worth_growing,
    place_workers,
)


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
    ("workers", "possible", "seconds_left", "grows"),
    [
        pytest.param(4, 8, 1000.0, True, id="half of 1,000 s are ten times 50 s"),
        pytest.param(4, 8, 990.0, False, id="a little less is not worth it"),
        pytest.param(4, 5, None, True, id="a long run"),
        pytest.param(8, 8, None, False, id="nothing to gain"),
        pytest.param(1000, 1001, 10 * 365 * 86400.0, False, id="years are counted for a day"),
    ],
)
def test_growth_must_save_ten_times_its_cost(workers: int, possible: int, seconds_left: float, grows: bool) -> None:
    assert is_worth_growing(workers, possible, seconds_left=seconds_left, restart_s=50.0) is grows


WANTED = WorkerRange(least=2, most=8, sp_size=2)


def start(seen: Sizing, free: dict[str, int], total: dict[str, int], now: float) -> tuple[Sizing, Any]:
    return decide_placement(seen, free=free, total=total, wanted=WANTED, now=now)


def resize(
    seen: Sizing, placed: dict[str, int], room: dict[str, int], now: float, interval_s: float = 600.0
) -> tuple[Sizing, Resize | None]:
    return decide_resize(seen, placed=placed, room=room, wanted=WANTED, now=now, grow_interval_s=interval_s)


def test_resources_about_to_be_free_are_awaited_for_a_moment_and_too_few_without_end() -> None:
    free, total = {"a": 4, "b": 0}, {"a": 4, "b": 4}
    assert start(Sizing(), total, total, 0.0) == (Sizing(), total), "all of it is free"
    seen, placed = start(Sizing(), free, total, 10.0)
    assert placed is None
    seen, placed = start(seen, free, total, 10.0 + SETTLE_S - 0.1)
    assert placed is None
    assert start(seen, {"a": 4, "b": 4}, total, 10.0 + SETTLE_S - 0.1)[1] == {"a": 4, "b": 4}
    assert start(seen, free, total, 10.0 + SETTLE_S) == (Sizing(), {"a": 4})
    seen, placed = start(Sizing(), {"a": 1}, {"a": 1}, 0.0)
    assert placed is None
    seen, placed = start(seen, {"a": 1, "b": 0}, {"a": 1, "b": 6}, 1e6)
    assert placed is None
    assert start(seen, {"a": 1, "b": 6}, {"a": 1, "b": 6}, 1e6 + 1)[1] == {"b": 6}


def test_a_run_grows_onto_nodes_that_stay_and_considers_it_once_per_interval() -> None:
    small, large = {"a": 4}, {"a": 4, "b": 4}
    seen, _ = resize(Sizing(), small, large, 0.0)
    # The node goes, and comes back.
    seen, found = resize(seen, small, small, SETTLE_S - 1.0)
    assert (seen, found) == (Sizing(), None)
    seen, found = resize(seen, small, large, SETTLE_S)
    assert found is None
    seen, found = resize(seen, small, large, 2 * SETTLE_S)
    assert found == Resize(workers=8, must=False) and seen == Sizing(grew_at=2 * SETTLE_S)
    for later_s in (1.0, 599.0, 600.0):
        seen, found = resize(seen, small, large, 2 * SETTLE_S + later_s)
        assert found is None
    assert resize(seen, small, large, 3 * SETTLE_S + 600.0)[1] == Resize(workers=8, must=False)


def test_nodes_that_drain_one_after_the_other_cost_one_restart() -> None:
    placed = {"a": 2, "b": 2, "c": 2}
    seen, found = resize(Sizing(grew_at=0.0), placed, {"a": 2, "b": 2}, 1.0)
    assert found is None
    seen, found = resize(seen, placed, {"a": 2}, 1.0 + SETTLE_S)
    assert found == Resize(workers=2, must=True)
    # Growth is not put off by it.
    assert seen.grew_at == 0.0


def test_nothing_is_restarted_where_that_brings_no_more_workers() -> None:
    for room in ({}, {"b": 1}):
        assert resize(Sizing(since=-100.0), {"a": 4}, room, 0.0)[1] is None
    assert resize(Sizing(since=-100.0), {"a": 4, "b": 4}, {"a": 4, "b": 4, "c": 8}, 0.0)[1] is None


@pytest.mark.parametrize("seed", range(8))
def test_a_run_ends_up_at_the_size_that_its_nodes_hold(seed: int) -> None:
    """Nodes come, drain and go at random; once they rest, the run has the best size after few restarts."""
    rng = random.Random(seed)
    nodes: dict[str, int] = {}
    placed: dict[str, int] | None = None
    seen, restarts, now = Sizing(), 0, 0.0
    for second in range(400):
        now = float(second)
        if second < 200 and rng.random() < 0.1:
            name = rng.choice("abcdef")
            nodes.pop(name, None) if name in nodes else nodes.update({name: rng.randint(0, 5)})
            if placed and name in placed and name not in nodes and rng.random() < 0.5:
                placed, seen = None, Sizing(grew_at=seen.grew_at)  # gone without notice
        if placed is None:
            seen, placed = start(seen, nodes, nodes, now)
            restarts += placed is not None
        else:
            seen, found = resize(seen, placed, nodes, now, interval_s=30.0)
            placed = None if found is not None else placed
    best = place_workers(nodes, WANTED)
    assert (placed is None) == (best is None)
    if placed is not None and best is not None:
        assert sum(placed.values()) == sum(best.values())
    assert restarts <= 2 * 200 * 0.1, "twice the changes"
