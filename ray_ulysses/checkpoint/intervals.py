"""Arithmetic on intervals of flattened tensors: sharding, coverage, and reads at another world size.

All functions are pure. Tensors are flattened without padding. Each rank owns a half-open interval [start, stop) of a
tensor, and a checkpoint is a set of intervals that covers every tensor exactly once. To load at another world size, a
rank intersects the intervals that it needs with the stored intervals.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Interval(NamedTuple):
    """Elements [start, stop) of a flattened tensor."""

    key: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """A contiguous range of elements to copy from a stored interval to a wanted interval."""

    wanted: int
    """Index of the wanted interval."""
    stored: int
    """Index of the stored interval."""
    start: int
    """Index of the first element in the flattened tensor."""
    stop: int


class CoverError(ValueError):
    """The stored tensors do not match the state: elements are missing or stored twice, or a key or dtype differs."""


def partition(num_elements: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the interval [start, stop) that ZeRO-3 assigns to a rank, without padding.

    Each rank gets ceil(num_elements / world_size) elements; the last ranks may get fewer or none.
    """
    size = -(-num_elements // world_size)
    return min(rank * size, num_elements), min((rank + 1) * size, num_elements)


def check_cover(num_elements: Mapping[str, int], intervals: Sequence[Interval]) -> None:
    """Check that the intervals, in any order, contain each element of each tensor exactly once.

    Raises:
        CoverError: An element is missing or stored twice, or an interval belongs to an unknown tensor.
    """
    by_key: dict[str, list[Interval]] = {key: [] for key in num_elements}
    for interval in intervals:
        if interval.key not in by_key:
            raise CoverError(f"{interval.key} is stored, but the model's state has no such tensor")
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
    """Return the reads that fill each wanted element exactly once from stored intervals, which must not overlap.

    The reads are ordered by stored interval, so that files are read from front to back.

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
