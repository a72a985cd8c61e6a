"""Builds config.json and generation_config.json of an exported model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ray_ulysses.engine.model_config import described_config
from ray_ulysses.engine.stored_weights import SOURCES
from ray_ulysses.export.report import WeightType
from ray_ulysses.storage.hub import hub_folder

if TYPE_CHECKING:
    from ray_ulysses.config import Config

# The defaults of a Transformers class belong to another tokenizer.
_TOKEN_SETTINGS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# The fields in which Transformers 4 calls linear attention "mamba".
_OLDER_LAYER_NAMES = {
    "granitemoehybrid": "layer_types",
    "zamba": "layers_block_type",
    "zamba2": "layers_block_type",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _OlderRope:
    """How Transformers 4 reads a model whose sliding layers have a separate RoPE."""

    theta: str = "rope_theta"
    """Name of the base of layers with full attention."""
    sliding_theta: str = "rope_theta"
    """Name of the base of sliding layers."""
    is_theta_shared: bool = False
    """Whether it uses the same base in both."""
    is_scaling_shared: bool = False
    """Whether it scales both."""


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
    """A run's model without its weights."""

    model: Any
    """The model on the meta device; its configuration becomes config.json."""
    generation: dict[str, Any] | None
    """Content of generation_config.json; None if the model can't generate."""

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
        """Describe its rotary embedding, or the one of full attention if layers differ; empty if it has none."""
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
        """Return the JSON files by name."""
        fields = with_older_names(self.model.config)
        found = {"config.json": json.dumps(fields, indent=2, sort_keys=True).encode() + b"\n"}
        if self.generation is not None:
            found["generation_config.json"] = json.dumps(self.generation, indent=2, sort_keys=True).encode() + b"\n"
        return found


def describe(
    config: Config, weights: WeightType, end_tokens: Sequence[int] = (), *, is_tied: bool | None = None
) -> Architecture:
    """Return a run's model without its weights.

    Rotary scaling and ``max_position_embeddings`` are as in training. ``end_tokens`` end a text in the run's corpora or
    the exported tokenizer; empty if unknown.

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
    # Would be a path on the machine that trained it.
    model.config._name_or_path = ""
    generation = _generation(config, model, end_tokens) if model.can_generate() else None
    return Architecture(model=model, generation=generation)


def with_older_names(hf_config: Any) -> dict[str, Any]:
    """Return the fields of a config.json that tools older than Transformers 5 also read correctly.

    Older tools silently use defaults if the names they expect are missing. Transformers 5 reads its own names, or the
    same values.
    """
    fields: dict[str, Any] = json.loads(hf_config.to_json_string(use_diff=True))
    older: dict[str, Any] = {"torch_dtype": fields["dtype"]}
    # Some fields are written under a different name, such as the number of experts of Qwen3-MoE.
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
    # Bailing has a separate field `rope_theta`, which may differ from its rotary positions.
    return fields | older | _older_rope(hf_config)


def _older_rope(hf_config: Any) -> dict[str, Any]:
    """Return the rotary positions of a model as Transformers 4 names them."""
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
        # Makes Transformers 4 fail instead of computing wrong positions.
        return {names.theta: None}
    thetas = {names.sliding_theta: rope["sliding_attention"]["rope_theta"], names.theta: full["rope_theta"]}
    return thetas | _older_scaling(hf_config, full)


def _older_scaling(hf_config: Any, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling of rotary positions as Transformers 4 reads it."""
    scaling = _scaling(rope)
    if scaling is None or scaling["rope_type"] != "longrope":
        return {"rope_scaling": scaling}
    # It reads the original length outside the scaling, and takes its ratio to the new one instead of `factor`.
    original = scaling["original_max_position_embeddings"]
    ratio = hf_config.max_position_embeddings / original
    factor = scaling.get("factor", ratio)
    if factor != ratio:
        scaling.setdefault("attention_factor", math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original)))
    elif hf_config.model_type == "phi3" and "attention_factor" not in scaling:
        # Phi 3 accepts these three fields and no others.
        scaling = {"type": "longrope"} | {name: scaling[name] for name in ("short_factor", "long_factor")}
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _is_older(kind: str, rope: Mapping[str, Any]) -> bool:
    """Return whether Transformers 4 has names for positions that differ by the kind of layer."""
    names, full, sliding = _ROPE_OF_LAYER_KINDS[kind], rope["full_attention"], rope["sliding_attention"]
    if names.is_theta_shared and full["rope_theta"] != sliding["rope_theta"]:
        return False
    return _scaling(sliding) == (_scaling(full) if names.is_scaling_shared else None)


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    if rope.get("rope_type", "default") == "default":
        return None
    return {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}


def _generation(config: Config, model: Any, end_tokens: Sequence[int]) -> dict[str, Any]:
    """Return the generation settings of the base model, extended by the tokens that end a text."""
    from transformers import GenerationConfig

    found = None
    if config.model.init == "pretrained":
        try:
            path = str(config.model.path)
            folder = hub_folder(path, f"model.path={path!r}", ["config.json", "generation_config.json"], SOURCES)
            found = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, TypeError, ValueError):
            # Many models have no such file; as in Transformers, it is then derived from their configuration.
            found = None
    found = GenerationConfig.from_model_config(model.config) if found is None else found
    fields: dict[str, Any] = json.loads(found.to_json_string(use_diff=True))
    fields["eos_token_id"] = merged_ends(fields.get("eos_token_id"), end_tokens)
    return {name: value for name, value in fields.items() if value is not None}


def merged_ends(known: int | list[int] | None, trained: Sequence[int]) -> int | list[int] | None:
    """Return the tokens that end a text: the trained ones, then the base model's."""
    ends = [known] if isinstance(known, int) else list(known or ())
    ends = [*(token for token in trained if token not in ends), *ends]
    return ends[0] if len(ends) == 1 else (ends or None)
