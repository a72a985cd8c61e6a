"""Tiny models for tests of what happens inside a model: a zoo of architectures, each drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig

VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
# Its second embedding has 134 million parameters by default.
_SMALL: dict[str, dict[str, Any]] = {"gemma4_text": {"vocab_size_per_layer_input": VOCAB}}
_ALTERNATING = ["sliding_attention", "full_attention"]
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": False}
_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LINEAR = ["linear_attention", "full_attention"]
_DELTA_NET: dict[str, Any] = {
    "layer_types": _LINEAR, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}  # fmt: skip
_SHARED_EXPERTS: dict[str, Any] = {
    "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, **_EXPERTS,
}  # fmt: skip
_DELTA_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4, "layer_types": _LINEAR, "mlp_layer_types": ["dense", "sparse"], "linear_num_heads": 4,
    "linear_head_dim": 6, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "num_local_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 5, "mamba_chunk_size": 8,
}  # fmt: skip
_JAMBA: dict[str, Any] = {
    "attn_layer_period": 2, "mamba_d_state": 5, "mamba_dt_rank": 4, "num_experts": 4, "expert_layer_period": 2,
    "expert_layer_offset": 1, "mamba_proj_bias": True, **_EXPERTS,
}  # fmt: skip
_ZAMBA: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "mamba_d_state": 5,
}  # fmt: skip
# Of every kind that some checkpoint sets above 0.
_NO_DROPOUT = {"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def _config(model_type: str, own: dict[str, Any], **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **{**SIZES, **_NO_DROPOUT, **own, **changes})


def _kind(model_type: str, **own: Any) -> Callable[..., PreTrainedConfig]:
    return partial(_config, model_type, own)


ARCHITECTURES: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": _kind("llama"),
    # Six query heads, with biases on Q, K and V.
    "qwen2": _kind("qwen2", hidden_size=48, num_attention_heads=6),
    # QK-norm a head, tied embeddings.
    "qwen3": _kind("qwen3", head_dim=16, tie_word_embeddings=True),
    "mistral": _kind("mistral", sliding_window=6),
    # Soft-capped scores and logits, alternating windows, a scale of its own.
    "gemma2": _kind(
        "gemma2",
        head_dim=8,
        sliding_window=6,
        layer_types=_ALTERNATING,
        query_pre_attn_scalar=5,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=5.0,
    ),
    # Local and global layers with two kinds of RoPE, QK-norm.
    "gemma3_text": _kind(
        "gemma3_text", head_dim=8, sliding_window=6, layer_types=_ALTERNATING, query_pre_attn_scalar=5
    ),
    # Heads of another size and number in its global layers, two kinds of RoPE, a second embedding for each layer.
    "gemma4_text": _kind(
        "gemma4_text",
        head_dim=8,
        sliding_window=6,
        layer_types=_ALTERNATING,
        per_layer_config={"1": {"head_dim": 16, "num_key_value_heads": 1}},
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
    ),
    # Attention sinks, alternating windows, experts with biases.
    "gpt_oss": _kind(
        "gpt_oss", head_dim=8, sliding_window=6, layer_types=_ALTERNATING, num_local_experts=4, **_EXPERTS
    ),
    "mixtral": _kind("mixtral", num_local_experts=4, **_EXPERTS),
    "qwen3_moe": _kind("qwen3_moe", head_dim=8, num_experts=4, moe_intermediate_size=24, **_EXPERTS),
    # One matrix for Q, K and V.
    "phi3": _kind("phi3", pad_token_id=0),
    # One matrix for Q, K and V, interleaved a head; RoPE on a quarter of it; every query head has a KV head.
    "gpt_neox": _kind("gpt_neox"),
    # Norms over all heads of Q and K.
    "olmo2": _kind("olmo2"),
    # MLA: heads of Q and K are wider than those of V; experts chosen by group.
    "deepseek_v3": _kind(
        "deepseek_v3",
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        num_experts_per_tok=2,
    ),
    "granite": _kind(
        "granite", attention_multiplier=0.2, residual_multiplier=0.7, embedding_multiplier=2.0, logits_scaling=1.5
    ),
    # One KV head for all, biases everywhere, a window.
    "starcoder2": _kind(
        "starcoder2", num_key_value_heads=1, sliding_window=6, residual_dropout=0.0, embedding_dropout=0.0
    ),
    # Parallel blocks; global layers know no positions.
    "cohere2": _kind("cohere2", sliding_window=6, layer_types=_ALTERNATING, pad_token_id=0),
    "smollm3": _kind("smollm3", no_rope_layers=[1, 0], pad_token_id=0),
    # Frequencies by the length of the document: two sets, or one for each length beyond the original one.
    "phi3-longrope": _kind(
        "phi3",
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 9,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
        },
    ),
    "llama-dynamic": _kind(
        "llama",
        max_position_embeddings=9,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    ),
    # Chunks of documents, the layer that sees all of them without rotary positions but a temperature; experts.
    "llama4_text": _kind(
        "llama4_text",
        num_hidden_layers=3,
        head_dim=8,
        intermediate_size_mlp=48,
        interleave_moe_layer_step=2,
        num_local_experts=4,
        num_experts_per_tok=1,
        output_router_logits=False,
        no_rope_layers=[1, 0, 1],
        attention_chunk_size=7,
        floor_scale=4,
    ),
    # Learned absolute positions.
    "gpt2": _kind("gpt2", n_inner=48),
}
"""Architectures that are done exactly, each with what sets it apart."""

HYBRIDS: dict[str, Callable[..., PreTrainedConfig]] = {
    # Short convolutions beside attention, with and without biases; experts.
    "lfm2": _kind("lfm2", layer_types=["conv", "full_attention"], conv_bias=True, block_auto_adjust_ff_dim=False),
    "lfm2_moe": _kind(
        "lfm2_moe",
        layer_types=["full_attention", "conv"],
        num_dense_layers=1,
        num_experts=4,
        moe_intermediate_size=24,
        **_EXPERTS,
    ),
    # Seven tokens wide, a norm on both sides, attention with gates and windows.
    "lfm3": _kind(
        "lfm3",
        head_dim=8,
        layer_types=["conv", "sliding_attention"],
        sliding_window=6,
        conv_bias=True,
        **_SPECIAL_TOKENS,
    ),
    # Gated delta nets: two value heads per key head, in one interleaved projection or in several.
    "qwen3_next": _kind("qwen3_next", decoder_sparse_step=1, **_SHARED_EXPERTS, **_DELTA_NET),
    "qwen3_5_text": _kind("qwen3_5_text", head_dim=8, **_DELTA_NET),
    "qwen3_5_moe_text": _kind("qwen3_5_moe_text", **_SHARED_EXPERTS, **_DELTA_NET),
    "olmo_hybrid": _kind("olmo_hybrid", pad_token_id=0, **_DELTA_NET),
    # Decays per channel, made by a module inside; latent attention without positions, experts.
    "kimi_linear": _kind("kimi_linear", output_router_logits=False, pad_token_id=0, **_DELTA_ATTENTION),
    # Decays within a lower bound; latent attention with positions, gates, and experts in groups.
    "bailing_hybrid": _kind("bailing_hybrid", n_group=2, topk_group=1, **_DELTA_ATTENTION, **_SPECIAL_TOKENS),
    # Lightning attention in blocks of eight tokens, with decays of its own for each head; experts.
    "minimax": _kind(
        "minimax",
        head_dim=6,
        block_size=8,
        layer_types=_LINEAR,
        num_local_experts=4,
        linear_attn_alpha_factor=1.5,
        linear_attn_beta_factor=0.7,
        **_EXPERTS,
    ),
    # Mamba 1: time steps and states of all channels, with norms; experts; before attention and after it.
    "jamba": _kind("jamba", attn_layer_offset=1, **_JAMBA),
    "jamba-mamba_last": _kind("jamba", attn_layer_offset=0, **_JAMBA),
    # Mamba 1 with heads of their own time steps and states, and a shared block of attention.
    "zamba": _kind(
        "zamba",
        n_mamba_heads=4,
        mamba_dt_rank=4,
        attention_hidden_size=64,
        attention_head_dim=16,
        num_key_value_heads=4,
        **_ZAMBA,
        **_SPECIAL_TOKENS,
    ),
    # Mamba 2 with one group of states for all heads, or a group for two heads.
    "bamba": _kind("bamba", attn_layer_indices=[1], **_MAMBA),
    "granitemoehybrid": _kind(
        "granitemoehybrid", layer_types=_LINEAR, num_local_experts=4, shared_intermediate_size=24, **_MAMBA, **_EXPERTS
    ),
    "nemotron_h": _kind(
        "nemotron_h",
        layer_types=[*_LINEAR, "mlp"],
        num_hidden_layers=3,
        head_dim=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=4,
        ssm_state_size=5,
        chunk_size=8,
    ),
    "falcon_h1": _kind("falcon_h1", mamba_d_ssm=64, **_MAMBA),
    "falcon_h1-norm": _kind("falcon_h1", mamba_d_ssm=64, mamba_rms_norm=True, **{**_MAMBA, "mamba_n_groups": 2}),
    "zamba2": _kind(
        "zamba2", use_mem_rope=True, n_mamba_heads=8, mamba_headdim=8, mamba_ngroups=2, chunk_size=8, **_ZAMBA
    ),
}
"""Architectures with layers that carry state along the sequence, which have no ring."""


# Drawn tokens are below VOCAB, so that none is padding, from which RoBERTa alone would count positions.
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB + 3, "pad_token_id": VOCAB, "mask_token_id": VOCAB + 1, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

ENCODERS: dict[str, Callable[..., PreTrainedConfig]] = {
    # Learned positions from 0.
    "bert": _kind("bert", **_ENCODER),
    # Learned positions from that after the padding token's.
    "roberta": _kind("roberta", **_ENCODER),
    "esm": _kind("esm", position_embedding_type="absolute", token_dropout=False, **_ENCODER),
    "esm-rotary": _kind("esm", position_embedding_type="rotary", token_dropout=False, **_ENCODER),
    # Embeddings are scaled by the masked tokens of a document.
    "esm-token_dropout": _kind(
        "esm", position_embedding_type="rotary", token_dropout=True, **_ENCODER | {"mask_token_id": 7}
    ),
    # Several query heads for each KV head.
    "eurobert": _kind("eurobert", **_ENCODER),
    # Full attention in the first layer and a window of six tokens on either side in the others; a head of two modules.
    "modernbert": _kind(
        "modernbert", num_hidden_layers=3, local_attention=12, cls_token_id=0, sep_token_id=1, **_ENCODER
    ),
}
"""Masked language models, whose attention is bidirectional."""


def plain_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return a small configuration of any architecture, without dropout and auxiliary losses."""
    return AutoConfig.for_model(model_type, **{**SIZES, **_NO_DROPOUT, "output_router_logits": False, **changes})


def tiny_model(model_type: str = "llama", *, meta: bool = False, **changes: Any) -> Any:
    """Return a small model of an architecture; on ``meta`` it costs nothing and can only be looked at."""
    config = AutoConfig.for_model(model_type, **{**SIZES, **_SMALL.get(model_type, {}), **changes})
    with torch.device("meta" if meta else "cpu"):
        torch.manual_seed(7)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def zoo_model(architecture: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model of the zoo, the same in every process, in which a mistake of attention shows.

    Weights are large, so that attention is far from uniform; biases, sinks and norms are far from their first values.
    """
    config = {**ARCHITECTURES, **HYBRIDS}[architecture](**changes)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    return moved_away(model, 3.0, 0.3).to(dtype)


def encoder_model(architecture: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return one of `ENCODERS`, the same in every process, in which a mistake of attention shows."""
    torch.manual_seed(7)
    model: Any = AutoModelForMaskedLM.from_config(ENCODERS[architecture](**changes), attn_implementation="eager")
    if hasattr(model.base_model, "contact_head"):
        # No loss reaches ESM's predictor of contacts.
        model.base_model.contact_head.requires_grad_(False)
    # Attention of initial weights is nearly uniform, and the gradients of queries nearly cancel.
    return moved_away(model, 8.0, 0.3).to(dtype)


def moved_away(model: Any, factor: float, noise: float) -> Any:
    """Return the model with its weights larger by a factor, and noise on its biases, sinks and norms."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A decay is the exponential of its parameter, of which three times would be thousands.
            if parameter.dim() > 1 and not name.endswith("A_log"):
                parameter.mul_(factor)
            else:
                parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return model


def magnified(model: Any) -> Any:
    """Return the model with larger weights, so that attention is far from uniform and mistakes show."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model
