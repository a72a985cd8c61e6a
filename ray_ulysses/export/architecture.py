"""Builds config.json and generation_config.json for an exported model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ray_ulysses.config import Config
from ray_ulysses.engine.model_config import described_config
from ray_ulysses.engine.stored_weights import SOURCES
from ray_ulysses.engine.text_part import auto_class
from ray_ulysses.export.report import WeightType
from ray_ulysses.storage.hub import hub_folder

# The default token ids of a Transformers class belong to another tokenizer.
_TOKEN_SETTINGS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Configuration fields in which Transformers 4 calls linear attention layers "mamba".
_OLDER_LAYER_NAMES = {
    "granitemoehybrid": "layer_types",
    "zamba": "layers_block_type",
    "zamba2": "layers_block_type",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _OlderRope:
    """Transformers 4 fields for a model whose sliding-window layers have their own RoPE."""

    theta: str = "rope_theta"
    """Field with the RoPE base of full-attention layers."""
    sliding_theta: str = "rope_theta"
    """Field with the RoPE base of sliding-window layers."""
    is_theta_shared: bool = False
    """Whether Transformers 4 uses one base for both kinds of layers."""
    is_scaling_shared: bool = False
    """Whether Transformers 4 applies the scaling to both kinds of layers."""


_ROPE_OF_LAYER_KINDS = {
    "gemma3_text": _OlderRope(sliding_theta="rope_local_base_freq"),
    "gemma3n_text": _OlderRope(sliding_theta="rope_local_base_freq"),
    "modernbert-decoder": _OlderRope(
        theta="global_rope_theta", sliding_theta="local_rope_theta", is_theta_shared=True, is_scaling_shared=True
    ),
    "olmo3": _OlderRope(is_theta_shared=True),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Architecture:
    """A run's model structure and configuration, without weights."""

    model: Any
    """The model on the meta device. Its configuration becomes config.json."""
    generation: dict[str, Any] | None
    """Content of generation_config.json; None if the model cannot generate text."""

    @property
    def class_name(self) -> str:
        """Name of the model's Transformers class."""
        return type(self.model).__name__

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the model."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    @property
    def max_positions(self) -> int | None:
        """The model's ``max_position_embeddings``, or None."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @property
    def rope(self) -> str:
        """Description of the rotary embedding (of full attention if layers differ), or an empty string."""
        hf_config = self.model.config.get_text_config(decoder=True)
        rope = getattr(hf_config, "rope_parameters", None) or {}
        settings = rope.get("full_attention", rope)
        if "rope_theta" not in settings:
            return ""
        factor = f", factor {settings['factor']:g}" if "factor" in settings else ""
        words = f"rope {settings.get('rope_type', 'default')}{factor}, theta {settings['rope_theta']:g}"
        words += " in layers with full attention" if settings is not rope else ""
        if hf_config.model_type in _ROPE_OF_LAYER_KINDS and not _is_older(hf_config.model_type, rope):
            words += ", which Transformers 4 can't represent"
        return words

    def files(self) -> dict[str, bytes]:
        """Serialize the JSON files, by file name."""
        fields = with_older_names(self.model.config)
        found = {"config.json": json.dumps(fields, indent=2, sort_keys=True).encode() + b"\n"}
        if self.generation is not None:
            found["generation_config.json"] = json.dumps(self.generation, indent=2, sort_keys=True).encode() + b"\n"
        return found


def describe(
    config: Config, weights: WeightType, end_tokens: Sequence[int] = (), *, is_tied: bool | None = None
) -> Architecture:
    """Build a run's model without weights.

    Rotary scaling and ``max_position_embeddings`` are the values used in training.

    Args:
        config: The run's configuration.
        weights: Precision of the exported weights.
        end_tokens: Tokens that end a text in the run's corpora or the exported tokenizer; empty if unknown.
        is_tied: Whether the embeddings are tied; None to use the model configuration's value.

    Raises:
        UserError: The model's configuration can't be read.
    """
    hf_config = described_config(config, is_tied)
    if config.model.init == "random" and config.model.config is not None:
        for name in _TOKEN_SETTINGS:
            if hasattr(hf_config, name) and name not in config.model.config:
                setattr(hf_config, name, merged_ends(None, end_tokens) if name == "eos_token_id" else None)
    with torch.device("meta"):
        model: Any = auto_class("whole", config.objective.task).from_config(hf_config)
    model.config.dtype = _DTYPE_NAMES[config.model.dtype if weights == "model" else weights]
    model.config.architectures = [type(model).__name__]
    # The default is a path on the training machine.
    model.config._name_or_path = ""
    generation = generation_settings(config, model, end_tokens) if model.can_generate() else None
    return Architecture(model=model, generation=generation)


def with_older_names(hf_config: Any) -> dict[str, Any]:
    """Return config.json fields that tools older than Transformers 5 also read correctly.

    Older tools silently use defaults if the names that they expect are missing. Transformers 5 either ignores the older
    names or reads the same values from them.
    """
    fields: dict[str, Any] = json.loads(hf_config.to_json_string(use_diff=True))
    older: dict[str, Any] = {"torch_dtype": fields["dtype"]}
    # Some fields are serialized under a different name, such as Qwen3-MoE's number of experts.
    declared = {field.name for field in dataclasses.fields(hf_config)}
    for own, written in hf_config.attribute_map.items():
        if own in declared and written in fields:
            older[own] = fields[written]
    kind = fields["model_type"]
    if kind == "nemotron_h":
        older["hybrid_override_pattern"] = hf_config.hybrid_override_pattern
    if name := _OLDER_LAYER_NAMES.get(kind):
        words = {"linear_attention": "mamba", "full_attention": "attention"}
        fields[name] = [words.get(one, one) for one in fields[name]]
    # Bailing has a separate field `rope_theta`, which may differ from the RoPE base.
    return fields | older | _older_rope(hf_config)


def _older_rope(hf_config: Any) -> dict[str, Any]:
    kind, rope = hf_config.model_type, getattr(hf_config, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        older = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        if kind == "gpt_neox":
            older |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope["partial_rotary_factor"]}
        return older | _older_scaling(hf_config, rope)
    if kind not in _ROPE_OF_LAYER_KINDS:
        return {}
    names, full = _ROPE_OF_LAYER_KINDS[kind], rope["full_attention"]
    if not _is_older(kind, rope):
        # A null base makes Transformers 4 fail instead of computing wrong positions.
        return {names.theta: None}
    thetas = {names.sliding_theta: rope["sliding_attention"]["rope_theta"], names.theta: full["rope_theta"]}
    return thetas | _older_scaling(hf_config, full)


def _older_scaling(hf_config: Any, rope: Mapping[str, Any]) -> dict[str, Any]:
    scaling = _scaling(rope)
    if scaling is None or scaling["rope_type"] != "longrope":
        return {"rope_scaling": scaling}
    # Transformers 4 reads the original length outside the scaling, and ignores `factor` in favor of the length ratio.
    original = scaling["original_max_position_embeddings"]
    ratio = hf_config.max_position_embeddings / original
    factor = scaling.get("factor", ratio)
    if factor != ratio:
        scaling.setdefault("attention_factor", math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original)))
    elif hf_config.model_type == "phi3" and "attention_factor" not in scaling:
        # Transformers 4's Phi-3 accepts only these three fields.
        scaling = {"type": "longrope"} | {name: scaling[name] for name in ("short_factor", "long_factor")}
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _is_older(kind: str, rope: Mapping[str, Any]) -> bool:
    """Return whether Transformers 4 can represent RoPE settings that differ by layer kind."""
    names, full, sliding = _ROPE_OF_LAYER_KINDS[kind], rope["full_attention"], rope["sliding_attention"]
    if names.is_theta_shared and full["rope_theta"] != sliding["rope_theta"]:
        return False
    return _scaling(sliding) == (_scaling(full) if names.is_scaling_shared else None)


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    if rope.get("rope_type", "default") == "default":
        return None
    return {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}


def generation_settings(config: Config, model: Any, end_tokens: Sequence[int]) -> dict[str, Any]:
    """Return the base model's generation settings, with the run's end tokens added."""
    from transformers import GenerationConfig

    found = None
    if config.model.init == "pretrained":
        try:
            path = str(config.model.path)
            folder = hub_folder(path, f"model.path={path!r}", ["config.json", "generation_config.json"], SOURCES)
            found = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, TypeError, ValueError):
            # Many models have no such file. Transformers then derives the settings from config.json, and so does this
            # code.
            found = None
    found = GenerationConfig.from_model_config(model.config) if found is None else found
    fields: dict[str, Any] = json.loads(found.to_json_string(use_diff=True))
    fields["eos_token_id"] = merged_ends(fields.get("eos_token_id"), end_tokens)
    return {name: value for name, value in fields.items() if value is not None}


def merged_ends(known: int | list[int] | None, trained: Sequence[int]) -> int | list[int] | None:
    """Merge end tokens: the trained tokens first, then the base model's."""
    ends = [known] if isinstance(known, int) else list(known or ())
    ends = [*(token for token in trained if token not in ends), *ends]
    return ends[0] if len(ends) == 1 else (ends or None)
