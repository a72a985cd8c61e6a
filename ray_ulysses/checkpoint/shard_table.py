"""The shards of a checkpoint in the compact form that its manifest stores.

With ZeRO-3, each rank stores an interval of each tensor: three million intervals for a model with 70B parameters on
1,024 ranks, which would take up 200 MB of the manifest and 10 s to read. They all follow from the tensor's size and the
rank; see `intervals.partition`. A record therefore lists only intervals that do not. A row ``["even", first, stop]``
stands for the rank's even shares of tensors ``first`` to ``stop``, numbered in the order of the manifest's ``tensors``.
Empty shares are not stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Literal, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ray_ulysses.checkpoint.checksums import BLOCK_BYTES, SUM_BYTES
from ray_ulysses.checkpoint.intervals import Interval, check_cover, partition
from ray_ulysses.checkpoint.shards import ShardEntry, StoredInterval
from ray_ulysses.checkpoint.state import TensorSpec
from ray_ulysses.validation import ContentError, Whole, shown_value

EVEN = "even"
_Sum = Annotated[int, Field(strict=True, ge=0, lt=2**64)]
_FIELDS: tuple[Literal["key"], Literal["start"], Literal["stop"]] = ("key", "start", "stop")
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """A shard as the manifest stores it; see `ShardEntry` for the fields."""

    file: str
    bytes: Whole
    # The first eight bytes of the header are its length field.
    header_bytes: Annotated[int, Field(strict=True, ge=9, lt=2**62)]
    header_xxh3: _Sum
    block_sums_xxh3: _Sum
    interval_fields: tuple[Literal["key"], Literal["start"], Literal["stop"]]
    intervals: tuple[tuple[str, Whole, Whole], ...]
    """Intervals in file order, or rows with the key `EVEN`. Byte offsets follow from the sizes of the intervals."""


class StoredIntervals(Sequence[StoredInterval]):
    """Positions of a shard's intervals, stored as numbers, because a reader uses only a few of them.

    The columns of ``rows`` are: index of the tensor in ``keys``, start, stop, byte offset, size in bytes, first block.
    """

    def __init__(self, keys: Sequence[str], rows: Int64Array) -> None:
        self._keys, self._rows = keys, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> StoredInterval: ...
    @overload
    def __getitem__(self, at: slice) -> StoredIntervals: ...
    def __getitem__(self, at: int | slice) -> StoredInterval | StoredIntervals:
        if isinstance(at, slice):
            return StoredIntervals(self._keys, self._rows[at])
        tensor, start, stop, offset, num_bytes, first_block = self._rows[at].tolist()
        return StoredInterval(Interval(self._keys[tensor], start, stop), offset, num_bytes, first_block)

    @property
    def num_bytes(self) -> int:
        """Total size of the intervals in bytes."""
        return int(self._rows[:, 4].sum())

    @property
    def table_bytes(self) -> int:
        """Size in bytes of a checksum table for the intervals."""
        return SUM_BYTES * int((-(-self._rows[:, 4] // BLOCK_BYTES)).sum())

    def of(self, tensors: NDArray[np.bool_]) -> StoredIntervals:
        """Return the intervals of the marked tensors; bool [tensors]."""
        return StoredIntervals(self._keys, self._rows[tensors[self._rows[:, 0]]])


class ShardTable(Sequence[ShardEntry]):
    """The shards of a checkpoint, by rank, with tensors in the order of their contents. An entry is made on use."""

    def __init__(self, tensors: Mapping[str, TensorSpec], world_size: int, records: Sequence[ShardRecord]) -> None:
        self.records = tuple(records)
        self._keys = tuple(tensors)
        self._numbers = {key: number for number, key in enumerate(self._keys)}
        self._sizes = np.asarray([spec.num_elements for spec in tensors.values()], dtype=np.int64)
        self._item_bytes = np.asarray([spec.item_bytes for spec in tensors.values()], dtype=np.int64)
        # For each tensor, the size of an even share, and the number of ranks whose share is not empty.
        self._shares = np.maximum(-(-self._sizes // world_size), 1)
        self._holders = -(-self._sizes // self._shares)
        # The interval that each row lists on its own and its shard, by tensor; for each row of even shares, its shard
        # and its tensors.
        self._listed: dict[int, list[tuple[int, int, int]]] = {}
        even = []
        for shard, record in enumerate(self.records):
            for key, start, stop in record.intervals:
                if key == EVEN:
                    even.append((shard, start, stop))
                elif key in self._numbers:
                    self._listed.setdefault(self._numbers[key], []).append((start, stop, shard))
        self._even_rows = np.asarray(even, dtype=np.int64).reshape(-1, 3)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardTable) and self.records == other.records

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, at: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, at: slice) -> list[ShardEntry]: ...
    def __getitem__(self, at: int | slice) -> ShardEntry | list[ShardEntry]:
        if isinstance(at, slice):
            return [self[shard] for shard in range(*at.indices(len(self)))]
        record = self.records[at]
        return ShardEntry(
            file=record.file,
            num_bytes=record.bytes,
            header_bytes=record.header_bytes,
            header_sum=record.header_xxh3,
            sums_sum=record.block_sums_xxh3,
            intervals=self._intervals(at % len(self)),
        )

    def validate(self) -> None:
        """Raise `ContentError` unless each shard's intervals are parts of tensors, in order, and add up to its size."""
        for shard, record in enumerate(self.records):
            reached = 0
            for at, (key, start, stop) in enumerate(record.intervals):
                number = self._numbers.get(key)
                if key == EVEN:
                    first, after, most = start, stop, self._sizes.size
                    why = f"but the state has {most} tensors"
                elif number is None:
                    first, after, most, why = 0, 0, -1, "but the state has no such tensor"
                else:
                    first, after, most = number, number + 1, int(self._sizes[number])
                    why = f"but the tensor has {most} elements"
                if start <= stop <= most and first < reached:
                    most, why = -1, "but the tensors of a shard must be distinct and in the order of the state"
                if not start <= stop <= most:
                    raise ContentError(f"shards[{shard}].intervals[{at}] is {shown_value([key, start, stop])}, {why}")
                reached = after
            intervals = self._intervals(shard)
            if (size := record.header_bytes + intervals.num_bytes + intervals.table_bytes) != record.bytes:
                raise ContentError(
                    f"shards[{shard}].bytes is {record.bytes}, but its header, intervals and checksums add up to {size}"
                )

    def check_cover(self) -> None:
        """Raise `CoverError` unless the shards' intervals contain each element of the state exactly once.

        The memory needed is in proportion to the table, also if it is wrong; `validate` must have passed.
        """
        counts = np.zeros(self._sizes.size, dtype=np.int64)
        for shard, first, stop in self._even_rows.tolist():
            starts, stops = self._even(shard, first, stop)
            counts[first:stop] += starts < stops
        # A tensor is complete if each rank stores its even share. Any other tensor must be listed.
        for number in sorted({*np.flatnonzero(counts != self._holders).tolist(), *self._listed}):
            key, size, share = self._keys[number], int(self._sizes[number]), int(self._shares[number])
            holders = self._even_holders(number)
            # Neighboring shares are one interval.
            borders = [0, *(np.flatnonzero(np.diff(holders) != 1) + 1).tolist(), holders.size]
            held = [
                Interval(key, min(int(holders[first]) * share, size), min((int(holders[stop - 1]) + 1) * share, size))
                for first, stop in pairwise(borders)
                if first < stop
            ]
            listed = self._listed.get(number, ())
            check_cover({key: size}, held + [Interval(key, start, stop) for start, stop, _ in listed])

    def holding(self, wanted: Sequence[Interval]) -> list[tuple[ShardEntry, StoredInterval]]:
        """Return the intervals of the wanted tensors in all shards that may contain wanted elements, in file order."""
        shards: set[int] = set()
        is_wanted = np.zeros(self._sizes.size, dtype=np.bool_)
        for want in wanted:
            number = self._numbers.get(want.key)
            if number is not None and want.start < want.stop:
                is_wanted[number] = True
                share = int(self._shares[number])
                shards.update(range(want.start // share, min(-(-want.stop // share), len(self))))
                shards.update(shard for _, _, shard in self._listed.get(number, ()))
        entries = {shard: self[shard] for shard in sorted(shards)}
        return [(entry, one) for shard, entry in entries.items() for one in self._intervals(shard).of(is_wanted)]

    def of(self, keys: Collection[str]) -> list[StoredIntervals]:
        """Return each shard's intervals of the given tensors."""
        is_wanted = np.asarray([key in keys for key in self._keys], dtype=np.bool_)
        return [self._intervals(shard).of(is_wanted) for shard in range(len(self))]

    def starts(self, key: str) -> Sequence[int]:
        """Return the first element of each stored interval of a tensor, in ascending order; 0 if it is not stored."""
        number = self._numbers.get(key)
        if number is None:
            return (0,)
        if number not in self._listed:
            return range(0, int(self._sizes[number]), int(self._shares[number]))
        even = self._even_holders(number) * self._shares[number]
        listed = [start for start, stop, _ in self._listed[number] if start < stop]
        return sorted([*even[even < self._sizes[number]].tolist(), *listed])

    def _even_holders(self, number: int) -> Int64Array:
        """Return the shards that contain their even share of a tensor, in ascending order."""
        shards, firsts, stops = self._even_rows.T
        return shards[(firsts <= number) & (number < stops)]

    def _even(self, rank: int, first: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Return the start and stop of a rank's even share of tensors `first` to `stop`, like `intervals.partition`."""
        sizes, shares, holders = (one[first:stop] for one in (self._sizes, self._shares, self._holders))
        starts, stops = (np.minimum(np.minimum(one, holders) * shares, sizes) for one in (rank, rank + 1))
        return starts, stops

    def _intervals(self, shard: int) -> StoredIntervals:
        parts = [np.empty((0, 3), dtype=np.int64)]
        for key, first, stop in self.records[shard].intervals:
            if key == EVEN:
                starts, stops = self._even(shard, first, stop)
                held = np.flatnonzero(starts < stops)
                parts.append(np.stack([first + held, starts[held], stops[held]], axis=1))
            else:
                parts.append(np.asarray([[self._numbers[key], first, stop]], dtype=np.int64))
        held = np.concatenate(parts)
        sizes = (held[:, 2] - held[:, 1]) * self._item_bytes[held[:, 0]]
        blocks = -(-sizes // BLOCK_BYTES)
        offsets = self.records[shard].header_bytes + np.cumsum(sizes) - sizes
        return StoredIntervals(self._keys, np.column_stack([held, offsets, sizes, np.cumsum(blocks) - blocks]))


def record_of(entry: ShardEntry, tensors: Mapping[str, TensorSpec], world_size: int, rank: int) -> ShardRecord:
    """Return the record of a rank's shard, whose intervals are in the order of `tensors`."""
    shares = {key: partition(spec.num_elements, world_size, rank) for key, spec in tensors.items()}
    numbers = {key: number for number, key in enumerate(tensors)}
    held_before = list(accumulate((start < stop for start, stop in shares.values()), initial=0))
    rows: list[tuple[str, int, int]] = []
    for key, start, stop in (stored.interval for stored in entry.intervals):
        number = numbers[key]
        if (start, stop) != shares[key]:
            rows.append((key, start, stop))
        elif rows and rows[-1][0] == EVEN and held_before[number] == held_before[rows[-1][2]]:
            # Shares between the two are empty.
            rows[-1] = (EVEN, rows[-1][1], number + 1)
        else:
            rows.append((EVEN, number, number + 1))
    return ShardRecord(
        file=entry.file,
        bytes=entry.num_bytes,
        header_bytes=entry.header_bytes,
        header_xxh3=entry.header_sum,
        block_sums_xxh3=entry.sums_sum,
        interval_fields=_FIELDS,
        intervals=tuple(rows),
    )
