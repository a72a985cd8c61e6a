"""Checkpoint loading at any world size: each rank reads only the bytes of its own parts.

Every byte is verified while it is read. Nothing is unpickled, and no rank materializes more of a tensor than its part.
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
from ray_ulysses.checkpoint.intervals import CoverError, Interval, Read, plan_reads
from ray_ulysses.checkpoint.manifest import Manifest
from ray_ulysses.checkpoint.messenger import RankMessenger, SingleRankMessenger, agree
from ray_ulysses.checkpoint.shard_table import ShardTable
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
    """A range of complete blocks to read from a stored interval, and the bytes in it to copy into a part."""

    stored: StoredInterval
    start: int
    """Byte offset in the interval at which the read starts; a multiple of the block size."""
    stop: int
    """Byte offset in the interval at which the read ends, exclusive."""
    wanted: int
    """Index of the part to fill."""
    first: int
    """Byte offset in the interval at which the copy starts."""
    last: int
    """Byte offset in the interval at which the copy ends, exclusive."""
    target: int
    """Byte offset in the part at which the copied bytes start."""

    @property
    def is_exact(self) -> bool:
        """Whether all bytes that are read are copied."""
        return (self.start, self.stop) == (self.first, self.last)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A contiguous range of a file, read with one request."""

    shard: ShardEntry
    offset: int
    """Byte offset in the file."""
    num_bytes: int
    ranges: tuple[ReadRange, ...]
    """Ranges in the batch, in file order."""


def plan_batches(
    reads: Sequence[Read], stored: Sequence[tuple[ShardEntry, StoredInterval]], starts: Sequence[int]
) -> list[Batch]:
    """Group reads into batches of at most `CHUNK_BYTES`, file by file and from front to back.

    `stored` is indexed by `Read.stored`. `starts` contains the index of each wanted part's first element in its tensor.
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


def plan_load(shards: ShardTable, wanted: Sequence[Interval]) -> list[Batch]:
    """Return the batches that read the wanted intervals from a checkpoint.

    Raises:
        CoverError: A wanted element is not stored.
    """
    stored = shards.holding(wanted)
    reads = plan_reads(wanted, [one.interval for _, one in stored])
    return plan_batches(reads, stored, [want.start for want in wanted])


def _ranges(read: Read, stored: StoredInterval, part_start: int) -> Iterator[ReadRange]:
    """Split a read into ranges that consist of complete blocks and span at most `CHUNK_BYTES`."""
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
    """Return whether a range directly follows the batch `held` and fits into it: at most `CHUNK_BYTES` in all."""
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
    """Fill this rank's parts in place from a committed checkpoint, and return the number of bytes read.

    Blocks that contain requested elements are read in parallel and verified against their checksums. After an error,
    some parts may already be overwritten. The parts are 1-D tensors, on any device and with the stored dtype. If
    `messenger` is given, all of its ranks must call this function, and all of them raise if one fails.

    Raises:
        DamagedCheckpointError: A file is missing or damaged.
        UnreadableCheckpointError: The storage returned an error, which may be temporary.
        CheckpointError: An element is not stored, or a dtype differs.
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
    """Verify the shard headers and the tensors that no rank loaded; all ranks must call this function.

    Each rank reads about the same number of bytes, which is the result, and all ranks raise if one fails. `loaded`
    contains the keys of the tensors whose parts this rank loaded. Together, all ranks' parts cover these tensors.

    Raises:
        DamagedCheckpointError: A file is missing or damaged.
        UnreadableCheckpointError: The storage returned an error, which may be temporary.
    """
    messenger = messenger if messenger is not None else SingleRankMessenger()
    # One bit per key, because the keys themselves would take up many megabytes at a large world size.
    bits = {key: 1 << number for number, key in enumerate(manifest.state.tensors)}
    gathered = messenger.gather(sum(bits.get(key, 0) for key in set(loaded)))
    known = messenger.broadcast(None if gathered is None else reduce(or_, gathered))
    rest = [key for key, bit in bits.items() if not known & bit]
    batches = _share_of(manifest.shards, frozenset(rest), rank, world_size)
    shards = manifest.shards[rank::world_size]

    def read() -> int:
        with _Reader(store, step_folder(manifest.step), batches, torch.device("cpu")) as reader:
            jobs = [reader.submit_header(shard) for shard in shards]
            jobs += [reader.submit(batch) for batch in batches]
            return sum(job.result() for job in jobs)

    return _together(messenger, manifest.step, read)


def _share_of(shards: ShardTable, keys: frozenset[str], rank: int, world_size: int) -> list[Batch]:
    """Return a rank's contiguous share of the batches that read some tensors; all ranks' shares are about equal."""
    stored = shards.of(keys)
    ends = list(accumulate(held.num_bytes for held in stored))
    total, batches = ends[-1] if ends else 0, []
    for number, (held, end) in enumerate(zip(stored, ends, strict=True)):
        begin = end - held.num_bytes
        # Only shards that contain bytes of the share are planned.
        if begin < end and begin * world_size // total <= rank <= (end - 1) * world_size // total:
            shard = shards[number]
            places = enumerate(one.interval for one in held)
            whole = [Read(wanted=0, stored=at, start=one.start, stop=one.stop) for at, one in places]
            for batch in plan_batches(whole, [(shard, one) for one in held], [0]):
                if begin * world_size // total == rank:
                    batches.append(batch)
                begin += batch.num_bytes
    return batches


def _together(messenger: RankMessenger | None, step: int, read: Callable[[], int]) -> int:
    """Return this rank's result of `read`, or raise on all ranks if any fails. All ranks must call this function."""
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
    for part in parts:
        spec = manifest.state.tensors.get(part.key)
        if spec is not None and spec.dtype != dtype_name(part.tensor.dtype):
            raise CoverError(
                f"{part.key} is stored as {spec.dtype}, but the model uses {dtype_name(part.tensor.dtype)}; "
                "resume with the model.dtype that the run started with"
            )
    batches = plan_load(manifest.shards, [part.interval for part in parts])
    # Each part is on the host or on this rank's accelerator.
    device = max((part.tensor.device for part in parts), key=lambda one: one.type != "cpu", default=torch.device("cpu"))
    with _Reader(store, step_folder(manifest.step), batches, device) as reader:
        for batch, job in [(batch, reader.submit(batch, parts)) for batch in batches]:
            assert job.result() == batch.num_bytes
        return reader.num_bytes


class _Reader:
    """Thread pool that reads and verifies batches; each thread opens its own files, and checksum tables are shared."""

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
        """Schedule the read of a batch into `parts`, or only its verification; the result is its size in bytes."""
        return self._pool.submit(self._read, batch, parts)

    def submit_header(self, shard: ShardEntry) -> Future[int]:
        """Schedule the verification of a shard's header; the future's result is the header's size in bytes."""
        return self._pool.submit(self._verify_header, shard)

    def _verify_header(self, shard: ShardEntry) -> int:
        with self._store.open(f"{self._folder}/{shard.file}") as file:
            return check_header(file, shard)

    def _check(self, batch: Batch, content: memoryview) -> list[memoryview]:
        """Verify the content of a batch against the block checksums, and return the content of each range."""
        sums = self._sums[batch.shard.file]
        found = []
        for read_range in batch.ranges:
            begin = read_range.stored.offset + read_range.start - batch.offset
            blocks = content[begin : begin + read_range.stop - read_range.start]
            check_blocks(batch.shard, read_range.stored, sums, blocks, read_range.start)
            found.append(blocks)
        return found

    def _read(self, batch: Batch, parts: Sequence[TensorPart]) -> int:
        only = batch.ranges[0] if parts and len(batch.ranges) == 1 and batch.ranges[0].is_exact else None
        target = _bytes_in_place(parts[only.wanted].tensor) if only is not None else None
        if only is not None and target is not None:
            content = target[only.target : only.target + batch.num_bytes]
        else:
            content = memoryview(bytearray(batch.num_bytes))
        self._fill(batch, content)
        for read_range, blocks in zip(batch.ranges, self._check(batch, content), strict=True):
            if parts and (only is None or target is None):
                tensor = parts[read_range.wanted].tensor
                values = torch.frombuffer(
                    blocks[read_range.first - read_range.start : read_range.last - read_range.start], dtype=tensor.dtype
                )
                tensor.narrow(0, read_range.target // tensor.element_size(), values.numel()).copy_(values)
        return batch.num_bytes

    def _fill(self, batch: Batch, content: memoryview) -> None:
        if self._opened(batch.shard.file).read_into(batch.offset, content) < len(content):
            raise ShardDamage(f"{batch.shard.file} is truncated within {batch.ranges[-1].stored.interval.key}")

    def _opened(self, name: str) -> StoredFile:
        # One open file per thread is enough, because batches are ordered by file.
        if getattr(self._thread, "name", None) != name:
            # The thread's previous file is closed when it is garbage-collected.
            self._thread.name, self._thread.file = name, self._store.open(f"{self._folder}/{name}")
        opened: StoredFile = self._thread.file
        return opened


def _bytes_in_place(tensor: torch.Tensor) -> memoryview | None:
    """Return a writable view of the tensor's bytes, or None if the tensor is not contiguous in host memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    return memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
