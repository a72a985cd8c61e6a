"""With how many workers a run starts, and when it is restarted at another number."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ray_ulysses.elastic.placement import (
    SETTLE_S,
    Resize,
    Sizing,
    WorkerRange,
    decide_placement,
    decide_resize,
    place_workers,
)

WANTED = WorkerRange(least=2, most=8, sp_size=2)


def start(seen: Sizing, free: dict[str, int], total: dict[str, int], now: float) -> tuple[Sizing, Any]:
    return decide_placement(seen, free=free, total=total, wanted=WANTED, now=now)


def resize(
    seen: Sizing, placed: dict[str, int], room: dict[str, int], now: float, interval_s: float = 600.0
) -> tuple[Sizing, Resize | None]:
    return decide_resize(seen, placed=placed, room=room, wanted=WANTED, now=now, grow_interval_s=interval_s)


def test_resources_that_are_about_to_be_free_are_waited_for_a_moment_and_too_few_without_end() -> None:
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


@pytest.mark.parametrize(
    ("placed", "room"),
    [({"a": 4}, {}), ({"a": 4}, {"b": 1}), ({"a": 4, "b": 4}, {"a": 4, "b": 4, "c": 8})],
    ids=["no room", "too few workers", "the same number elsewhere"],
)
def test_nothing_is_restarted_where_that_brings_no_more_workers(placed: dict[str, int], room: dict[str, int]) -> None:
    assert resize(Sizing(since=-100.0), placed, room, 0.0)[1] is None


@pytest.mark.parametrize("seed", range(8))
def test_a_run_ends_up_at_the_size_that_its_nodes_hold(seed: int) -> None:
    """Nodes come, drain and go at random; once they rest, so does the run, at the best size, after few restarts."""
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
    changes = 200 * 0.1
    assert restarts <= 2 * changes
