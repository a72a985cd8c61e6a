"""Loads pieces at any world size: intersect what is wanted with what is stored, read those bytes, no more."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import torch

from ray_ulysses.checkpoint.exchange import Exchange, SingleExchange, agree
from ray_ulysses.checkpoint.intervals import CoverError, Read, plan_reads
from ray_ulysses.checkpoint.manifest import Manifest, step_folder
from ray_ulysses.checkpoint.save import CheckpointError
from ray_ulysses.checkpoint.shards import ShardEntry, StoredInterval
from ray_ulysses.checkpoint.state import Piece, dtype_name
from ray_ulysses.storage import Store

_NUM_THREADS = 4
_Stored = list[tuple[ShardEntry, StoredInterval]]


def load_pieces(store: Store, manifest: Manifest, pieces: Sequence[Piece], exchange: Exchange | None = None) -> int:
    """Fill pieces in place from a committed checkpoint.

    Only the bytes wanted are read, file by file in parallel; an interval that is read whole is held against
    its checksum once more. With an exchange every rank must call.

    Args:
        store: The run's store.
        manifest: The checkpoint's.
        pieces: What to fill: 1-D tensors, on any device, of the dtype that is stored.
        exchange: Joins the ranks, so that a failure of one is raised by all.

    Returns:
        How many bytes were read.

    Raises:
        CheckpointError: A wanted element is not stored, a dtype differs, or a file can't be read or was
        altered.
    """
    exchange = exchange if exchange is not None else SingleExchange()
    problem, cause, num_bytes = None, None, 0
    try:
        num_bytes = _load(store, manifest, pieces)
    except Exception as error:
        problem, cause = str(error), error
    problem = agree(exchange, problem)
    if problem is not None:
        raise CheckpointError(f"the checkpoint of step {manifest.step} could not be loaded: {problem}") from cause
    return num_bytes


def _load(store: Store, manifest: Manifest, pieces: Sequence[Piece]) -> int:
    """Plan the reads and carry them out."""
    for piece in pieces:
        spec = manifest.state.tensors.get(piece.key)
        if spec is not None and spec.dtype != dtype_name(piece.tensor.dtype):
            raise CoverError(
                f"{piece.key} is stored as {spec.dtype}, but {dtype_name(piece.tensor.dtype)} is wanted; "
                "resume with the model.dtype that the run started with"
            )
    stored: _Stored = [(shard, entry) for shard in manifest.shards for entry in shard.intervals]
    reads = plan_reads([piece.interval for piece in pieces], [entry.interval for _, entry in stored])
    by_file = [list(group) for _, group in groupby(reads, key=lambda read: stored[read.stored][0].file)]
    folder = step_folder(manifest.step)
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="checkpoint-load") as pool:
        jobs = [pool.submit(_read_file, store, folder, stored, group, pieces) for group in by_file]
        return sum(job.result() for job in jobs)


def _read_file(store: Store, folder: str, stored: _Stored, reads: Sequence[Read], pieces: Sequence[Piece]) -> int:
    """Carry out the reads of one file, from front to back; return the bytes read."""
    num_bytes = 0
    file = stored[reads[0].stored][0].file
    with store.open(f"{folder}/{file}") as stream:
        for read in reads:
            entry, piece = stored[read.stored][1], pieces[read.wanted]
            item_bytes = entry.num_bytes // (entry.interval.stop - entry.interval.start)
            stream.seek(entry.offset + (read.start - entry.interval.start) * item_bytes)
            content = bytearray(stream.read((read.stop - read.start) * item_bytes))
            if len(content) != (read.stop - read.start) * item_bytes:
                raise CoverError(f"{file} ends too early")
            if len(content) == entry.num_bytes and zlib.crc32(content) != entry.crc32:
                raise CoverError(f"{file}: the checksum of {entry.interval.key} is wrong")
            values = torch.frombuffer(content, dtype=piece.tensor.dtype)
            piece.tensor.narrow(0, read.start - piece.start, read.stop - read.start).copy_(values)
            num_bytes += len(content)
    return num_bytes
