"""Tiny multimodal models: a vision tower, a projector and a text decoder with a head, each drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedConfig

from tests.unit.attention.models import SIZES, VOCAB

_TEXT: dict[str, Any] = {**SIZES, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
# A quarter of a head's frequencies is the time's, and so on.
_M_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_QWEN_TOKENS = {"image_token_id": 57, "video_token_id": 58, "vision_start_token_id": 55, "vision_end_token_id": 56}


def _gemma3(**changes: Any) -> PreTrainedConfig:
    kinds = ["sliding_attention", "full_attention"]
    text = {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 6, "layer_types": kinds}
    return AutoConfig.for_model(
        "gemma3",
        text_config={**_TEXT, **text, "query_pre_attn_scalar": 5},
        vision_config={**_VISION, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=60,
        **changes,
    )


def _mistral3(**changes: Any) -> PreTrainedConfig:
    vision = {**_VISION, "model_type": "pixtral", "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    return AutoConfig.for_model(
        "mistral3",
        text_config={**_TEXT, "model_type": "mistral", "head_dim": 8, "sliding_window": None},
        vision_config={**vision, "head_dim": 16},
        **{"tie_word_embeddings": False, **changes},
    )


def _qwen2_vl(**changes: Any) -> PreTrainedConfig:
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    text = {**_TEXT, "rope_parameters": _M_ROPE}
    return AutoConfig.for_model("qwen2_vl", text_config=text, vision_config=vision, **_QWEN_TOKENS, **changes)


def _qwen2_5_vl(**changes: Any) -> PreTrainedConfig:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    return AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={**_TEXT, "rope_parameters": _M_ROPE},
        vision_config={**vision, "patch_size": 4, "fullatt_block_indexes": [0]},
        **_QWEN_TOKENS,
        **{"tie_word_embeddings": True, **changes},
    )


def _qwen3_vl(name: str = "qwen3_vl", **changes: Any) -> PreTrainedConfig:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24} if "moe" in name else {}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    return AutoConfig.for_model(
        name,
        text_config={**_TEXT, "head_dim": 8, "rope_parameters": _M_ROPE, **experts},
        vision_config={**vision, "patch_size": 4, "deepstack_visual_indexes": [0]},
        **_QWEN_TOKENS,
        **changes,
    )


MULTIMODAL: dict[str, Callable[..., PreTrainedConfig]] = {
    "gemma3": _gemma3,
    "mistral3": _mistral3,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": partial(_qwen3_vl, "qwen3_vl_moe"),
}
"""Multimodal architectures whose decoder is trained exactly."""


def multimodal_model(name: str, vocab_size: int = VOCAB, **changes: Any) -> Any:
    """Return a whole model, the same in every process, in which a mistake of attention shows."""
    config = MULTIMODAL[name](**changes)
    config.get_text_config().vocab_size = vocab_size
    torch.manual_seed(7)
    # Grouped products of experts do not support fp64.
    model = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
            else:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.float()
