"""Builds config.json and generation_config.json of an exported model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ray_ulysses.engine.model_config import described_config
from ray_ulysses.engine.stored_weights import SOURCES
from ray_ulysses.export.request import WeightType
from ray_ulysses.storage.hub import hub_folder

if TYPE_CHECKING:
    from ray_ulysses.config import Config

# The defaults of a Transformers class belong to another tokenizer.
_TOKEN_SETTINGS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Architecture:
    """A run's model without its weights.

    Attributes:
        model: The model on the meta device; its configuration becomes config.json.
        generation: Content of generation_config.json; None if the model can't generate.
    """

    model: Any
    generation: dict[str, Any] | None

    @property
    def class_name(self) -> str:
        """Return the name of its Transformers class."""
        return type(self.model).__name__

    @property
    def vocab_size(self) -> int:
        """Return the size of its vocabulary."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def max_positions(self) -> int | None:
        """Return ``max_position_embeddings``, or None."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @property
    def rope(self) -> str:
        """Return its rotary embedding in words; empty if it has none, or several for different layers."""
        settings = getattr(self.model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
        kind = settings.get("rope_type", "default")
        if "rope_theta" not in settings:
            return ""
        factor = f", factor {settings['factor']:g}" if "factor" in settings else ""
        return f"rope {kind}{factor}, theta {settings['rope_theta']:g}"

    def files(self) -> dict[str, bytes]:
        """Return the JSON files by name."""
        fields = with_older_names(json.loads(self.model.config.to_json_string(use_diff=True)))
        found = {"config.json": json.dumps(fields, indent=2, sort_keys=True).encode() + b"\n"}
        if self.generation is not None:
            found["generation_config.json"] = json.dumps(self.generation, indent=2, sort_keys=True).encode() + b"\n"
        return found


def describe(
    config: Config, weights: WeightType, end_tokens: Sequence[int] = (), *, is_tied: bool | None = None
) -> Architecture:
    """Return a run's model without its weights.

    Rotary scaling and ``max_position_embeddings`` are those of the training.

    Args:
        config: The run's configuration.
        weights: Precision of the exported weights.
        end_tokens: The tokens that end a text in the run's corpora or the exported tokenizer; empty if unknown.
        is_tied: As in `described_config`.

    Raises:
        UserError: The model's configuration can't be read.
    """
    from transformers import AutoModelForCausalLM

    hf_config = described_config(config, is_tied)
    if config.model.init == "random" and config.model.config is not None:
        for name in _TOKEN_SETTINGS:
            if hasattr(hf_config, name) and name not in config.model.config:
                setattr(hf_config, name, merged_ends(None, end_tokens) if name == "eos_token_id" else None)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(hf_config)
    model.config.dtype = _DTYPE_NAMES[config.model.dtype if weights == "model" else weights]
    model.config.architectures = [type(model).__name__]
    # A path of the machine that trained it.
    model.config._name_or_path = ""
    generation = _generation(config, model, end_tokens) if model.can_generate() else None
    return Architecture(model=model, generation=generation)


def with_older_names(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json that tools older than Transformers 5 also read correctly (pure).

    They read ``torch_dtype``, ``rope_theta`` and ``rope_scaling``, and silently use defaults if those are missing.
    Transformers 5 gives its own names precedence.

    Args:
        fields: The configuration as written by Transformers 5.
    """
    older: dict[str, Any] = {"torch_dtype": fields["dtype"]}
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
        older["rope_theta"] = rope["rope_theta"]
        older["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else scaling
        if "partial_rotary_factor" in rope:
            older["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return older | fields


def _generation(config: Config, model: Any, end_tokens: Sequence[int]) -> dict[str, Any]:
    """Return the generation settings of the base model, extended by the tokens that end a text."""
    from transformers import GenerationConfig

    found = None
    if config.model.init == "pretrained":
        try:
            path = str(config.model.path)
            folder = hub_folder(path, f"model.path={path!r}", ["config.json", "generation_config.json"], SOURCES)
            found = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError):
            # Many models have none; it is then derived from their configuration, as in Transformers.
            found = None
    found = GenerationConfig.from_model_config(model.config) if found is None else found
    fields: dict[str, Any] = json.loads(found.to_json_string(use_diff=True))
    fields["eos_token_id"] = merged_ends(fields.get("eos_token_id"), end_tokens)
    return {name: value for name, value in fields.items() if value is not None}


def merged_ends(known: int | list[int] | None, trained: Sequence[int]) -> int | list[int] | None:
    """Return the tokens that end a text: those of the training, then those of the base model (pure)."""
    ends = [known] if isinstance(known, int) else list(known or ())
    ends = [*(token for token in trained if token not in ends), *ends]
    return ends[0] if len(ends) == 1 else (ends or None)
