"""Averages the parameters of several checkpoints of a run while they are read, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ray_ulysses.checkpoint.choice import begun_steps, examine
from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.checkpoint.manifest import Manifest
from ray_ulysses.checkpoint.state import WEIGHT_KINDS, TensorPart
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export.stream import ElementRange, WeightReader
from ray_ulysses.storage import Store

_MASTER, _MODEL = "fp32/", "model/"


def averaged_checkpoints(store: Store, newest: Manifest, count: int) -> tuple[Manifest, ...]:
    """Return the last ``count`` committed checkpoints of a run up to ``newest``, in order of their steps.

    Raises:
        UserError: The run has fewer checkpoints, or they belong to different models, stages or branches.
        RunError: A checkpoint is unusable.
        OSError: The store can't be read.
    """
    setting, lineage = f"--average={count}", read_lineage(store)
    found = [newest]
    for step in reversed([one for one in begun_steps(store) if one < newest.step]):
        if len(found) == count:
            break
        manifest = examine(store, step, "sizes", lineage)
        if isinstance(manifest, Manifest):
            found.append(manifest)
        elif not manifest.is_absent and manifest.kind != "superseded":
            raise RunError(f"{setting}: {manifest}; use a smaller --average, or restore the checkpoint")
    if len(found) < count:
        steps = ", ".join(f"{one.step:,}" for one in reversed(found))
        raise UserError(
            f"{setting}: the run has {len(found)} committed checkpoints up to step {newest.step:,} (of steps {steps}); "
            "use a smaller --average, or keep more checkpoints (checkpoint.keep_last)"
        )
    for one in found[1:]:
        if (difference := _difference(newest, one)) is not None:
            raise UserError(
                f"{setting}: the checkpoints of steps {one.step:,} and {newest.step:,} can't be averaged, because "
                f"{difference}; use a smaller --average, or another --step"
            )
    return tuple(reversed(found))


def _difference(newest: Manifest, other: Manifest) -> str | None:
    def weights(manifest: Manifest) -> dict[str, object]:
        return {key: spec for key, spec in manifest.state.tensors.items() if key.split("/", 1)[0] in WEIGHT_KINDS}

    if weights(newest) != weights(other) or newest.state.tied != other.state.tied:
        return "they contain different models"
    if newest.meta.stage != other.meta.stage:
        return f"they belong to the stages {other.meta.stage!r} and {newest.meta.stage!r}"
    if newest.meta.cursor.get("plan_id") != other.meta.cursor.get("plan_id"):
        return "the data plan was changed between them, as by a branch of the run"
    return None


class AverageReader(WeightReader):
    """Reads the mean of several checkpoints' tensors: their fp32 sum, in order of the steps, divided by their number.

    Weights that the checkpoints also store rounded are averaged from their fp32 masters. Frozen weights and buffers are
    read from the newest checkpoint.
    """

    def __init__(self, store: Store, manifests: Sequence[Manifest]) -> None:
        super().__init__(store, manifests[-1])
        self._manifests = manifests

    def _read(self, batch: Sequence[ElementRange], buffer: torch.Tensor) -> list[TensorPart]:
        others = iter(super()._read([one for one in batch if not _is_trained(one)], buffer))
        return [self._mean(one) if _is_trained(one) else next(others) for one in batch]

    def _mean(self, wanted: ElementRange) -> TensorPart:
        stored = wanted.stored.key
        key = _MASTER + stored.removeprefix(_MODEL) if stored.startswith(_MODEL) else stored
        total, read = (torch.zeros(wanted.stop - wanted.start) for _ in range(2))
        for manifest in self._manifests:
            self._load(manifest, [TensorPart(key=key, start=wanted.start, tensor=read)])
            total += read
        return TensorPart(key=stored, start=wanted.start, tensor=total / len(self._manifests))


def _is_trained(wanted: ElementRange) -> bool:
    return wanted.stored.key.startswith((_MASTER, _MODEL))
