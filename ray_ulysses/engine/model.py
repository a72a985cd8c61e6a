"""The decoder: drawn from a seed, or loaded from a directory or a hub into parameters that are partitioned at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from ray_ulysses.attention.recompute import KeptOutput, checkpoint_contexts
from ray_ulysses.attention.refusals import refuse_config, refuse_inexact
from ray_ulysses.engine.model_config import (
    check_described,
    described_config,
    planned_config,
    refuse_no_decoder,
    with_words,
)
from ray_ulysses.engine.text_part import Part, cut_to_text, model_class
from ray_ulysses.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ray_ulysses.attention.probe import Sight
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
    if config.model.part == "text":
        cut_to_text(model)
    # The cache is for generation; under gradient checkpointing it would only warn.
    model.config.use_cache = model.config.get_text_config(decoder=True).use_cache = False
    if config.memory.gradient_checkpointing:
        _checkpoint_layers(model, config.memory.attention_output)
    return model


def _checkpoint_layers(model: PreTrainedModel, kept: KeptOutput) -> None:
    options: dict[str, Any] = {"use_reentrant": False}
    contexts = checkpoint_contexts(kept)
    if contexts is not None:
        options["context_fn"] = contexts
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        # Transformers before 5.23 has the older name only.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def check_architecture(config: Config) -> Sight:
    """Refuse a run whose decoder can't be trained exactly; reads no weights and needs no GPU.

    Returns:
        What its attention asks for, and how many positions it has.

    Raises:
        UserError: The configuration can't be read, or says which layer or setting can't be exact, and why.
    """
    return refuse_architecture(planned_config(config), config.model.part)


def refuse_architecture(hf_config: Any, part: Part = "whole") -> Sight:
    """Build a decoder on the meta device, where it takes no memory, and refuse what can't be trained exactly.

    Args:
        hf_config: A ``PreTrainedConfig``; left as it is.
        part: Which part of the model is trained.

    Returns:
        What its attention asks for, and how many positions it has.

    Raises:
        UserError: Names the architecture or setting, why it can't be exact, and the way out.
    """
    # The architectures that can't even be built as a decoder are named by what they are first.
    refuse_config(hf_config)
    builder = model_class(hf_config, part)
    if part == "whole":
        refuse_no_decoder(hf_config)
    with torch.device("meta"):
        model: Any = with_words(
            lambda: builder.from_config(deepcopy(hf_config), trust_remote_code=False), "model.config"
        )
    if part == "text":
        cut_to_text(model)
    return refuse_inexact(model, model.config.get_text_config(decoder=True), None)


def _random_model(config: Config, dtype: torch.dtype) -> PreTrainedModel:
    hf_config = described_config(config)
    refuse_architecture(hf_config, config.model.part)
    torch.manual_seed(config.run.seed)
    model: Any = model_class(hf_config, config.model.part).from_config(hf_config, dtype=torch.float32)
    for parameter in model.parameters():
        # Parameters only: rotary frequencies are buffers, and rounded ones would turn far positions wrongly.
        parameter.data = parameter.data.to(dtype)
    drawn: PreTrainedModel = model
    return drawn


def _pretrained_model(config: Config, dtype: torch.dtype, partition: Mapping[str, Any] | None) -> PreTrainedModel:
    path = str(config.model.path)
    hf_config = described_config(config)
    check_described(config.model.config, hf_config.to_dict(), path)
    refuse_architecture(hf_config, config.model.part)
    keep_alive = None
    if partition is not None:
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        # While this object lives, from_pretrained partitions each parameter as it is made.
        keep_alive = HfDeepSpeedConfig(dict(partition))
    try:
        loaded: Any = model_class(hf_config, config.model.part).from_pretrained(
            path, config=hf_config, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
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
