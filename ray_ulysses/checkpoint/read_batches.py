"""Plans the byte ranges to read from each file: whole blocks, joined where they touch (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ray_ulysses.checkpoint.checksums import BLOCK_BYTES
from ray_ulysses.checkpoint.intervals import Read
from ray_ulysses.checkpoint.shards import CHUNK_BYTES, ShardEntry, StoredInterval


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRange:
    """Whole blocks of one stored interval, and which of their bytes go where.

    Attributes:
        stored: The interval.
        start: First byte that is read, counted in the interval; on a block's border.
        stop: The byte after the last.
        wanted: Index of the part to fill.
        first: First byte that is wanted, counted in the interval.
        last: The byte after the last one wanted.
        target: Where the first wanted byte goes, in bytes of the part.
    """

    stored: StoredInterval
    start: int
    stop: int
    wanted: int
    first: int
    last: int
    target: int

    @property
    def is_exact(self) -> bool:
        """True if every byte that is read is wanted."""
        return (self.start, self.stop) == (self.first, self.last)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Bytes of one file that are read in one go.

    Attributes:
        shard: The file.
        offset: Its first byte.
        num_bytes: How many.
        ranges: What they are, in the order of the file.
    """

    shard: ShardEntry
    offset: int
    num_bytes: int
    ranges: tuple[ReadRange, ...]


def plan_batches(
    reads: Sequence[Read], stored: Sequence[tuple[ShardEntry, StoredInterval]], starts: Sequence[int]
) -> list[Batch]:
    """Return what to read, file by file from front to back, in batches of at most `CHUNK_BYTES`.

    Args:
        reads: As `intervals.plan_reads` gives them: in the order of the stored intervals.
        stored: The stored intervals with their files, in that order.
        starts: First element of each wanted part.
    """
    batches: list[Batch] = []
    held: list[ReadRange] = []
    holder: ShardEntry | None = None
    for read in reads:
        shard, interval = stored[read.stored]
        for read_range in _ranges(read, interval, starts[read.wanted]):
            if holder is not shard or not _joins(held, read_range):
                batches += _batch(holder, held)
                held, holder = [], shard
            held.append(read_range)
    return batches + _batch(holder, held)


def _ranges(read: Read, stored: StoredInterval, part_start: int) -> Iterator[ReadRange]:
    """Yield a read in ranges of at most `CHUNK_BYTES`, which are a whole number of blocks."""
    item_bytes = stored.num_bytes // (stored.interval.stop - stored.interval.start)
    first = (read.start - stored.interval.start) * item_bytes
    last = (read.stop - stored.interval.start) * item_bytes
    for start in range(first // CHUNK_BYTES * CHUNK_BYTES, last, CHUNK_BYTES):
        begin, end = max(first, start), min(last, start + CHUNK_BYTES)
        yield ReadRange(
            stored=stored,
            start=begin // BLOCK_BYTES * BLOCK_BYTES,
            stop=min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, stored.num_bytes),
            wanted=read.wanted,
            first=begin,
            last=end,
            target=(read.start - part_start) * item_bytes + begin - first,
        )


def _joins(held: Sequence[ReadRange], read_range: ReadRange) -> bool:
    """Return whether a range starts where the last one ends and the batch stays within its limit."""
    if not held:
        return False
    end = held[-1].stored.offset + held[-1].stop
    begin = held[0].stored.offset + held[0].start
    start, stop = read_range.stored.offset + read_range.start, read_range.stored.offset + read_range.stop
    return start == end and stop - begin <= CHUNK_BYTES


def _batch(shard: ShardEntry | None, ranges: Sequence[ReadRange]) -> list[Batch]:
    if shard is None or not ranges:
        return []
    begin = ranges[0].stored.offset + ranges[0].start
    end = ranges[-1].stored.offset + ranges[-1].stop
    return [Batch(shard=shard, offset=begin, num_bytes=end - begin, ranges=tuple(ranges))]
