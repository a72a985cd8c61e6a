"""Weights from a checkpoint to files in bounded memory: a few chunks at a time, whatever the size of a tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from ray_ulysses.checkpoint.errors import CheckpointError, DamagedCheckpointError
from ray_ulysses.checkpoint.load import load_pieces
from ray_ulysses.checkpoint.manifest import Manifest, manifest_key
from ray_ulysses.checkpoint.state import Piece
from ray_ulysses.errors import RunError
from ray_ulysses.export.files import WeightFile
from ray_ulysses.export.tensors import Stored
from ray_ulysses.storage import Store

CHUNK_BYTES = 32 * 2**20
"""Most bytes that are read at once, as they are stored; the next chunk is read while one is written."""


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


def batches(stretches: Sequence[Stretch], most_bytes: int = CHUNK_BYTES) -> Iterator[list[Stretch]]:
    """Yield the stretches in order, long ones cut and short ones together, at most so many bytes a batch (pure)."""
    batch: list[Stretch] = []
    room = most_bytes
    for stretch in stretches:
        start, width = stretch.start, stretch.stored.dtype.itemsize
        while start < stretch.stop:
            if room < width:
                yield batch
                batch, room = [], most_bytes
            stop = min(stretch.stop, start + room // width)
            batch.append(Stretch(stored=stretch.stored, start=start, stop=stop))
            room -= (stop - start) * width
            start = stop
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

    def read(self, stretches: Sequence[Stretch]) -> list[torch.Tensor]:
        """Return the elements of each stretch, 1-D, in the type that they are published in.

        Raises:
            RunError: A file is missing or damaged, or a value does not fit the type.
        """
        pieces = [
            Piece(
                key=stretch.stored.key,
                start=stretch.start,
                tensor=torch.empty(stretch.stop - stretch.start, dtype=stretch.stored.dtype),
            )
            for stretch in stretches
        ]
        try:
            load_pieces(self._store, self._manifest, pieces)
        except CheckpointError as error:
            raise self._explained(error) from error
        # One at a time, so that what was read is let go of as it is converted.
        return [_converted(pieces.pop(0), stretch.stored.published) for stretch in stretches]

    def read_ahead(self, stretches: Sequence[Stretch]) -> Iterator[tuple[Stretch, torch.Tensor]]:
        """Yield the stretches in order, cut as needed, with their elements; the next batch is read meanwhile."""
        pending = batches(stretches)
        with ThreadPoolExecutor(1, thread_name_prefix="export-read") as reader:
            batch = next(pending, None)
            job = reader.submit(self.read, batch) if batch is not None else None
            while batch is not None and job is not None:
                tensors = job.result()
                following = next(pending, None)
                job = reader.submit(self.read, following) if following is not None else None
                yield from zip(batch, tensors, strict=True)
                del tensors
                batch = following

    def _explained(self, error: CheckpointError) -> RunError:
        step = self._manifest.step
        if isinstance(error, DamagedCheckpointError):
            if manifest_key(step) not in self._store.list(manifest_key(step)):
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
            _write_all(stream.fileno(), memoryview(file.header))
            for _, values in weights.read_ahead(stretches):
                _write_all(stream.fileno(), memoryview(values.view(torch.uint8).numpy()))  # type: ignore[arg-type]
            os.fsync(stream.fileno())
            assert stream.tell() == file.num_bytes, f"{file.name}: {stream.tell()} bytes, {file.num_bytes} expected"
        progress(file)


def _write_all(descriptor: int, content: memoryview) -> None:
    """Write all bytes; one call may write fewer."""
    while content:
        content = content[os.write(descriptor, content) :]


def _converted(piece: Piece, dtype: torch.dtype) -> torch.Tensor:
    values = piece.tensor.to(dtype)
    if dtype == torch.float16 and piece.tensor.dtype != dtype:
        lost = values.isinf() & piece.tensor.isfinite()
        if bool(lost.any()):
            largest = float(piece.tensor[lost].abs().max())
            raise RunError(
                f"--dtype=fp16: {piece.key.split('/', 1)[1]} holds {largest:.4g}, beyond the 65504 that fp16 can "
                "hold; use bf16 or fp32"
            )
    return values
