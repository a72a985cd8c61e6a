"""Streams weights from a checkpoint to files or into a model, in bounded memory for tensors of any size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from ray_ulysses.checkpoint.errors import CheckpointError, DamagedCheckpointError
from ray_ulysses.checkpoint.load import load_parts
from ray_ulysses.checkpoint.manifest import Manifest
from ray_ulysses.checkpoint.state import TensorPart
from ray_ulysses.config import Config
from ray_ulysses.config.schema import with_settings
from ray_ulysses.engine.model import build_model
from ray_ulysses.errors import RunError
from ray_ulysses.export.tensors import LowRank, PublishedTensor, Stored
from ray_ulysses.run_names import manifest_key, step_folder
from ray_ulysses.storage import Store

PART_BYTES = 8 * 2**20
"""Maximum stored bytes of a tensor to read at once."""

BATCH_BYTES = 24 * 2**20
"""Size of each of two buffers: one is filled while the other is written."""

_ALIGNMENT_BYTES = 64
_CONVERTED_ELEMENTS = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementRange:
    """Consecutive elements of a stored tensor."""

    stored: Stored
    start: int
    stop: int
    """Index after the last element."""

    @property
    def stored_bytes(self) -> int:
        """Size of the range in the checkpoint, in bytes."""
        return (self.stop - self.start) * self.stored.dtype.itemsize


def divide(wanted: ElementRange, borders: Sequence[int], max_bytes: int) -> Iterator[ElementRange]:
    """Divide a range into parts that each lie within one stored interval and begin at a checkpoint block.

    Such a part is read directly into its target, without copying the surrounding blocks.

    Args:
        wanted: The range.
        borders: Index of the first element of each stored interval of the tensor, ascending from 0.
        max_bytes: Maximum stored size of a part; a multiple of the checkpoint's block size.
    """
    most = max_bytes // wanted.stored.dtype.itemsize
    start = wanted.start
    while start < wanted.stop:
        place = bisect_right(borders, start) - 1
        begin = borders[place]
        end = borders[place + 1] if place + 1 < len(borders) else wanted.stop
        stop = min(wanted.stop, end, begin + ((start - begin) // most + 1) * most)
        yield ElementRange(stored=wanted.stored, start=start, stop=stop)
        start = stop


def batches(parts: Iterable[ElementRange], max_bytes: int) -> Iterator[list[ElementRange]]:
    """Group parts, in order, into batches of at most ``max_bytes`` stored bytes."""
    batch: list[ElementRange] = []
    num_bytes = 0
    for part in parts:
        if batch and num_bytes + _padded(part.stored_bytes) > max_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(part)
        num_bytes += _padded(part.stored_bytes)
    if batch:
        yield batch


class WeightReader:
    """Reads and verifies element ranges of one checkpoint's tensors."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self._buffers = [torch.empty(BATCH_BYTES, dtype=torch.uint8) for _ in range(2)]
        self._product: tuple[tuple[str, int], torch.Tensor, torch.Tensor | None] | None = None

    def read_ahead(self, ranges: Sequence[ElementRange]) -> Iterator[tuple[ElementRange, torch.Tensor]]:
        """Read the ranges in order, split as needed, and read the next batch in the background.

        Yields each part with its elements as a 1-D tensor of the published dtype. A tensor is valid only until the next
        iteration, because two buffers are reused.

        Raises:
            RunError: A file is missing or damaged, or a value exceeds the range of fp16.
        """
        borders = self._manifest.shards.starts
        parts = (part for wanted in ranges for part in divide(wanted, borders(wanted.stored.key), PART_BYTES))
        with ThreadPoolExecutor(1, thread_name_prefix="export-read") as reader:
            following: Future[list[TensorPart]] | None = None
            held: list[ElementRange] = []
            for number, batch in enumerate(batches(parts, BATCH_BYTES)):
                ready, job = following, reader.submit(self._read, batch, self._buffers[number % 2])
                if ready is not None:
                    yield from self._converted(held, ready.result())
                following, held = job, batch
            if following is not None:
                yield from self._converted(held, following.result())

    def _converted(
        self, ranges: Sequence[ElementRange], parts: Sequence[TensorPart]
    ) -> Iterator[tuple[ElementRange, torch.Tensor]]:
        """Yield the elements in the published dtype, a bounded number at a time."""
        for wanted, part in zip(ranges, parts, strict=True):
            for first in range(0, part.tensor.numel(), _CONVERTED_ELEMENTS):
                read = part.tensor[first : first + _CONVERTED_ELEMENTS]
                start = wanted.start + first
                if wanted.stored.low_rank is not None:
                    read = self._merged(wanted.stored, start, read.float())
                values = read.to(wanted.stored.published)
                if values.dtype == torch.float16 and bool(values.isinf().any()):
                    _refuse_overflow(wanted.stored.key, read)
                yield ElementRange(stored=wanted.stored, start=start, stop=start + values.numel()), values

    def _merged(self, stored: Stored, start: int, read: torch.Tensor) -> torch.Tensor:
        """Return consecutive elements of a weight after a merge in fp32, computed as PEFT does."""
        assert stored.low_rank is not None
        size = torch.Size(stored.shape[-2:]).numel()
        # Elements of one matrix at a time, because the experts of a layer are large.
        parts = []
        for number in range(start // size, (start + read.numel() - 1) // size + 1):
            first, last = max(start, number * size), min(start + read.numel(), (number + 1) * size)
            added, factors = self._update(stored, stored.low_rank, number)
            part = read[first - start : last - start] + added[first - number * size : last - number * size]
            parts.append(part if factors is None else part * factors[first:last])
        return torch.cat(parts)

    def _update(self, stored: Stored, low_rank: LowRank, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the product to add to one matrix, 1-D in fp32, and DoRA's factor of each element of the sum."""
        if self._product is None or self._product[0] != (stored.key, number):
            a, b = (self._whole(one) for one in (low_rank.a, low_rank.b))
            count = torch.Size(stored.shape[:-2]).numel()
            a, b = a.view(count, -1, a.shape[-1])[number], b.view(b.shape[0], -1, count)[..., number]
            added = ((b @ a).T if low_rank.is_transposed else b @ a) * low_rank.scale
            factors = None
            if low_rank.magnitude is not None:
                total = self._whole(replace(stored, low_rank=None)) + added
                inputs = 0 if low_rank.is_transposed else 1
                factors = self._whole(low_rank.magnitude) / torch.linalg.norm(total, dim=inputs)
                factors = factors.unsqueeze(inputs).expand(total.shape).flatten()
            self._product = (stored.key, number), added.flatten(), factors
        return self._product[1:]

    def _whole(self, stored: Stored) -> torch.Tensor:
        wanted = ElementRange(stored=stored, start=0, stop=torch.Size(stored.shape).numel())
        (part,) = self._read([wanted], torch.empty(wanted.stored_bytes, dtype=torch.uint8))
        return part.tensor.float().view(stored.shape)

    def _read(self, batch: Sequence[ElementRange], buffer: torch.Tensor) -> list[TensorPart]:
        parts, offset = [], 0
        for part in batch:
            view = buffer[offset : offset + part.stored_bytes].view(part.stored.dtype)
            parts.append(TensorPart(key=part.stored.key, start=part.start, tensor=view))
            offset += _padded(part.stored_bytes)
        self._load(self._manifest, parts)
        return parts

    def _load(self, manifest: Manifest, parts: Sequence[TensorPart]) -> None:
        step = manifest.step
        try:
            load_parts(self._store, manifest, parts)
        except DamagedCheckpointError as error:
            try:
                is_gone = manifest_key(step) not in self._store.list(step_folder(step))
            except OSError as silence:
                raise RunError(
                    f"the checkpoint of step {step} can't be read: {error}; its storage does not respond "
                    f"({silence.strerror or silence})"
                ) from error
            if is_gone:
                raise RunError(
                    f"the checkpoint of step {step} was deleted during the export, because the run continued and "
                    "retains only recent checkpoints; try again, or increase checkpoint.keep_last"
                ) from error
            raise RunError(
                f"the checkpoint of step {step} is damaged: {error}; select another step with --step, or restore the "
                "file"
            ) from error
        except CheckpointError as error:
            raise RunError(str(error)) from error


def element_range(tensor: PublishedTensor) -> ElementRange:
    """Return a published tensor's range of stored elements."""
    return ElementRange(stored=tensor.stored, start=tensor.start, stop=tensor.start + tensor.num_elements)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _refuse_overflow(key: str, read: torch.Tensor) -> None:
    finite = read[read.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    if largest > torch.finfo(torch.float16).max:
        raise RunError(
            f"--dtype=fp16: {key.split('/', 1)[1]} has the value {largest:.4g}, which exceeds fp16's maximum of 65504; "
            "use bf16 or fp32"
        )


@torch.no_grad()
def live_model(
    config: Config,
    model_config: Mapping[str, Any],
    stored: Mapping[str, Stored],
    weights: WeightReader,
    dtype: str = "fp32",
) -> tuple[Any, list[str]]:
    """Build a model as in training, on the CPU, and load a checkpoint's weights.

    Returns:
        The model, and the names of weights that are not finite.
    """
    from transformers.initialization import no_init_weights

    with no_init_weights():
        # Skip initialization and the base weights, because the checkpoint overwrites every weight.
        filled = {"model.init": "random", "model.config": dict(model_config), "model.dtype": dtype}
        model: Any = build_model(with_settings(as_stored(config), {**filled, "model.base_dtype": "bf16"}))
    # Transformers 5.23 ties weights during initialization, which is skipped here.
    model.tie_weights()
    return model, _fill(model, stored, weights)


def as_stored(config: Config) -> Config:
    """Return a configuration that builds a model whose adapter a checkpoint has, to compute no gradients."""
    adapter = config.model.adapter
    adapter = None if adapter is None else adapter.model_copy(update={"from_": None})
    return with_settings(config, {"model.adapter": adapter, "memory.gradient_checkpointing": False})


def _fill(model: Any, stored: Mapping[str, Stored], weights: WeightReader) -> list[str]:
    """Load a model's tensors, and return the names of weights that are not finite."""
    targets: dict[str, torch.Tensor] = model.state_dict()
    by_key = {place.key: targets[name] for name, place in stored.items()}
    not_finite: dict[str, None] = {}
    ranges = [ElementRange(stored=place, start=0, stop=targets[name].numel()) for name, place in stored.items()]
    for part, values in weights.read_ahead(ranges):
        target = by_key[part.stored.key]
        assert target.is_contiguous(), f"{part.stored.key} is not contiguous in the model"
        target.view(-1)[part.start : part.stop].copy_(values)
        # Buffers such as attention masks may contain infinities.
        kind, name = part.stored.key.split("/", 1)
        if kind != "buffer" and not bool(values.isfinite().all()):
            not_finite[name] = None
    return list(not_finite)
