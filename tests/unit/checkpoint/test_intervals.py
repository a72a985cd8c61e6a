from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_ulysses.checkpoint.intervals import CoverError, Interval, check_cover, partition, plan_reads
from ray_ulysses.engine.partition_view import intersect
from tests.breadth import examples


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


Sizes = tuple[tuple[int, ...], ...]
"""Elements of each parameter of each group of the optimizer."""
Layout = tuple[int, int]
"""The world size and the ZeRO stage; stages 1 and 2 cut alike."""


def held(layout: Layout, rank: int, groups: Sizes) -> list[Interval]:
    """Return the intervals that a rank holds of every parameter."""
    world_size, stage = layout
    if stage == 3:
        return [
            Interval(key=f"{number}.{index}", start=start, stop=stop)
            for number, sizes in enumerate(groups)
            for index, size in enumerate(sizes)
            for start, stop in [partition(size, world_size, rank)]
        ]
    intervals = []
    for number, sizes in enumerate(groups):
        # DeepSpeed pads a group to a multiple of twice the world.
        alignment = 2 * world_size
        partition_size = -(-sum(sizes) // alignment) * alignment // world_size
        offset = 0
        for index, size in enumerate(sizes):
            part = intersect(number, offset, size, partition_size=partition_size, rank=rank)
            assert part.offset + part.length <= partition_size
            intervals.append(Interval(key=f"{number}.{index}", start=part.start, stop=part.start + part.length))
            offset += size
    return intervals


_LAYOUTS = st.tuples(st.integers(1, 20), st.sampled_from((1, 3)))
_ANY_MODEL = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=5).map(tuple), min_size=1, max_size=3)


@settings(max_examples=examples(300))
@given(saver=_LAYOUTS, loader=_LAYOUTS, groups=_ANY_MODEL.map(tuple), drawn=st.randoms())
@example(saver=(8, 1), loader=(3, 3), groups=((1708, 672, 924, 336), (28, 28)), drawn=random.Random(0))
@example(saver=(4, 3), loader=(6, 1), groups=((3, 1), (2,)), drawn=random.Random(0))
def test_all_layouts_read_each_other(saver: Layout, loader: Layout, groups: Sizes, drawn: random.Random) -> None:
    sizes = {f"{n}.{i}": size for n, group in enumerate(groups) for i, size in enumerate(group)}
    whole = {key: np.arange(size) + 1000 * place for place, (key, size) in enumerate(sizes.items())}
    stored = [interval for rank in range(saver[0]) for interval in held(saver, rank, groups)]
    drawn.shuffle(stored)
    check_cover(sizes, stored)
    shards = [whole[interval.key][interval.start : interval.stop] for interval in stored]
    for rank in range(loader[0]):
        wanted = held(loader, rank, groups)
        filled = [np.full(interval.stop - interval.start, -1) for interval in wanted]
        num_read = 0
        reads = plan_reads(wanted, stored)
        assert list(reads) == sorted(reads, key=lambda read: (read.stored, read.start)), "from front to back"
        for read in reads:
            source, target = stored[read.stored], wanted[read.wanted]
            part = shards[read.stored][read.start - source.start : read.stop - source.start]
            filled[read.wanted][read.start - target.start : read.stop - target.start] = part
            num_read += part.size
        for interval, values in zip(wanted, filled, strict=True):
            np.testing.assert_array_equal(values, whole[interval.key][interval.start : interval.stop])
        # What is needed, and nothing twice.
        assert num_read == sum(interval.stop - interval.start for interval in wanted)
