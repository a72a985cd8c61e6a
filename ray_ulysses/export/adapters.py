"""Exports a run's adapter, either as PEFT files or merged into the base weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ray_ulysses.checkpoint.state import StateDescription
from ray_ulysses.config import Config
from ray_ulysses.config.model import AdapterSection
from ray_ulysses.engine.adapter import (
    ADAPTER_FILE,
    ADAPTER_NAME,
    ADAPTER_SETTINGS_FILE,
    MAGNITUDE,
    Adapted,
    file_name,
    find_adapted,
    in_adapter_file,
    lora_config,
    whole_names,
)
from ray_ulysses.engine.parameter_names import PREFIX
from ray_ulysses.errors import UserError
from ray_ulysses.export.architecture import Architecture
from ray_ulysses.export.decoder_merge import DecoderMerge
from ray_ulysses.export.files import WeightFile, aligned
from ray_ulysses.export.report import ExportRequest, WeightType
from ray_ulysses.export.tensors import LowRank, PublishedTensor, Stored, find_stored, stored_tensors


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
    plain = stored_tensors(model, base_state(state), request.weights, config.model.dtype)
    if request.merge:
        return AdapterExport(stored=_merged(plain, adapter, adapted, model, live), files=(), small={}, live=live)
    if config.model.init == "random":
        raise UserError(
            "RUN: the base weights are random (model.init: random), so an adapter alone has no base model to load; "
            "export the complete model with --merge"
        )
    # Tied weights are stored under both names, because PEFT loads a copy for each name.
    tensors = tuple(
        PublishedTensor(name=file_name(name), shape=place.shape, dtype=place.published, stored=place, start=0)
        for name, place in live.items()
        if not place.key.startswith(("frozen/", "buffer/"))
    )
    # Keep generation_config.json, which has the end tokens.
    small = {name: content for name, content in architecture.files().items() if name != "config.json"}
    small[ADAPTER_SETTINGS_FILE] = _settings(config, adapter, adapted, model)
    if config.model.rope is not None and config.model.rope != "unchanged":
        # The base model's own configuration has different rotary positions from training.
        small["config.json"] = architecture.files()["config.json"]
    files = (WeightFile(name=ADAPTER_FILE, tensors=aligned(tensors)),)
    return AdapterExport(stored={}, files=files, small=small, live=live)


def merged_decoder(config: Config, state: StateDescription, merge: DecoderMerge) -> DecoderMerge:
    """Return the plan for merging a text decoder, with the decoder's adapter added to its weights.

    ``merge`` is the plan for the decoder without its adapter; see `base_state`.
    """
    adapter = config.model.adapter
    assert adapter is not None
    live = adapted_tensors(state, "fp32", config.model.dtype)
    stored = _merged(merge.stored, adapter, find_adapted(merge.model, adapter), merge.model, live)
    by_key = {merge.stored[name].key: place for name, place in stored.items()}
    files = tuple(
        replace(file, tensors=tuple(replace(one, stored=by_key[one.stored.key]) for one in file.tensors))
        for file in merge.files
    )
    return replace(merge, stored=stored, files=files)


def adapted_tensors(state: StateDescription, weights: WeightType, model_dtype: str) -> dict[str, Stored]:
    """Locate each tensor of a model with its adapter in a checkpoint, by model tensor name.

    Trained weights get the precision ``weights``; frozen weights keep their precision.
    """
    found = {}
    for name in dict.fromkeys([*(key.split("/", 1)[1] for key in state.tensors), *state.tied]):
        is_frozen = f"frozen/{state.tied.get(name, name)}" in state.tensors
        if (place := find_stored(name, state, "model" if is_frozen else weights, model_dtype)) is not None:
            found[name] = place
    return found


def _settings(config: Config, adapter: AdapterSection, adapted: Adapted, model: Any) -> bytes:
    is_part = config.model.part == "text"
    settings = lora_config(
        adapter,
        in_adapter_file(model, adapted, is_part=is_part),
        modules_to_save=whole_names(model, adapted, is_part=is_part) or None,
        base_model_name_or_path=str(config.model.path),
        inference_mode=True,
    )
    fields = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.to_dict().items()}
    return json.dumps(fields, indent=2, sort_keys=True).encode() + b"\n"


def _merged(
    plain: dict[str, Stored], adapter: AdapterSection, adapted: Adapted, model: Any, live: Mapping[str, Stored]
) -> dict[str, Stored]:
    from transformers.pytorch_utils import Conv1D

    stored_name = {_plain_name(name): name for name in (place.key.split("/", 1)[1] for place in live.values())}
    weights = {f"{name}.weight": name for name in adapted.targets} | {name: name for name in adapted.parameters}
    merged = {}
    for name, place in plain.items():
        kind, own_name = place.key.split("/", 1)
        place = replace(place, key=f"{kind}/{stored_name[own_name]}")
        if own_name in weights:
            target = weights[own_name]
            module = f"{PREFIX}{adapted.matrices(target)}"
            rank, holder = adapted.ranks[target], model.get_submodule(own_name.rpartition(".")[0])
            low_rank = LowRank(
                a=live[f"{module}.lora_A.{ADAPTER_NAME}.weight"],
                b=live[f"{module}.lora_B.{ADAPTER_NAME}.weight"],
                magnitude=live.get(f"{module}.{MAGNITUDE}.{ADAPTER_NAME}.weight"),
                scale=adapted.alphas[target] / (rank**0.5 if adapter.rslora else rank),
                is_transposed=isinstance(holder, Conv1D) or getattr(holder, "is_transposed", False),
            )
            place = replace(place, low_rank=low_rank)
        merged[name] = place
    return merged


def _plain_name(name: str) -> str:
    """Return the base model's name of a tensor of the model with its adapter."""
    return re.sub(r"(\.base_layer)+\.", ".", name.removeprefix(PREFIX))


def base_state(state: StateDescription) -> StateDescription:
    """Return the base model's part of a state description, with the base model's tensor names."""
    tensors = {}
    for key, spec in state.tensors.items():
        kind, _, name = key.partition("/")
        if ".lora_" not in name:
            tensors[f"{kind}/{_plain_name(name)}"] = spec
    return replace(state, tensors=tensors, tied={_plain_name(a): _plain_name(b) for a, b in state.tied.items()})
