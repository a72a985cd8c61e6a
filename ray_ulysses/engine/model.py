"""The decoder: drawn from a seed, or loaded from a directory or a hub into parameters that are partitioned at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ray_ulysses.config import Config

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of ``model.dtype``."""
    return _DTYPES[name]


def build_model(config: Config, partition: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """Build the decoder of a run; with ``partition``, every rank of the world must call.

    ``init: random`` draws the whole model on the host of every rank from ``run.seed`` in fp32, so that its weights do
    not depend on the world. ``init: pretrained`` loads weights; with ``partition`` each parameter is partitioned as
    it is loaded, so that no device ever holds the whole model (the host of each rank reads all weights once).

    Args:
        config: The run's configuration.
        partition: DeepSpeed's configuration of ZeRO-3, or ``None`` to load whole.

    Raises:
        UserError: The model can't be found, lacks weights, or is not the one that ``model.config`` describes.
    """
    dtype = torch_dtype(config.model.dtype)
    if config.model.init == "random":
        model = _random_model(config, dtype)
    else:
        model = _pretrained_model(config, dtype, partition)
    # The cache is for generation; under gradient checkpointing it would only warn.
    model.config.use_cache = False
    if config.memory.gradient_checkpointing:
        _checkpoint_layers(model)
    return model


def _checkpoint_layers(model: PreTrainedModel) -> None:
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        # Transformers before 5.23 has the older name only.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _random_model(config: Config, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = str(config.model.path)
    if config.model.config is not None:
        fields = dict(config.model.config)
        hf_config = _described(lambda: AutoConfig.for_model(fields.pop("model_type"), **fields), "model.config")
    else:
        hf_config = _described(lambda: AutoConfig.from_pretrained(path), f"model.path={path!r}")
    torch.manual_seed(config.run.seed)
    model: Any = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    for parameter in model.parameters():
        # Parameters only: rotary frequencies are buffers, and rounded ones would turn far positions wrongly.
        parameter.data = parameter.data.to(dtype)
    drawn: PreTrainedModel = model
    return drawn


def _pretrained_model(config: Config, dtype: torch.dtype, partition: Mapping[str, Any] | None) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = str(config.model.path)
    hf_config = _described(lambda: AutoConfig.from_pretrained(path), f"model.path={path!r}")
    check_described(config.model.config, hf_config.to_dict(), path)
    keep_alive = None
    if partition is not None:
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        # While this object lives, from_pretrained partitions each parameter as it is made.
        keep_alive = HfDeepSpeedConfig(dict(partition))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"model.path={path!r}: no weights could be loaded ({error}); give a directory with config.json and "
            "safetensors, or a hub id that this machine can reach"
        ) from error
    finally:
        del keep_alive
    model: PreTrainedModel = loaded[0]
    _refuse_missing(loaded[1]["missing_keys"], path)
    return model


def _refuse_missing(names: Collection[str], path: str) -> None:
    """Refuse weights that are not whole: Transformers draws what is missing, and only warns."""
    if names:
        shown = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise UserError(
            f"model.path={path!r}: {len(names)} of the model's tensors are not in its weights ({shown}); give the "
            "whole causal language model, or use init: random"
        )


def hub_config(path: str) -> dict[str, Any]:
    """Return the ``config.json`` of a model on a hub.

    Raises:
        UserError: It can't be reached.
    """
    from transformers import AutoConfig

    fields: dict[str, Any] = _described(lambda: AutoConfig.from_pretrained(path), f"model.path={path!r}").to_dict()
    return fields


def check_described(described: Mapping[str, Any] | None, loaded: Mapping[str, Any], path: str) -> None:
    """Refuse a loaded model that differs from what ``model.config`` says of it, and from what was planned.

    Raises:
        UserError: Names every field that differs.
    """
    differing = [
        f"{name} is {loaded.get(name)!r} there and {value!r} in model.config"
        for name, value in (described or {}).items()
        if name in loaded and loaded[name] != value
    ]
    if differing:
        raise UserError(
            f"model.path={path!r} is not the model that model.config describes: {'; '.join(differing)}. "
            "Correct model.config, or leave it out"
        )


def _described(read: Any, setting: str) -> Any:
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{setting}: no model configuration could be read ({error}); give a directory with config.json, a hub id "
            "that this machine can reach, or an inline model.config with a model_type"
        ) from error
