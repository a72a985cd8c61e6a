"""Interval arithmetic: read plans are exact between any two worlds, and covers with a fault are refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.checkpoint.intervals import CoverError, Interval, check_cover, partition, plan_reads
from tests.breadth import examples

SIZES = {"one": 1, "two": 2, "prime": 127, "round": 128, "odd": 129, "large": 4096 * 11}


def _stored(world_size: int, sizes: dict[str, int]) -> list[Interval]:
    held = []
    for rank, key in itertools.product(range(world_size), sizes):
        start, stop = partition(sizes[key], world_size, rank)
        held.append(Interval(key=key, start=start, stop=stop))
    return held


@settings(max_examples=examples(300))
@given(st.data())
def test_any_cut_is_read_back_element_by_element(data: st.DataObject) -> None:
    """Not only even partitions: any set of intervals that covers, and any interval that is wanted."""
    size = data.draw(st.integers(1, 60))
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=8))})
    stored = [Interval(key="x", start=a, stop=b) for a, b in itertools.pairwise(cuts)]
    stored = data.draw(st.permutations(stored))
    check_cover({"x": size}, stored)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    reads = plan_reads([Interval(key="x", start=start, stop=stop)], stored)
    elements = [n for read in reads for n in range(read.start, read.stop)]
    assert sorted(elements) == list(range(start, stop))
    assert all(stored[r.stored].start <= r.start and r.stop <= stored[r.stored].stop for r in reads)


def test_reads_go_through_each_file_from_front_to_back() -> None:
    reads = plan_reads(_stored(3, SIZES), _stored(4, SIZES))
    assert [(read.stored, read.start) for read in reads] == sorted((read.stored, read.start) for read in reads)


@pytest.mark.parametrize(
    ("intervals", "text"),
    [
        ([(0, 4), (5, 10)], r"\[4, 5\) of x are missing"),
        ([(0, 6), (5, 10)], r"\[5, 6\) of x are stored twice"),
        ([(0, 9)], "10 elements, but 9"),
        ([(0, 11)], "10 elements, but 11"),
        ([], "10 elements, but 0"),
    ],
)
def test_a_cover_with_a_fault_is_refused(intervals: list[tuple[int, int]], text: str) -> None:
    with pytest.raises(CoverError, match=text):
        check_cover({"x": 10}, [Interval(key="x", start=a, stop=b) for a, b in intervals])


def test_a_tensor_that_nobody_knows_is_refused() -> None:
    with pytest.raises(CoverError, match="y"):
        check_cover({}, [Interval(key="y", start=0, stop=1)])


def test_a_wanted_element_that_is_not_stored_is_named() -> None:
    stored = [Interval(key="x", start=0, stop=4), Interval(key="x", start=6, stop=8)]
    with pytest.raises(CoverError, match=r"\[4, 7\) of x"):
        plan_reads([Interval(key="x", start=2, stop=7)], stored)
    with pytest.raises(CoverError, match=r"\[0, 1\) of y"):
        plan_reads([Interval(key="y", start=0, stop=1)], stored)
