"""Opens a run's checkpoint, with the frozen weights of ``model.base_dtype``, which the checkpoint does not contain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from ray_ulysses.checkpoint.manifest import Manifest
from ray_ulysses.checkpoint.state import TensorPart, TensorSpec, dtype_name
from ray_ulysses.config import Config
from ray_ulysses.config.reference_to_checkpoint import Which
from ray_ulysses.engine.base_fingerprint import model_fingerprint
from ray_ulysses.engine.model import adapted_meta_model, build_model, torch_dtype
from ray_ulysses.engine.plugins import load_plugins
from ray_ulysses.engine.quantized_base import Quantized
from ray_ulysses.engine.zero_state import FROZEN, named_tensors
from ray_ulysses.errors import UserError
from ray_ulysses.export.stream import WeightReader, as_stored
from ray_ulysses.inspect.run_data import with_planned_context
from ray_ulysses.run.secrets_file import stored_config
from ray_ulysses.run.settings import config_of_checkpoint
from ray_ulysses.run.start_point import find_checkpoint
from ray_ulysses.storage import Store
from ray_ulysses.storage.place import Place


def open_checkpoint(run_dir: Place, which: Which, *, trust_run: bool) -> tuple[Config, Store, Manifest]:
    """Return a run's configuration at a checkpoint, the checkpoint's store, and its manifest.

    For a run with ``model.base_dtype``, the manifest describes the frozen weights too.

    Raises:
        UserError: The checkpoint does not exist, or the configuration of the run or the model can't be read.
        RunError: The checkpoint is damaged, or its storage does not respond.
    """
    config = stored_config(run_dir, trust_run=trust_run)
    if trust_run:
        load_plugins(config)
    store, manifest = find_checkpoint(config, run_dir, which, trust_run=trust_run)
    config = with_planned_context(config_of_checkpoint(config, manifest), run_dir, manifest.step)
    if config.model.base_dtype == "bf16":
        return config, store, manifest
    # The checkpoint does not contain the frozen weights, so only a `weight_reader` can read them.
    named = named_tensors(adapted_meta_model(config, is_tied=bool(manifest.state.tied)))
    dtype = dtype_name(torch_dtype(config.model.dtype))
    frozen = {f"{FROZEN}/{name}": TensorSpec(shape=tuple(one.shape), dtype=dtype) for name, one in named.frozen}
    state = replace(manifest.state, tensors={**manifest.state.tensors, **frozen}, tied=named.tied)
    return config, store, replace(manifest, state=state)


def weight_reader(config: Config, store: Store, manifest: Manifest) -> WeightReader:
    """Return a reader of all weights in a manifest that `open_checkpoint` returned."""
    if config.model.base_dtype == "bf16":
        return WeightReader(store, manifest)
    return _QuantizedReader(config, store, manifest)


class _QuantizedReader(WeightReader):
    """Reads frozen weights from the base model, with their values after quantization and dequantization.

    The first frozen weight loads and quantizes the complete base, as at the start of training.
    """

    def __init__(self, config: Config, store: Store, manifest: Manifest) -> None:
        super().__init__(store, manifest)
        self._config, self._manifest = config, manifest
        self._latest: tuple[str, torch.Tensor] | None = None

    @cached_property
    def _base(self) -> Any:
        base = build_model(as_stored(self._config))
        if model_fingerprint(base) != self._manifest.state.base_fingerprint:
            raise UserError(
                f"model.path={str(self._config.model.path)!r}: the base model differs from the model with which the "
                "checkpoint was trained (its quantized weights have another fingerprint); restore the original files"
            )
        return base

    def _load(self, manifest: Manifest, parts: Sequence[TensorPart]) -> None:
        super()._load(manifest, [part for part in parts if not part.key.startswith(f"{FROZEN}/")])
        for part in parts:
            kind, _, name = part.key.partition("/")
            if kind == FROZEN:
                part.tensor.copy_(self._values(name)[part.start : part.start + part.tensor.numel()])

    @torch.no_grad()
    def _values(self, name: str) -> torch.Tensor:
        if self._latest is None or self._latest[0] != name:
            place, _, own = name.rpartition(".")
            module = self._base.get_submodule(place)
            is_quantized = isinstance(module, Quantized) and own in module.quantized
            weight = module.dequantized(own) if is_quantized else module.get_parameter(own)
            self._latest = name, weight.detach().flatten()
        return self._latest[1]
