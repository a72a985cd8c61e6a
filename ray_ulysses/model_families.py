"""What families of decoders have that their configurations do not say, without torch; tests look at their modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def with_num_layers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with its number of layers, of which Transformers saves only the kinds for Nemotron-H."""
    kinds = config.get("layers_block_type")
    if config.get("num_hidden_layers") is not None or not isinstance(kinds, list):
        return config
    return {**config, "num_hidden_layers": len(kinds)}
