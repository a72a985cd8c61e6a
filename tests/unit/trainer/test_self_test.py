"""What a run's self-test tests: the heads, windows and caps that the model's configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ray_ulysses.config.loading import parse_config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.trainer.self_test import attention_settings, layer_windows

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ALTERNATING = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "llama"}, (None,)),
        ({"model_type": "mistral", "sliding_window": 6}, (6,)),
        ({"model_type": "mistral", "sliding_window": None}, (None,)),
        ({"model_type": "qwen2", "sliding_window": 6}, (None,)),
        ({"model_type": "gemma2", "sliding_window": 6, "layer_types": ALTERNATING}, (None, 6)),
        ({"model_type": "gpt_oss", "sliding_window": 6, "layer_types": ALTERNATING}, (None, 6)),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_each_kind_of_layer_is_tested_with_its_window(fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    fields = {**SIZES, **fields}
    assert layer_windows(AutoConfig.for_model(fields.pop("model_type"), **fields)) == windows


def test_the_model_s_heads_caps_and_dtype_are_tested(tmp_path: Path) -> None:
    model = {**SIZES, "model_type": "gemma2", "head_dim": 8, "attn_logit_softcapping": 50.0, "sliding_window": 6}
    tree: dict[str, Any] = {
        "run": {"name": "run", "storage": str(tmp_path)},
        "model": {"init": "random", "dtype": "bf16", "config": model},
        "data": {"path": str(tmp_path), "context_tokens": 64, "rows_per_step": 2},
        "optimizer": {"lr": 1e-3},
        "cluster": {"workers": 1},
    }
    fields = dict(model)
    text_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    found = attention_settings(parse_config(tree), ModelShape.from_config_dict(model), text_config)
    assert (found.num_heads, found.num_kv_heads, found.head_size, found.value_size) == (4, 2, 8, 8)
    assert (found.dtype, found.softcap, found.windows) == (torch.bfloat16, 50.0, (None, 6))
