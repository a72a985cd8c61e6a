"""Buffers that an architecture keeps in fp32, such as correction biases of routers, stay fp32 in a bf16 model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses.checkpoint.state import StateDescription
from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import build_model, refuse_architecture
from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import BALANCING_BIASES
from tests.breadth import fast_only
from tests.distributed.sweep_case import _tiny_config, refuse_large, types_of
from tests.unit.attention.models import zoo_model
from tests.unit.config.trees import small_tree

ROUNDED = {"kimi_linear", "longcat_flash", "minimax_m2", "minimax_m3_vl_text"}
"""Model types whose correction biases Transformers 5.23 rounds to the model's type."""
BIASES = tuple(sorted(BALANCING_BIASES - ROUNDED))
"""Model types with a correction bias in fp32 that can be trained."""
_NAMES = ("e_score_correction_bias", "expert_bias")
_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def save_with_biases(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    """Save a model in bf16 with correction biases in fp32 that bf16 would round, and return these."""
    model = model.to(torch.bfloat16)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in _NAMES:
                # As in GLM-5.2: large values with small differences.
                setattr(module, name, 5 + 0.001 * torch.arange(buffer.numel(), dtype=torch.float32))
    model.save_pretrained(directory)
    return {name: one for name, one in model.named_buffers() if name.endswith(_NAMES)}


def config_of(directory: Path, init: str = "pretrained") -> Config:
    model = {"init": init, "path": str(directory), "dtype": "bf16"}
    # Some architectures do not support gradient checkpointing.
    return parse_config({**small_tree(memory__gradient_checkpointing=False), "model": model})


def tiny(name: str) -> Any:
    if name in ("deepseek_v3", "bailing_hybrid"):
        return zoo_model(name)
    if name == "nemotron_h":
        return zoo_model(name, layer_types=["linear_attention", "full_attention", "moe"], **_EXPERTS)
    config = _tiny_config(name, {})
    refuse_large(config)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", fast_only(BIASES, "deepseek_v3", "glm4_moe"))
def test_fp32_tensors_stay_fp32(tmp_path: Path, name: str) -> None:
    biases = save_with_biases(tiny(name), tmp_path)
    assert biases, "the model has no correction bias"
    loaded = dict(build_model(config_of(tmp_path)).named_buffers())
    empty = dict(build_model(config_of(tmp_path), state=StateDescription(tensors={})).named_buffers())
    drawn = dict(build_model(config_of(tmp_path, "random")).named_buffers())
    for key, bias in biases.items():
        assert loaded[key].dtype == torch.float32 and torch.equal(loaded[key], bias)
        assert empty[key].dtype == drawn[key].dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("name", types_of("causal_lm"))
def test_a_loaded_model_equals_that_of_transformers(tmp_path: Path, name: str) -> None:
    try:
        made = tiny(name)
    except Exception as error:  # families raise errors of many types for sizes that they do not take
        pytest.skip(f"can't be built tiny: {str(error)[:100]}")
    save_with_biases(made, tmp_path)
    try:
        refuse_architecture(AutoConfig.from_pretrained(tmp_path))
    except UserError as error:
        pytest.skip(f"is refused: {str(error)[:100]}")
    model = build_model(config_of(tmp_path))
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    state, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    assert state.keys() == wanted.keys()
    for key, tensor in state.items():
        # Some architectures keep parameters in fp32, which ZeRO can't: they are trained in the run's type.
        assert tensor.dtype == (torch.bfloat16 if key in parameters else wanted[key].dtype), key
        assert torch.equal(tensor, wanted[key].to(tensor.dtype)), key
