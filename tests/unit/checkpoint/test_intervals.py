from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.checkpoint.intervals import CoverError, Interval, check_cover, plan_reads
from tests.breadth import examples


@settings(max_examples=examples(300))
@given(st.data())
def test_any_cut_is_read_back_element_by_element(data: st.DataObject) -> None:
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
    # Each file is read from front to back.
    assert list(reads) == sorted(reads, key=lambda read: (read.stored, read.start))


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
    with pytest.raises(CoverError, match="y"):
        check_cover({}, [Interval(key="y", start=0, stop=1)])


def test_a_wanted_element_that_is_not_stored_is_named() -> None:
    stored = [Interval(key="x", start=0, stop=4), Interval(key="x", start=6, stop=8)]
    with pytest.raises(CoverError, match=r"\[4, 7\) of x"):
        plan_reads([Interval(key="x", start=2, stop=7)], stored)
    with pytest.raises(CoverError, match=r"\[0, 1\) of y"):
        plan_reads([Interval(key="y", start=0, stop=1)], stored)
