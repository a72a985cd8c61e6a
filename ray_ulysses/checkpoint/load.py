"""Loads pieces at any world size: intersect what is wanted with what is stored, read those bytes, no more.

Every byte is verified while it is read. Nothing is unpickled, and no tensor is ever whole on a rank that does not hold
it whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import BinaryIO

import torch

from ray_ulysses.checkpoint.checksums import BlockSums
from ray_ulysses.checkpoint.errors import CheckpointError, DamagedCheckpointError, UnreadableCheckpointError
from ray_ulysses.checkpoint.exchange import Exchange, SingleExchange, agree
from ray_ulysses.checkpoint.intervals import CoverError, plan_reads
from ray_ulysses.checkpoint.manifest import Manifest, step_folder
from ray_ulysses.checkpoint.read_batches import Batch, plan_batches
from ray_ulysses.checkpoint.shards import ShardDamage, ShardEntry, check_blocks, read_sums, verified_chunks
from ray_ulysses.checkpoint.state import Piece, dtype_name
from ray_ulysses.storage import Store

NUM_THREADS = 8


def load_pieces(store: Store, manifest: Manifest, pieces: Sequence[Piece], exchange: Exchange | None = None) -> int:
    """Fill pieces in place from a committed checkpoint.

    Only the blocks that hold wanted bytes are read, in parallel, and each is held against its checksum. With an
    exchange every rank must call.

    Args:
        store: The run's store.
        manifest: The checkpoint's.
        pieces: What to fill: 1-D tensors, on any device, of the dtype that is stored.
        exchange: Joins the ranks, so that a failure of one is raised by all.

    Returns:
        How many bytes were read.

    Raises:
        DamagedCheckpointError: A file is missing or is not what was written.
        UnreadableCheckpointError: The storage does not give a file, which may pass.
        CheckpointError: A wanted element is not stored, or a dtype differs. The pieces may have been filled in part.
    """
    return _together(exchange, manifest.step, lambda: _load(store, manifest, pieces))


def verify_rest(
    store: Store,
    manifest: Manifest,
    loaded: Collection[str],
    *,
    rank: int = 0,
    world_size: int = 1,
    exchange: Exchange | None = None,
) -> int:
    """Verify what no rank had to load: headers, and tensors that are kept for others; every rank must call.

    The ranks share the shards between them.

    Args:
        store: The run's store.
        manifest: The checkpoint's.
        loaded: Keys whose bytes were verified while they were loaded.
        rank: This rank.
        world_size: All ranks that load.
        exchange: Joins the ranks, so that a failure of one is raised by all.

    Returns:
        How many bytes were read.

    Raises:
        DamagedCheckpointError: A file is missing or is not what was written.
        UnreadableCheckpointError: The storage does not give a file, which may pass.
    """
    folder = step_folder(manifest.step)

    def verify(shard: ShardEntry) -> int:
        return sum(verified_chunks(store, folder, shard, unless=loaded))

    def read() -> int:
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="checkpoint-verify") as pool:
            return sum(pool.map(verify, manifest.shards[rank::world_size]))

    return _together(exchange, manifest.step, read)


def _together(exchange: Exchange | None, step: int, read: Callable[[], int]) -> int:
    """Read on every rank, and raise on every rank what goes wrong on one; return what was read here, in bytes."""
    exchange = exchange if exchange is not None else SingleExchange()
    problem, damage, unread, num_bytes = None, None, None, 0
    cause: Exception | None = None
    try:
        num_bytes = read()
    except (ShardDamage, FileNotFoundError) as error:
        damage, cause = _damage_text(error), error
    except OSError as error:
        unread, cause = f"{error.filename or 'a shard'} can't be read ({error.strerror or error})", error
    except Exception as error:
        problem, cause = str(error), error
    problem, damage, unread = (agree(exchange, text) for text in (problem, damage, unread))
    if damage is not None:
        raise DamagedCheckpointError(damage) from cause
    if unread is not None:
        raise UnreadableCheckpointError(
            f"the checkpoint of step {step} could not be loaded: {unread}; see that the storage is there and "
            "whole, then start the same command again"
        ) from cause
    if problem is not None:
        raise CheckpointError(f"the checkpoint of step {step} could not be loaded: {problem}") from cause
    return num_bytes


def _damage_text(error: Exception) -> str:
    missing = getattr(error, "filename", None)
    return f"{missing or error} is missing" if isinstance(error, FileNotFoundError) else str(error)


def _load(store: Store, manifest: Manifest, pieces: Sequence[Piece]) -> int:
    """Plan the reads and carry them out."""
    for piece in pieces:
        spec = manifest.state.tensors.get(piece.key)
        if spec is not None and spec.dtype != dtype_name(piece.tensor.dtype):
            raise CoverError(
                f"{piece.key} is stored as {spec.dtype}, but {dtype_name(piece.tensor.dtype)} is wanted; "
                "resume with the model.dtype that the run started with"
            )
    stored = [(shard, entry) for shard in manifest.shards for entry in shard.intervals]
    reads = plan_reads([piece.interval for piece in pieces], [entry.interval for _, entry in stored])
    batches = plan_batches(reads, stored, [piece.start for piece in pieces])
    with _Reader(store, step_folder(manifest.step), batches) as reader:
        for batch, job in [(batch, reader.submit(batch, pieces)) for batch in batches]:
            assert job.result() == batch.num_bytes
        return reader.num_bytes


class _Reader:
    """Reads batches in parallel: each thread has its own stream of a file, all share its checksums."""

    def __init__(self, store: Store, folder: str, batches: Sequence[Batch]) -> None:
        self.num_bytes = sum(batch.num_bytes for batch in batches)
        self._store, self._folder = store, folder
        self._streams = ExitStack()
        self._thread = threading.local()
        self._lock = threading.Lock()
        self._pool = self._streams.enter_context(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="checkpoint-load"))
        shards = {batch.shard.file: batch.shard for batch in batches}
        tables = self._pool.map(lambda shard: read_sums(store, folder, shard), shards.values())
        self._sums: dict[str, BlockSums] = {}
        try:
            self._sums = dict(zip(shards, tables, strict=True))
        except BaseException:
            self._streams.close()
            raise
        self.num_bytes += sum(len(sums.values) for sums in self._sums.values())

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._streams.close()

    def submit(self, batch: Batch, pieces: Sequence[Piece]) -> Future[int]:
        """Read a batch on a thread of the pool; the future returns its size in bytes."""
        return self._pool.submit(self._read, batch, pieces)

    def _read(self, batch: Batch, pieces: Sequence[Piece]) -> int:
        only = batch.segments[0] if len(batch.segments) == 1 and batch.segments[0].is_exact else None
        target = _bytes_in_place(pieces[only.wanted].tensor) if only is not None else None
        if only is not None and target is not None:
            content = target[only.target : only.target + batch.num_bytes]
        else:
            content = memoryview(bytearray(batch.num_bytes))
        self._fill(batch, content)
        sums = self._sums[batch.shard.file]
        for segment in batch.segments:
            begin = segment.stored.offset + segment.start - batch.offset
            blocks = content[begin : begin + segment.stop - segment.start]
            check_blocks(batch.shard, segment.stored, sums, blocks, segment.start)
            if only is None or target is None:
                tensor = pieces[segment.wanted].tensor
                values = torch.frombuffer(
                    blocks[segment.first - segment.start : segment.last - segment.start], dtype=tensor.dtype
                )
                tensor.narrow(0, segment.target // tensor.element_size(), values.numel()).copy_(values)
        return batch.num_bytes

    def _fill(self, batch: Batch, content: memoryview) -> None:
        """Read a batch's bytes; a stream may give fewer than asked for at once."""
        stream = self._stream(batch.shard.file)
        stream.seek(batch.offset)
        filled = 0
        while filled < len(content):
            count = stream.readinto(content[filled:])  # type: ignore[attr-defined]  # BinaryIO lacks it
            if not count:
                raise ShardDamage(f"{batch.shard.file} ends too early, in {batch.segments[-1].stored.interval.key}")
            filled += count

    def _stream(self, file: str) -> BinaryIO:
        """Return this thread's stream of a file; one is held open, since batches come file by file."""
        if getattr(self._thread, "file", None) != file:
            if hasattr(self._thread, "stream"):
                self._thread.stream.close()
            stream = self._store.open(f"{self._folder}/{file}")
            with self._lock:
                self._streams.callback(stream.close)
            self._thread.file, self._thread.stream = file, stream
        opened: BinaryIO = self._thread.stream
        return opened


def _bytes_in_place(tensor: torch.Tensor) -> memoryview | None:
    """Return a view of a tensor's memory as bytes, if it is in one piece in host memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    return memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
