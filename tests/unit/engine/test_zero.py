"""What DeepSpeed is told for each stage and offload, and what can't be."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import replace
from typing import Any, Literal

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import check_architecture
from ray_ulysses.engine.zero import (
    ZeroSettings,
    gather_experts_at_once,
    partition_config,
    zero_config,
)
from ray_ulysses.errors import UserError
from ray_ulysses.planner.state_memory import NVME_SUB_GROUP
from tests.unit.attention.models import zoo_model
from tests.unit.config.trees import small_tree

SETTINGS = ZeroSettings(
    dtype="bf16",
    accumulation=4,
    max_grad_norm=1.0,
    learning_rate=1e-3,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_accumulated_and_reduced_in_fp32_whatever_the_stage(stage: Literal[1, 2, 3]) -> None:
    config = zero_config(replace(SETTINGS, stage=stage))
    assert config["zero_optimization"]["stage"] == stage
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["communication_data_type"] == "fp32"
    assert config["bf16"]["immediate_grad_update"], "stage 1 would keep gradients in bf16 until the end of the step"


def test_only_stage_3_partitions_a_model_while_it_is_loaded() -> None:
    assert partition_config(SETTINGS) == zero_config(SETTINGS)
    assert partition_config(replace(SETTINGS, stage=1)) is None
    assert partition_config(replace(SETTINGS, stage=2)) is None


def test_nvme_has_a_buffer_for_each_tensor_of_a_sub_group_that_is_not_too_large() -> None:
    zero = zero_config(replace(SETTINGS, offload_optimizer="nvme", nvme_path="/nvme"))["zero_optimization"]
    assert zero["offload_optimizer"] == {
        "device": "nvme",
        "nvme_path": "/nvme",
        "pin_memory": False,
        "buffer_count": 4,
    }
    assert zero["sub_group_size"] == NVME_SUB_GROUP
    assert "sub_group_size" not in zero_config(replace(SETTINGS, offload_optimizer="cpu"))["zero_optimization"]
    assert zero_config(replace(SETTINGS, sub_group_elements=7))["zero_optimization"]["sub_group_size"] == 7


def _dbrx() -> Any:
    # Its experts are a module with parameters inside, which is called once for each expert that has a token.
    attention, ffn = {"kv_n_heads": 2, "rope_theta": 1e4}, {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}
    config = AutoConfig.for_model(
        "dbrx", d_model=32, n_heads=4, n_layers=2, vocab_size=61, attn_config=attention, ffn_config=ffn
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("architecture", "number"), [("mixtral", 2), ("dbrx", 2), ("kimi_linear", 1), ("llama", 0)])
def test_the_experts_of_a_layer_are_one_module_to_the_engine(architecture: str, number: int) -> None:
    model = _dbrx() if architecture == "dbrx" else zoo_model(architecture)
    gather_experts_at_once(model)
    leaves = [module for module in model.modules() if getattr(module, "_z3_leaf", False)]
    assert len(leaves) == number and all(type(module).__name__.endswith("Experts") for module in leaves)


MEMORY = """
import os, resource
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from ray_ulysses.engine.zero import prepare_process
prepare_process(0, "cpu")
def layer():
    made = [torch.ones(2 << 20) for _ in range(6)]
for _ in range(3):
    layer()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    layer()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_a_process_on_a_cpu_keeps_the_memory_that_a_layer_frees_for_the_next() -> None:
    # In one process of six, something small that lies above the layer's memory keeps it by chance.
    counts = [int(subprocess.check_output([sys.executable, "-c", MEMORY], text=True).split()[-1]) for _ in range(2)]
    # Ten times 48 MiB in pages of 4 KiB; without, a third of them and more were cleared again.
    assert max(counts) < 400


def test_a_model_that_transformers_does_not_checkpoint_is_refused_before_workers_are_taken() -> None:
    fields = {
        "model_type": "jetmoe", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "kv_channels": 8, "num_hidden_layers": 2, "vocab_size": 61, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    text = "^memory.gradient_checkpointing=true: .* for JetMoeForCausalLM; set memory.gradient_checkpointing: false$"
    with pytest.raises(UserError, match=text):
        check_architecture(parse_config(small_tree(model__config=fields)))
    check_architecture(parse_config(small_tree(model__config=fields, memory__gradient_checkpointing=False)))
