"""What families of decoders have that their configurations do not say, or each by a name of its own; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_ulysses.errors import UserError

# Families that normalize queries and keys by a norm of Transformers' own, in fp32; a test looks at their modules.
HEAD_NORMS = frozenset((
    "afmoe", "apertus", "beam", "blt", "doge", "dots1", "exaone4", "exaone_moe", "flex_olmo", "flint",
    "gemma3_text", "gemma4_text", "gemma4_unified_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3",
    "inkling_text", "kolibri1", "laguna", "lfm2", "lfm2_moe", "lfm3", "llama4_text", "mellum", "minimax_m2",
    "minimax_m3_vl_text", "nanochat", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next",
))  # fmt: skip
WHOLE_HEAD_NORMS = frozenset({"cohere"})
"""Those whose norms of queries and keys, if they are switched on, have weights of their own for each head: they don't
go over tiles."""

TIED_BY_DEFAULT = frozenset((
    "bert", "bert-generation", "big_bird", "biogpt", "camembert", "cohere", "cohere2", "cohere2_moe",
    "cohere_compass_text", "data2vec-text", "electra", "ernie", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2",
    "gemma3_text", "gemma4_text", "gemma4_unified_text", "granite_swa", "jetmoe", "lfm2", "lfm2_moe", "lfm3",
    "megatron-bert", "minicpm3", "modernbert-decoder", "recurrent_gemma", "roberta", "roberta-prelayernorm", "roc_bert",
    "roformer", "smollm3", "starcoder2", "vaultgemma", "xlm-roberta", "xlm-roberta-xl", "xmod", "youtu", "zamba",
    "zamba2",
))  # fmt: skip
"""Those that share the embedding's weight with the output head where ``tie_word_embeddings`` is left out, as files on
the hub leave it out; a test compares them with Transformers' own classes."""

_LINEAR = frozenset({"linear_attention"})
HYBRID_LAYER_TYPES: Mapping[str, frozenset[str]] = {
    "lfm2": frozenset({"conv"}),
    "lfm2_moe": frozenset({"conv"}),
    "lfm3": frozenset({"conv"}),
    "qwen3_next": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "olmo_hybrid": _LINEAR,
    "kimi_linear": _LINEAR,
    "bailing_hybrid": _LINEAR,
    "minimax": _LINEAR,
    "jamba": _LINEAR,
    "bamba": _LINEAR,
    "granitemoehybrid": _LINEAR,
    "nemotron_h": _LINEAR,
    "falcon_h1": frozenset({"hybrid"}),
    "zamba": _LINEAR | {"hybrid"},
    "zamba2": _LINEAR | {"hybrid"},
}
"""By model type, the layer types that carry state along the sequence and are done exactly (see
`ray_ulysses.attention.mixer_layouts`)."""


# By what a name ends with, or contains: far beyond any model, and few enough to plan with in seconds.
_MOST: tuple[tuple[str, int], ...] = (
    ("theta", 1 << 53),
    ("experts_per_tok", 1 << 14),
    ("vocab_size", 1 << 26),
    ("layer", 1024),
    ("block", 1 << 20),
    ("experts", 1 << 14),
    ("heads", 1 << 16),
    ("_dim", 1 << 20),
    ("d_model", 1 << 20),
    ("_size", 1 << 24),
    ("_rank", 1 << 20),
    ("_inputs", 1 << 10),
)
_MOST_NUMBER = 1 << 53
_MOST_VALUES = 1 << 16
_MOST_LEVELS = 20


def refuse_implausible(fields: object, source: str, levels: int = _MOST_LEVELS) -> None:
    """Refuse a configuration with a size beyond any model, before something is made of it.

    Args:
        fields: The configuration, or a part of it.
        source: Its name in errors.
        levels: How deeply it may be nested.

    Raises:
        UserError: Names the field.
    """
    if isinstance(fields, Mapping | list | tuple):
        if levels == 0 or len(fields) > _MOST_VALUES:
            raise UserError(f"{source}: has more than {_MOST_VALUES:,} values or {_MOST_LEVELS} levels; correct it")
        if not isinstance(fields, Mapping):
            for value in fields:
                refuse_implausible(value, source, levels - 1)
            return
        for name, value in fields.items():
            _refuse_large(str(name), value, source)
            refuse_implausible(value, f"{source}.{name:.80}" if isinstance(name, str) else source, levels - 1)


def _refuse_large(name: str, value: object, source: str) -> None:
    most = next((most for part, most in _MOST if part in name), None)
    if isinstance(value, list | tuple):
        if most is not None and "layer" in name and len(value) > most:
            raise UserError(f"{source}.{name}: has {len(value):,} layers; no model has more than {most:,}")
        values: list[object] = list(value)
    else:
        values = [value]
    for one in values:
        # A comparison with NaN is false.
        if isinstance(one, int) and not abs(one) <= (most or _MOST_NUMBER):
            shown = one if abs(one) < 1 << 64 else "a number of more than 64 bits"
            raise UserError(f"{source}.{name}={shown}: no model has more than {most or _MOST_NUMBER:,}; correct it")
        if isinstance(one, float) and most is not None and not abs(one) <= most:
            raise UserError(f"{source}.{name}={one}: no model has more than {most:,}; correct it")


def with_num_layers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with its number of layers, of which Transformers saves only the kinds for Nemotron-H."""
    kinds = config.get("layers_block_type")
    if config.get("num_hidden_layers") is not None or not isinstance(kinds, list):
        return config
    return {**config, "num_hidden_layers": len(kinds)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of a layer."""

    count: int
    """Routed experts; where layers differ, the largest number, as of the others."""
    active: int
    """Those of them that a token goes through."""
    width: int
    """Width inside one."""
    shared: int
    """Width inside the experts that every token goes through; 0 without."""
    dense_layers: int
    """Layers that have a dense MLP instead."""
    has_router_loss: bool = False
    """Whether their routers' load-balancing loss is trained on."""

    @classmethod
    def from_config_dict(cls, config: Mapping[str, Any], source: str = "model.config") -> Experts | None:
        """Read them from a Hugging Face configuration, by the names that families use; None for dense models.

        Raises:
            UserError: A number of theirs is no whole number, nor a list with one per layer.
        """

        def first(*names: str) -> int:
            return next((_largest(config, name, source) for name in names if config.get(name)), 0)

        count = first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        if count <= 1:
            return None
        width = first("moe_intermediate_size", "intermediate_size")
        shared = first("shared_expert_intermediate_size", "shared_intermediate_size")
        return cls(
            count=count,
            active=min(count, first("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token") or 1),
            width=width,
            shared=shared or width * first("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
            dense_layers=first("first_k_dense_replace", "num_dense_layers"),
            has_router_loss=config.get("output_router_logits") is True,
        )


def positive_int(config: Mapping[str, Any], name: str, source: str) -> int:
    """Return a size that a configuration gives.

    Raises:
        UserError: It is no whole number of at least 1.
    """
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{source}.{name}={value!r}: must be a whole number of at least 1")
    return value


def largest_size(config: Mapping[str, Any], name: str, source: str) -> int:
    """Return a size; Gemma 3n gives the MLP's per layer, of which the largest is taken."""
    is_list = isinstance(config[name], list | tuple) and config[name]
    return positive_int({name: _largest(config, name, source)} if is_list else config, name, source)


def _largest(config: Mapping[str, Any], name: str, source: str) -> int:
    """Return a number that some families give per layer (Hunyuan's ``moe_topk``), as the largest of them."""
    value = config[name]
    values: list[int] = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in values):
        raise UserError(f"{source}.{name}={value!r}: must be a whole number, or a list with one per layer")
    return max(values)
