"""Loads parts at any world size: intersects what is wanted with what is stored and reads only those bytes.

Every byte is verified while it is read. Nothing is unpickled, and no tensor is ever whole on a rank that does not hold
it whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import or_

import torch

from ray_ulysses.checkpoint.checksums import BLOCK_BYTES
from ray_ulysses.checkpoint.errors import CheckpointError, DamagedCheckpointError, UnreadableCheckpointError
from ray_ulysses.checkpoint.intervals import CoverError, Read, plan_reads
from ray_ulysses.checkpoint.manifest import Manifest
from ray_ulysses.checkpoint.messenger import RankMessenger, SingleRankMessenger, agree
from ray_ulysses.checkpoint.shards import (
    CHUNK_BYTES,
    ShardDamage,
    ShardEntry,
    StoredInterval,
    check_blocks,
    check_header,
    read_sums,
)
from ray_ulysses.checkpoint.state import TensorPart, dtype_name
from ray_ulysses.parallel.device import choose_device
from ray_ulysses.run_names import step_folder
from ray_ulysses.storage import Store
from ray_ulysses.storage.store import StoredFile


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRange:
    """Whole blocks of one stored interval, and which of their bytes go where."""

    stored: StoredInterval
    start: int
    """First byte that is read, counted in the interval; on a block's border."""
    stop: int
    """The byte after the last."""
    wanted: int
    """Index of the part to fill."""
    first: int
    """First byte that is wanted, counted in the interval."""
    last: int
    """The byte after the last one wanted."""
    target: int
    """Where the first wanted byte goes, in bytes of the part."""

    @property
    def is_exact(self) -> bool:
        """True if every byte that is read is wanted."""
        return (self.start, self.stop) == (self.first, self.last)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Bytes of one file that are read in one go."""

    shard: ShardEntry
    offset: int
    """Its first byte."""
    num_bytes: int
    ranges: tuple[ReadRange, ...]
    """Its parts, in the order of the file."""


def plan_batches(
    reads: Sequence[Read], stored: Sequence[tuple[ShardEntry, StoredInterval]], starts: Sequence[int]
) -> list[Batch]:
    """Return the reads, file by file from front to back, in batches of at most `CHUNK_BYTES`.

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


NUM_THREADS = 8


def load_parts(
    store: Store, manifest: Manifest, parts: Sequence[TensorPart], messenger: RankMessenger | None = None
) -> int:
    """Fill parts in place from a committed checkpoint.

    Only the blocks that hold wanted bytes are read, in parallel, and each is verified against its checksum. With a
    messenger every rank must call.

    Args:
        store: The run's store.
        manifest: The checkpoint's.
        parts: What to fill: 1-D tensors, on any device, of the dtype that is stored.
        messenger: Joins the ranks, so that a failure of one is raised by all.

    Returns:
        How many bytes were read.

    Raises:
        DamagedCheckpointError: A file is missing or is not what was written.
        UnreadableCheckpointError: The storage does not give a file, which may pass.
        CheckpointError: A wanted element is not stored, or a dtype differs. The parts may have been filled in part.
    """
    return _together(messenger, manifest.step, lambda: _load(store, manifest, parts))


def verify_rest(
    store: Store,
    manifest: Manifest,
    loaded: Collection[str],
    *,
    rank: int = 0,
    world_size: int = 1,
    messenger: RankMessenger | None = None,
) -> int:
    """Verify what no rank had to load: headers, and tensors that are kept for others; every rank must call.

    The ranks share the bytes between them.

    Args:
        store: The run's store.
        manifest: The checkpoint's.
        loaded: Keys whose part this rank has loaded; all ranks together have loaded such a key whole.
        rank: This rank.
        world_size: All ranks that load.
        messenger: Joins the ranks, so that a failure of one is raised by all.

    Returns:
        How many bytes were read.

    Raises:
        DamagedCheckpointError: A file is missing or is not what was written.
        UnreadableCheckpointError: The storage does not give a file, which may pass.
    """
    messenger = messenger if messenger is not None else SingleRankMessenger()
    # One bit a key: a large world's names would be many megabytes.
    bits = {key: 1 << number for number, key in enumerate(manifest.state.tensors)}
    gathered = messenger.gather(sum(bits.get(key, 0) for key in set(loaded)))
    known = messenger.broadcast(None if gathered is None else reduce(or_, gathered))
    rest = [key for key, bit in bits.items() if not known & bit]
    batches = _share(_whole_intervals(manifest, frozenset(rest)), rank, world_size)
    shards = manifest.shards[rank::world_size]

    def read() -> int:
        with _Reader(store, step_folder(manifest.step), batches, torch.device("cpu")) as reader:
            jobs = [reader.submit_header(shard) for shard in shards]
            jobs += [reader.submit(batch) for batch in batches]
            return sum(job.result() for job in jobs)

    return _together(messenger, manifest.step, read)


def _whole_intervals(manifest: Manifest, keys: frozenset[str]) -> list[Batch]:
    """Return the batches of all stored intervals of these tensors."""
    stored = [(shard, entry) for shard in manifest.shards for entry in shard.intervals]
    reads = [
        Read(wanted=0, stored=number, start=entry.interval.start, stop=entry.interval.stop)
        for number, (_, entry) in enumerate(stored)
        if entry.interval.key in keys
    ]
    return plan_batches(reads, stored, [0])


def _share(batches: Sequence[Batch], rank: int, world_size: int) -> list[Batch]:
    """Return a rank's share of batches, neighbours to the same rank, each about as many bytes as the others (pure)."""
    ends = list(accumulate(batch.num_bytes for batch in batches))
    total = ends[-1] if ends else 0
    return [
        batch for batch, end in zip(batches, ends, strict=True) if (end - batch.num_bytes) * world_size // total == rank
    ]


def _together(messenger: RankMessenger | None, step: int, read: Callable[[], int]) -> int:
    """Read on every rank, and raise an error of one on all; return the number of bytes read here."""
    messenger = messenger if messenger is not None else SingleRankMessenger()
    problem, damage, unread, num_bytes = None, None, None, 0
    cause: Exception | None = None
    try:
        num_bytes = read()
    except ShardDamage as error:
        damage, cause = str(error), error
    except FileNotFoundError as error:
        damage, cause = f"{error.filename or error} is missing", error
    except OSError as error:
        unread, cause = f"{error.filename or 'a shard'} can't be read ({error.strerror or error})", error
    except Exception as error:
        problem, cause = str(error), error
    problem, damage, unread = (agree(messenger, text) for text in (problem, damage, unread))
    if damage is not None:
        raise DamagedCheckpointError(damage) from cause
    if unread is not None:
        raise UnreadableCheckpointError(
            f"the checkpoint of step {step} could not be loaded: {unread}; repair the storage, "
            "then start the same command again"
        ) from cause
    if problem is not None:
        raise CheckpointError(f"the checkpoint of step {step} could not be loaded: {problem}") from cause
    return num_bytes


def _load(store: Store, manifest: Manifest, parts: Sequence[TensorPart]) -> int:
    """Plan the reads and carry them out."""
    for part in parts:
        spec = manifest.state.tensors.get(part.key)
        if spec is not None and spec.dtype != dtype_name(part.tensor.dtype):
            raise CoverError(
                f"{part.key} is stored as {spec.dtype}, but {dtype_name(part.tensor.dtype)} is wanted; "
                "resume with the model.dtype that the run started with"
            )
    stored = [(shard, entry) for shard in manifest.shards for entry in shard.intervals]
    reads = plan_reads([part.interval for part in parts], [entry.interval for _, entry in stored])
    batches = plan_batches(reads, stored, [part.start for part in parts])
    # Tensors that are not on the host are all on the rank's own device.
    device = max((part.tensor.device for part in parts), key=lambda one: one.type != "cpu", default=torch.device("cpu"))
    with _Reader(store, step_folder(manifest.step), batches, device) as reader:
        for batch, job in [(batch, reader.submit(batch, parts)) for batch in batches]:
            assert job.result() == batch.num_bytes
        return reader.num_bytes


class _Reader:
    """Reads batches in parallel: each thread has a file of its own open, all share its checksums."""

    def __init__(self, store: Store, folder: str, batches: Sequence[Batch], device: torch.device) -> None:
        self.num_bytes = sum(batch.num_bytes for batch in batches)
        self._store, self._folder = store, folder
        self._thread = threading.local()
        self._pool = ThreadPoolExecutor(NUM_THREADS, "checkpoint-load", initializer=choose_device, initargs=(device,))
        shards = {batch.shard.file: batch.shard for batch in batches}
        tables = self._pool.map(lambda shard: read_sums(store, folder, shard), shards.values())
        self._sums: dict[str, bytes] = {}
        try:
            self._sums = dict(zip(shards, tables, strict=True))
        except BaseException:
            self._pool.shutdown()
            raise
        self.num_bytes += sum(map(len, self._sums.values()))

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def submit(self, batch: Batch, parts: Sequence[TensorPart] = ()) -> Future[int]:
        """Read a batch on a thread of the pool; the future returns its size in bytes.

        Args:
            batch: The batch.
            parts: What its ranges fill; without any they are verified alone.
        """
        return self._pool.submit(self._read if parts else self._verify, batch, parts)

    def submit_header(self, shard: ShardEntry) -> Future[int]:
        """Verify a header on a thread of the pool; the future returns its size in bytes."""
        return self._pool.submit(self._verify_header, shard)

    def _verify_header(self, shard: ShardEntry) -> int:
        with self._store.open(f"{self._folder}/{shard.file}") as file:
            return check_header(file, shard)

    def _verify(self, batch: Batch, _: Sequence[TensorPart]) -> int:
        content = memoryview(bytearray(batch.num_bytes))
        self._fill(batch, content)
        self._check(batch, content)
        return batch.num_bytes

    def _check(self, batch: Batch, content: memoryview) -> list[memoryview]:
        """Verify a batch's bytes against their checksums, and return the bytes of each range."""
        sums = self._sums[batch.shard.file]
        found = []
        for read_range in batch.ranges:
            begin = read_range.stored.offset + read_range.start - batch.offset
            blocks = content[begin : begin + read_range.stop - read_range.start]
            check_blocks(batch.shard, read_range.stored, sums, blocks, read_range.start)
            found.append(blocks)
        return found

    def _read(self, batch: Batch, parts: Sequence[TensorPart]) -> int:
        only = batch.ranges[0] if len(batch.ranges) == 1 and batch.ranges[0].is_exact else None
        target = _bytes_in_place(parts[only.wanted].tensor) if only is not None else None
        if only is not None and target is not None:
            content = target[only.target : only.target + batch.num_bytes]
        else:
            content = memoryview(bytearray(batch.num_bytes))
        self._fill(batch, content)
        for read_range, blocks in zip(batch.ranges, self._check(batch, content), strict=True):
            if only is None or target is None:
                tensor = parts[read_range.wanted].tensor
                values = torch.frombuffer(
                    blocks[read_range.first - read_range.start : read_range.last - read_range.start], dtype=tensor.dtype
                )
                tensor.narrow(0, read_range.target // tensor.element_size(), values.numel()).copy_(values)
        return batch.num_bytes

    def _fill(self, batch: Batch, content: memoryview) -> None:
        """Read a batch's bytes."""
        if self._opened(batch.shard.file).read_into(batch.offset, content) < len(content):
            raise ShardDamage(f"{batch.shard.file} ends too early, in {batch.ranges[-1].stored.interval.key}")

    def _opened(self, name: str) -> StoredFile:
        """Return a file; each thread holds one open, since batches come file by file."""
        if getattr(self._thread, "name", None) != name:
            # The one before is closed as it is let go.
            self._thread.name, self._thread.file = name, self._store.open(f"{self._folder}/{name}")
        opened: StoredFile = self._thread.file
        return opened


def _bytes_in_place(tensor: torch.Tensor) -> memoryview | None:
    """Return a view of a tensor's memory as bytes, if it is contiguous in host memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    return memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
