"""Which ranks are named as slow, which nodes a run does without, and which loss is a spike."""

from __future__ import annotations

import math
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.elastic.outliers import LEAST_STEPS, RATIO, WINDOWS, Straggler, after_window, spike_bound
from ray_ulysses.elastic.placement import nodes_to_use

TIMES = st.dictionaries(st.integers(0, 20), st.floats(0.01, 1e3), min_size=1)


def after(*windows: dict[int, float]) -> tuple[Straggler, ...]:
    slow: tuple[Straggler, ...] = ()
    for window in windows:
        slow = after_window(slow, window)
    return slow


def named(*windows: dict[int, float]) -> list[Straggler]:
    return [one for one in after(*windows) if one.is_named]


SLOW = {0: 1.0, 1: 1.0, 2: 1.4, 3: 1.0}


def test_a_rank_that_stays_slow_is_named() -> None:
    assert named(*[SLOW] * (WINDOWS - 1)) == []
    (one,) = named(*[SLOW] * WINDOWS)
    assert one == Straggler(rank=2, windows=5, ratio=1.4)
    assert "rank 2 on host-b computes 1.4 times" in one.said("host-b")
    # The count starts again after a window at the others' pace, or without times.
    assert after(*[SLOW] * WINDOWS, {}) == () == tuple(named(*[SLOW] * 4, {0: 1.0, 2: 1.2}, *[SLOW] * 4))
    assert after(*[SLOW] * 4, {0: 1.0, 1: 1.0}, SLOW) == (Straggler(rank=2, windows=1, ratio=1.4),)


@given(st.lists(TIMES, max_size=12), st.sampled_from([0.5, 4.0]))
def test_the_count_is_of_windows_in_a_row_whatever_the_unit(windows: list[dict[int, float]], unit: float) -> None:
    found = after(*windows)
    scaled = after(*[{rank: unit * seconds for rank, seconds in window.items()} for window in windows])
    assert [(one.rank, one.windows) for one in scaled] == [(one.rank, one.windows) for one in found]
    for one in found:
        held = [one.rank in {slow.rank for slow in after(window)} for window in windows]
        assert all(held[-one.windows :]) and not all(held[-one.windows - 1 :][: len(held) - one.windows] or [False])
        assert one.ratio > RATIO
    # At most half of the ranks can be above the lower median.
    assert len(found) <= (len(windows[-1]) / 2 if windows else 0)


@pytest.mark.parametrize(
    ("times", "slow"),
    [([1.0, 1.4], [1]), ([1.0, 1.0, 1.4, 1.4], [2, 3]), ([1.0, RATIO - 0.01, 1.1], []), ([0.0, 0.0], [])],
    ids=["one of two", "a node of two", "within the ratio", "no times"],
)
def test_up_to_half_of_the_ranks_are_slow_and_none_within_the_ratio(times: list[float], slow: list[int]) -> None:
    assert [one.rank for one in named(*[dict(enumerate(times))] * WINDOWS)] == slow


@pytest.mark.parametrize(
    ("slow", "in_use", "least", "room", "used"),
    [
        # There is a spare node.
        ({"b": 1.4}, "ab", 2, {"a": 1, "b": 1, "c": 1}, "ac"),
        # Half of the workers for 1.4 times their speed.
        ({"b": 1.4}, "ab", 1, {"a": 1, "b": 1}, "ab"),
        ({"b": 2.1}, "ab", 1, {"a": 1, "b": 1}, "a"),
        # Too few without it.
        ({"b": 9.0}, "ab", 2, {"a": 1, "b": 1}, "ab"),
        # Of two slow ones the one in use stays: no run goes back to a node that it has left.
        ({"a": 1.5, "b": 1.4}, "ac", 2, {"a": 1, "b": 1, "c": 1}, "ac"),
        ({"a": 1.5, "b": 1.4}, "", 2, {"a": 1, "b": 1, "c": 1}, "bc"),
        # A broken one only where the others are too few.
        ({"b": math.inf}, "ab", 1, {"a": 1, "b": 9}, "a"),
        ({"b": math.inf}, "ab", 2, {"a": 1, "b": 1}, "ab"),
        ({"a": 1.4, "b": math.inf}, "ab", 1, {"a": 1, "b": 9}, "a"),
    ],
)
def test_a_run_does_without_slow_nodes_where_that_pays(
    slow: dict[str, float], in_use: str, least: int, room: dict[str, int], used: str
) -> None:
    def workers(nodes: Collection[str]) -> int:
        found = sum(room[node] for node in nodes)
        return min(found, 2 if "c" in room else 9) if found >= least else 0

    assert nodes_to_use(room, slow, in_use, workers) == set(used)


def test_a_loss_far_above_the_newest_ones_is_a_spike() -> None:
    losses = [9.0, *([2.0, 2.1, 1.9, 2.2, 1.8] * 10)]
    # Of the last 50 the median is 2.0, and half of them are within 0.1 of it; one spike among them moves neither.
    assert spike_bound(losses, 6.0) == pytest.approx(2.6) == spike_bound([*losses, 50.0], 6.0)
    assert spike_bound([3.0 * loss for loss in losses], 6.0) == pytest.approx(7.8), "it follows the unit"
    assert spike_bound([2.0] * (LEAST_STEPS - 1), 6.0) is None
    assert spike_bound([2.0] * LEAST_STEPS, 6.0) == pytest.approx(2.0 + 6.0 * 0.02), "equal losses need a difference"
