"""Arithmetic on intervals of flat tensors: sharding, coverage, and the reads for another world size.

Everything here is pure. A tensor is seen as its exact flat form, without padding. A rank holds the half-open
interval [start, stop) of it, and a checkpoint is a set of such intervals that covers every tensor once.
Loading at another world size is then an intersection of the wanted intervals with the stored ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Interval(NamedTuple):
    """Elements [start, stop) of one flat tensor.

    A tuple, since a large world has hundreds of thousands of them, and a frozen dataclass takes five times as long to
    make.
    """

    key: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """One contiguous part to copy from a stored interval to a wanted one."""

    wanted: int
    stored: int
    start: int
    """First element, counted in the whole tensor."""
    stop: int


class CoverError(ValueError):
    """Intervals don't hold every element exactly once; the text says where."""


def partition(num_elements: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the interval [start, stop) that ZeRO-3 assigns to a rank, without padding.

    Every rank holds ceil(num_elements / world_size) elements, the last ones fewer or none.
    """
    size = -(-num_elements // world_size)
    return min(rank * size, num_elements), min((rank + 1) * size, num_elements)


def check_cover(num_elements: Mapping[str, int], intervals: Sequence[Interval]) -> None:
    """Check that intervals hold every element of every tensor exactly once.

    Args:
        num_elements: The tensors' sizes, by key.
        intervals: What is held, in any order.

    Raises:
        CoverError: An element is missing or held twice, or an interval belongs to no tensor.
    """
    by_key: dict[str, list[Interval]] = {key: [] for key in num_elements}
    for interval in intervals:
        if interval.key not in by_key:
            raise CoverError(f"{interval.key} is stored but belongs to no tensor of the state")
        by_key[interval.key].append(interval)
    for key, held in by_key.items():
        reached = 0
        for interval in sorted(held, key=lambda i: (i.start, i.stop)):
            if interval.start < reached:
                overlap = min(reached, interval.stop)
                raise CoverError(f"elements [{interval.start}, {overlap}) of {key} are stored twice")
            if interval.start > reached:
                raise CoverError(f"elements [{reached}, {interval.start}) of {key} are missing")
            reached = interval.stop
        if reached != num_elements[key]:
            raise CoverError(f"{key} has {num_elements[key]} elements, but {reached} are stored")


def plan_reads(wanted: Sequence[Interval], stored: Sequence[Interval]) -> tuple[Read, ...]:
    """Return what to copy so that every wanted element arrives exactly once.

    Args:
        wanted: The intervals that a rank needs.
        stored: The intervals that a checkpoint holds; they don't overlap (`check_cover`).

    Returns:
        The reads in the order of the stored intervals, so that a file is read from front to back.

    Raises:
        CoverError: A wanted element is not stored.
    """
    index: dict[str, list[int]] = {}
    for number in sorted(range(len(stored)), key=lambda n: stored[n].start):
        if stored[number].stop > stored[number].start:
            index.setdefault(stored[number].key, []).append(number)
    starts = {key: [stored[number].start for number in numbers] for key, numbers in index.items()}
    reads = []
    for target, want in enumerate(wanted):
        reached = want.start
        numbers = index.get(want.key, [])
        position = max(bisect_right(starts.get(want.key, []), want.start) - 1, 0)
        while reached < want.stop and position < len(numbers):
            source = stored[numbers[position]]
            begin, end = max(reached, source.start), min(want.stop, source.stop)
            if begin > reached:
                break
            if end > begin:
                reads.append(Read(wanted=target, stored=numbers[position], start=begin, stop=end))
                reached = end
            position += 1
        if reached < want.stop:
            raise CoverError(f"elements [{reached}, {want.stop}) of {want.key} are not in the checkpoint")
    return tuple(sorted(reads, key=lambda read: (read.stored, read.start)))
