from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_ulysses.checkpoint.intervals import Interval, check_cover, partition, plan_reads
from ray_ulysses.engine.partition_view import intersect
from tests.breadth import examples

Sizes = tuple[tuple[int, ...], ...]
"""Elements of each parameter of each group of the optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a layout cuts the trained parameters; sharing a row (sp) does not change it."""

    world_size: int
    stage: int
    """ZeRO stage; 1 and 2 cut alike."""


def held(layout: Cut, rank: int, groups: Sizes) -> list[Interval]:
    """Return the intervals that a rank holds of every parameter."""
    if layout.stage == 3:
        return [
            Interval(key=f"{number}.{index}", start=start, stop=stop)
            for number, sizes in enumerate(groups)
            for index, size in enumerate(sizes)
            for start, stop in [partition(size, layout.world_size, rank)]
        ]
    intervals = []
    for number, sizes in enumerate(groups):
        # DeepSpeed pads a group to a multiple of twice the world.
        alignment = 2 * layout.world_size
        partition_size = -(-sum(sizes) // alignment) * alignment // layout.world_size
        offset = 0
        for index, size in enumerate(sizes):
            part = intersect(number, offset, size, partition_size=partition_size, rank=rank)
            assert part.offset + part.length <= partition_size
            intervals.append(Interval(key=f"{number}.{index}", start=part.start, stop=part.start + part.length))
            offset += size
    return intervals


_ANY_CUT = st.builds(Cut, world_size=st.integers(1, 20), stage=st.sampled_from((1, 3)))
_ANY_MODEL = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=5).map(tuple), min_size=1, max_size=3)


@settings(max_examples=examples(300))
@given(saver=_ANY_CUT, loader=_ANY_CUT, groups=_ANY_MODEL.map(tuple))
@example(saver=Cut(world_size=8, stage=1), loader=Cut(world_size=3, stage=3), groups=((1708, 672, 924, 336), (28, 28)))
@example(saver=Cut(world_size=4, stage=3), loader=Cut(world_size=6, stage=1), groups=((3, 1), (2,)))
def test_any_two_layouts_of_any_model_read_each_other_exactly(saver: Cut, loader: Cut, groups: Sizes) -> None:
    sizes = {f"{n}.{i}": size for n, group in enumerate(groups) for i, size in enumerate(group)}
    whole = {key: np.arange(size) + 1000 * place for place, (key, size) in enumerate(sizes.items())}
    stored = [interval for rank in range(saver.world_size) for interval in held(saver, rank, groups)]
    check_cover(sizes, stored)
    shards = [whole[interval.key][interval.start : interval.stop] for interval in stored]
    for rank in range(loader.world_size):
        wanted = held(loader, rank, groups)
        filled = [np.full(interval.stop - interval.start, -1) for interval in wanted]
        num_read = 0
        for read in plan_reads(wanted, stored):
            source, target = stored[read.stored], wanted[read.wanted]
            part = shards[read.stored][read.start - source.start : read.stop - source.start]
            filled[read.wanted][read.start - target.start : read.stop - target.start] = part
            num_read += part.size
        for interval, values in zip(wanted, filled, strict=True):
            np.testing.assert_array_equal(values, whole[interval.key][interval.start : interval.stop])
        # What is needed, and nothing twice.
        assert num_read == sum(interval.stop - interval.start for interval in wanted)
