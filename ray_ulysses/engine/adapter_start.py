"""Continues from the weights of an existing PEFT adapter (``model.adapter.from``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ray_ulysses.config.model import AdapterSection
from ray_ulysses.engine.adapter import ADAPTER_FILE, ADAPTER_SETTINGS_FILE, file_name, find_adapted
from ray_ulysses.engine.parameter_names import PREFIX
from ray_ulysses.engine.partition_view import shape_of
from ray_ulysses.errors import UserError
from ray_ulysses.storage.hub import hub_folder, is_id
from ray_ulysses.validation import parse_json

_CHANGING_INITS = ("pissa", "olora", "corda", "eva", "loftq", "lora_ga")
"""Starts of PEFT's initial values that change the base weights or depend on them."""
_UNSUPPORTED: Mapping[str, tuple[Any, str]] = {
    "peft_type": ("LORA", "only LoRA is supported"),
    "bias": ("none", "biases are not trained"),
    "lora_bias": (False, "adapters have no bias"),
    "alora_invocation_tokens": (None, "Activated LoRA depends on tokens of the row"),
    "trainable_token_indices": (None, "single tokens can't be trained"),
    "layer_replication": (None, "layers can't be replicated"),
}


def refuse_other_adapter(model: Any, adapter: AdapterSection, base: str | None) -> None:
    """Compare an existing adapter with the settings and the base model. This function adds no adapter.

    Args:
        model: The base model, without data.
        adapter: The settings, with the adapter's directory or hub id in ``from_``.
        base: ``model.path``.

    Raises:
        UserError: The adapter can't be read, has an unsupported kind, or differs from the settings or the base model.
    """
    shown, folder = _folder(adapter)
    fields = _fields(shown, folder)
    for name, (usual, why) in _UNSUPPORTED.items():
        if fields.get(name, usual) not in (usual, None):
            raise UserError(f"{shown}: {ADAPTER_SETTINGS_FILE} has {name}={fields[name]!r}: {why}; use another adapter")
    if str(fields.get("init_lora_weights", True)).lower().startswith(_CHANGING_INITS):
        raise UserError(
            f"{shown}: {ADAPTER_SETTINGS_FILE} has init_lora_weights={fields['init_lora_weights']!r}, which changes "
            "the base weights, so the adapter does not fit model.path; convert it to a plain LoRA with PEFT"
        )
    theirs = fields.get("base_model_name_or_path")
    if theirs and base and is_id(theirs) and is_id(base) and theirs != base:
        raise UserError(f"{shown}: the adapter belongs to {theirs}, but model.path={base!r}; set model.path: {theirs}")
    differences = list(_differences(model, adapter, fields))
    if differences:
        raise UserError(f"{shown}: {ADAPTER_SETTINGS_FILE} differs from the settings: {'; '.join(differences)}")


def unapplied(adapter: AdapterSection) -> tuple[str, ...]:
    """Return a note if an existing adapter was trained with dropout."""
    dropout = float(_fields(*_folder(adapter)).get("lora_dropout") or 0.0)
    note = (
        f"model.adapter.from={adapter.from_!r}: the adapter was trained with lora_dropout={dropout:g}, which is not "
        "applied, because the masks would depend on the layout"
    )
    return (note,) if dropout else ()


def _differences(model: Any, adapter: AdapterSection, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings to change."""
    from peft.utils.other import get_pattern_key

    for name, key in (("rslora", "use_rslora"), ("dora", "use_dora")):
        if getattr(adapter, name) != bool(fields.get(key, False)):
            yield f"set model.adapter.{name}: {str(not getattr(adapter, name)).lower()}"
    adapted = find_adapted(model, adapter)
    for setting, values, key, pattern in (
        ("rank", adapted.ranks, "r", "rank_pattern"),
        ("alpha", adapted.alphas, "lora_alpha", "alpha_pattern"),
    ):
        given: Mapping[str, int] = fields.get(pattern) or {}
        for name, value in values.items():
            # Some linear layers are written as parameters; see `in_adapter_file`.
            found = (given.get(get_pattern_key(list(given), one)) for one in (name, f"{name}.weight"))
            theirs = next((one for one in found if one is not None), fields.get(key))
            if theirs != value:
                yield f"{name} has the {setting} {theirs} in the adapter, and model.adapter sets {value}"
                break


def refuse_other_tensors(adapted_model: Any, adapter: AdapterSection) -> None:
    """Raise a `UserError` unless an existing adapter has the trained tensors of a model, with equal shapes."""
    shown, folder = _folder(adapter)
    # A tied tensor is in the file under each of its names.
    named = adapted_model.named_parameters(remove_duplicate=False)
    wanted = {_full_name(name): shape_of(one) for name, one in named if one.requires_grad}
    with _opened(shown, folder) as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for name, shape in wanted.items():
        if found.get(name) != shape:
            have = "lacks it" if name not in found else f"has {list(found[name])}"
            raise UserError(
                f"{shown}: {name} is {list(shape)} in the model with model.adapter, but {ADAPTER_FILE} {have}; use the "
                "adapter's own base model as model.path, and its own targets in model.adapter"
            )
    if rest := sorted(found.keys() - wanted.keys()):
        raise UserError(
            f"{shown}: {ADAPTER_FILE} has {rest[0]}, which model.adapter does not train; use the adapter's own base "
            "model as model.path, and its own targets and modules_to_save in model.adapter"
        )


@torch.no_grad()
def load_adapter(adapted_model: Any, adapter: AdapterSection) -> None:
    """Load the trained weights of an existing adapter. If weights are partitioned, all ranks must call this function.

    Raises:
        UserError: The adapter can't be read, or does not fit the model.
    """
    refuse_other_tensors(adapted_model, adapter)
    shown, folder = _folder(adapter)
    with _opened(shown, folder) as file:
        for name, parameter in adapted_model.named_parameters():
            if parameter.requires_grad:
                with _whole(parameter):
                    parameter.data.copy_(file.get_tensor(_full_name(name)))


def _full_name(name: str) -> str:
    return PREFIX + file_name(name).removeprefix(PREFIX)


def _whole(parameter: Any) -> Any:
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)


def _folder(adapter: AdapterSection) -> tuple[str, Path]:
    shown = f"model.adapter.from={adapter.from_!r}"
    hint = f"use a directory with {ADAPTER_SETTINGS_FILE} and {ADAPTER_FILE}, or a hub id"
    folder = hub_folder(str(adapter.from_), shown, [ADAPTER_SETTINGS_FILE, ADAPTER_FILE], hint)
    missing = [name for name in (ADAPTER_SETTINGS_FILE, ADAPTER_FILE) if not (folder / name).is_file()]
    if missing:
        pickled = "; pickled weights (adapter_model.bin) are never loaded" if ADAPTER_FILE in missing else ""
        raise UserError(f"{shown}: {', '.join(missing)} not found{pickled}; {hint}")
    return shown, folder


def _fields(shown: str, folder: Path) -> dict[str, Any]:
    try:
        fields = parse_json((folder / ADAPTER_SETTINGS_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{shown}: {ADAPTER_SETTINGS_FILE} can't be read ({error}); restore the file") from error
    if not isinstance(fields, dict):
        raise UserError(f"{shown}: {ADAPTER_SETTINGS_FILE} is not a JSON object; restore the file")
    return fields


def _opened(shown: str, folder: Path) -> Any:
    try:
        return safe_open(folder / ADAPTER_FILE, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{shown}: {ADAPTER_FILE} can't be read ({error}); restore the file") from error
