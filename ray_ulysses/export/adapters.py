"""Exports a run's adapter, either as PEFT files or merged into the base weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ray_ulysses.checkpoint.state import StateDescription
from ray_ulysses.engine.adapter import PREFIX, Adapted, find_adapted, lora_config, whole_names
from ray_ulysses.errors import UserError
from ray_ulysses.export.files import WeightFile, aligned
from ray_ulysses.export.tensors import LowRank, PublishedTensor, Stored, find_stored, stored_tensors

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.config.model import AdapterSection
    from ray_ulysses.export.architecture import Architecture
    from ray_ulysses.export.report import ExportRequest, WeightType

WEIGHTS_FILE = "adapter_model.safetensors"
SETTINGS_FILE = "adapter_config.json"
_NAME = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterExport:
    """Plan for exporting a run that trained an adapter."""

    stored: dict[str, Stored]
    """Checkpoint location of each tensor of the merged model, by model tensor name; empty without a merge."""
    files: tuple[WeightFile, ...]
    """The adapter's weight file; empty with a merge."""
    small: Mapping[str, bytes]
    """The adapter's configuration files, by file name; empty with a merge."""
    live: dict[str, Stored]
    """Checkpoint location of each tensor of the model with its adapter, by model tensor name."""


def adapter_export(
    config: Config, state: StateDescription, architecture: Architecture, request: ExportRequest
) -> AdapterExport:
    """Plan the export of a run with ``model.adapter``.

    Raises:
        UserError: The base weights are random, so an adapter without them would be useless.
        RunError: The checkpoint does not fit the model.
    """
    adapter, model = config.model.adapter, architecture.model
    assert adapter is not None
    adapted = find_adapted(model, adapter)
    live = adapted_tensors(state, "fp32" if request.merge else request.weights, config.model.dtype)
    # Also called for adapter files, because it refuses a checkpoint of another model.
    plain = stored_tensors(model, _plain(state), request.weights, config.model.dtype)
    if request.merge:
        return AdapterExport(stored=_merged(plain, adapter, adapted, model, live), files=(), small={}, live=live)
    if config.model.init == "random":
        raise UserError(
            "RUN: the base weights are random (model.init: random), so an adapter alone has no base model to load; "
            "export the complete model with --merge"
        )
    # Tied weights are stored under both names, because PEFT loads a copy for each name.
    tensors = tuple(
        PublishedTensor(
            name=name.replace(f".{_NAME}.", "."), shape=place.shape, dtype=place.published, stored=place, start=0
        )
        for name, place in live.items()
        if not place.key.startswith(("frozen/", "buffer/"))
    )
    # Keep generation_config.json, which has the end tokens.
    small = {name: content for name, content in architecture.files().items() if name != "config.json"}
    small[SETTINGS_FILE] = _settings(config, adapter, adapted, model)
    if config.model.rope is not None and config.model.rope != "unchanged":
        # The base model's own configuration has different rotary positions from training.
        small["config.json"] = architecture.files()["config.json"]
    files = (WeightFile(name=WEIGHTS_FILE, tensors=aligned(tensors)),)
    return AdapterExport(stored={}, files=files, small=small, live=live)


def adapted_tensors(state: StateDescription, weights: WeightType, model_dtype: str) -> dict[str, Stored]:
    """Locate each tensor of a model with its adapter in a checkpoint, by model tensor name.

    Trained weights get the precision ``weights``; frozen weights keep their precision.
    """
    found = {}
    for name in dict.fromkeys([*(key.split("/", 1)[1] for key in state.tensors), *state.tied]):
        is_frozen = f"frozen/{state.tied.get(name, name)}" in state.tensors
        place = find_stored(name, state, "model" if is_frozen else weights, model_dtype)
        if place is not None:
            found[name] = place
    return found


def _settings(config: Config, adapter: AdapterSection, adapted: Adapted, model: Any) -> bytes:
    settings = lora_config(
        adapter,
        adapted,
        modules_to_save=whole_names(model, adapted) or None,
        base_model_name_or_path=str(config.model.path),
        inference_mode=True,
    )
    fields = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.to_dict().items()}
    return json.dumps(fields, indent=2, sort_keys=True).encode() + b"\n"


def _merged(
    plain: dict[str, Stored], adapter: AdapterSection, adapted: Adapted, model: Any, live: Mapping[str, Stored]
) -> dict[str, Stored]:
    from transformers.pytorch_utils import Conv1D

    scale = adapter.alpha / (adapter.rank**0.5 if adapter.rslora else adapter.rank)
    targets = set(adapted.targets)
    merged = {}
    for name, place in plain.items():
        kind, stored_name = place.key.split("/", 1)
        module, _, last = stored_name.rpartition(".")
        place = replace(place, key=f"{kind}/{_stored_name(stored_name, targets)}")
        if module in targets and last == "weight":
            a, b = (live[f"{PREFIX}{module}.lora_{one}.{_NAME}.weight"] for one in "AB")
            is_transposed = isinstance(model.get_submodule(module), Conv1D)
            place = replace(place, low_rank=LowRank(a=a, b=b, scale=scale, is_transposed=is_transposed))
        merged[name] = place
    return merged


def _stored_name(name: str, targets: set[str]) -> str:
    """Return the checkpoint name of a tensor that belongs to the model without its adapter."""
    module, _, last = name.rpartition(".")
    return f"{PREFIX}{module}.base_layer.{last}" if module in targets else f"{PREFIX}{name}"


def _plain(state: StateDescription) -> StateDescription:
    """Return the base model's part of a state description, with the base model's tensor names."""

    def renamed(name: str) -> str:
        return name.removeprefix(PREFIX).replace(".base_layer.", ".")

    tensors = {}
    for key, spec in state.tensors.items():
        kind, _, name = key.partition("/")
        if ".lora_" not in name:
            tensors[f"{kind}/{renamed(name)}"] = spec
    return replace(state, tensors=tensors, tied={renamed(a): renamed(b) for a, b in state.tied.items()})
