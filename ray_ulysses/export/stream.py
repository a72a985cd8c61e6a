"""Weights from a checkpoint to files in bounded memory: a few chunks at a time, whatever the size of a tensor."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from ray_ulysses.checkpoint.errors import CheckpointError, DamagedCheckpointError
from ray_ulysses.checkpoint.load import load_parts
from ray_ulysses.checkpoint.manifest import Manifest
from ray_ulysses.checkpoint.state import TensorPart
from ray_ulysses.errors import RunError
from ray_ulysses.export.files import WeightFile
from ray_ulysses.export.tensors import Stored
from ray_ulysses.run_names import manifest_key
from ray_ulysses.storage import Store
from ray_ulysses.storage.atomic import write_all

PART_BYTES = 8 * 2**20
"""Most bytes of a tensor that are read in one go, as they are stored."""

BATCH_BYTES = 24 * 2**20
"""Size of a buffer, of which there are two: one is filled while the other is written."""

_ALIGNMENT_BYTES = 64
_CONVERTED_ELEMENTS = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive elements of a stored tensor.

    Attributes:
        stored: The tensor.
        start: The first element.
        stop: The element after the last.
    """

    stored: Stored
    start: int
    stop: int

    @property
    def stored_bytes(self) -> int:
        """Return how many bytes it takes in the checkpoint."""
        return (self.stop - self.start) * self.stored.dtype.itemsize


def cut(stretch: Stretch, borders: Sequence[int], most_bytes: int) -> Iterator[Stretch]:
    """Yield a stretch in parts that lie in one stored interval each and begin where whole blocks of it do (pure).

    Such a part is read straight to where it is wanted, without a copy of the blocks around it.

    Args:
        stretch: What is wanted.
        borders: First elements of the tensor's stored intervals, ascending; the first is 0.
        most_bytes: Most bytes of a part, as it is stored: a multiple of the checkpoint's block.
    """
    most = most_bytes // stretch.stored.dtype.itemsize
    start = stretch.start
    while start < stretch.stop:
        place = bisect_right(borders, start) - 1
        begin = borders[place]
        end = borders[place + 1] if place + 1 < len(borders) else stretch.stop
        stop = min(stretch.stop, end, begin + ((start - begin) // most + 1) * most)
        yield Stretch(stored=stretch.stored, start=start, stop=stop)
        start = stop


def batches(parts: Iterable[Stretch], most_bytes: int) -> Iterator[list[Stretch]]:
    """Yield parts in order, in batches of at most so many bytes as they are stored (pure)."""
    batch: list[Stretch] = []
    num_bytes = 0
    for part in parts:
        if batch and num_bytes + _padded(part.stored_bytes) > most_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(part)
        num_bytes += _padded(part.stored_bytes)
    if batch:
        yield batch


class Weights:
    """The tensors of one checkpoint, read by stretches and verified while they are read.

    Args:
        store: Where the checkpoint lies.
        manifest: Its manifest.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self._buffers = [torch.empty(BATCH_BYTES, dtype=torch.uint8) for _ in range(2)]
        self._borders: dict[str, list[int]] = {}
        for shard in manifest.shards:
            for entry in shard.intervals:
                if entry.interval.stop > entry.interval.start:
                    self._borders.setdefault(entry.interval.key, []).append(entry.interval.start)
        for borders in self._borders.values():
            borders.sort()

    def read_ahead(self, stretches: Sequence[Stretch]) -> Iterator[tuple[Stretch, torch.Tensor]]:
        """Yield the stretches in order, cut as needed, with their elements; the next batch is read meanwhile.

        Elements are 1-D, in the type that they are published in, and good until the next ones are asked for: two
        buffers are all the memory that this takes.

        Raises:
            RunError: A file is missing or damaged, or a value does not fit the type.
        """
        parts = (
            part
            for stretch in stretches
            for part in cut(stretch, self._borders.get(stretch.stored.key, [0]), PART_BYTES)
        )
        with ThreadPoolExecutor(1, thread_name_prefix="export-read") as reader:
            following: Future[list[TensorPart]] | None = None
            held: list[Stretch] = []
            for number, batch in enumerate(batches(parts, BATCH_BYTES)):
                ready, job = following, reader.submit(self._read, batch, self._buffers[number % 2])
                if ready is not None:
                    yield from _converted(held, ready.result())
                following, held = job, batch
            if following is not None:
                yield from _converted(held, following.result())

    def _read(self, batch: Sequence[Stretch], buffer: torch.Tensor) -> list[TensorPart]:
        """Fill views of a buffer with the elements of each stretch, as they are stored."""
        parts, offset = [], 0
        for stretch in batch:
            view = buffer[offset : offset + stretch.stored_bytes].view(stretch.stored.dtype)
            parts.append(TensorPart(key=stretch.stored.key, start=stretch.start, tensor=view))
            offset += _padded(stretch.stored_bytes)
        try:
            load_parts(self._store, self._manifest, parts)
        except CheckpointError as error:
            raise self._explained(error) from error
        return parts

    def _explained(self, error: CheckpointError) -> RunError:
        step = self._manifest.step
        if isinstance(error, DamagedCheckpointError):
            try:
                is_gone = manifest_key(step) not in self._store.list(manifest_key(step))
            except OSError as silence:
                return RunError(
                    f"the checkpoint of step {step} can't be read: {error}, and its storage does not answer "
                    f"({silence.strerror or silence}); nothing was exported"
                )
            if is_gone:
                return RunError(
                    f"the checkpoint of step {step} was deleted while it was exported: the run went on and keeps only "
                    "its newest; export again, or raise checkpoint.keep_last"
                )
            return RunError(
                f"the checkpoint of step {step} is damaged: {error}; nothing was exported. Export another step, or "
                "restore the file"
            )
        return RunError(f"{error}; nothing was exported")


def write_files(
    folder: Path, files: Sequence[WeightFile], weights: Weights, progress: Callable[[WeightFile], None]
) -> None:
    """Write the files of a model durably, each from front to back.

    Args:
        folder: Where to; the files must be new.
        files: What they hold.
        weights: Where the elements come from.
        progress: Is told of each file when it is there.

    Raises:
        RunError: The checkpoint can't be read.
        OSError: A file can't be written.
    """
    for file in files:
        stretches = [
            Stretch(stored=tensor.stored, start=tensor.start, stop=tensor.start + tensor.num_elements)
            for tensor in file.tensors
        ]
        with (folder / file.name).open("xb", buffering=0) as stream:
            write_all(stream, memoryview(file.header))
            for _, values in weights.read_ahead(stretches):
                write_all(stream, memoryview(values.view(torch.uint8).numpy()))  # type: ignore[arg-type]
            os.fsync(stream.fileno())
            assert stream.tell() == file.num_bytes, f"{file.name}: {stream.tell()} bytes, {file.num_bytes} expected"
        progress(file)


def _padded(num_bytes: int) -> int:
    """Return a size rounded up, so that whatever comes behind it in a buffer is aligned."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _converted(stretches: Sequence[Stretch], parts: Sequence[TensorPart]) -> Iterator[tuple[Stretch, torch.Tensor]]:
    """Yield what was read in the type that it is published in, a little at a time."""
    for stretch, part in zip(stretches, parts, strict=True):
        for first in range(0, part.tensor.numel(), _CONVERTED_ELEMENTS):
            read = part.tensor[first : first + _CONVERTED_ELEMENTS]
            values = read.to(stretch.stored.published)
            if values.dtype == torch.float16 and bool(values.isinf().any()):
                _refuse_overflow(stretch.stored.key, read)
            start = stretch.start + first
            yield Stretch(stored=stretch.stored, start=start, stop=start + values.numel()), values


def _refuse_overflow(key: str, read: torch.Tensor) -> None:
    """Refuse finite values that fp16 can't hold."""
    finite = read[read.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    if largest > torch.finfo(torch.float16).max:
        raise RunError(
            f"--dtype=fp16: {key.split('/', 1)[1]} holds {largest:.4g}, beyond the 65504 that fp16 can hold; use "
            "bf16 or fp32"
        )
