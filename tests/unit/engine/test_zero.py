"""DeepSpeed's configuration for each stage and offload, and settings that are refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import check_architecture, torch_dtype
from ray_ulysses.engine.zero import (
    ZeroSettings,
    gather_experts_at_once,
    make_optimizer,
    partition_config,
    zero_config,
)
from ray_ulysses.errors import UserError
from ray_ulysses.planner.state_memory import NVME_SUB_GROUP
from tests.unit.attention.models import ARCHITECTURES, zoo_model
from tests.unit.config.trees import small_tree
from tests.unit.export.runs import fields_of

SETTINGS = ZeroSettings(
    dtype="bf16", accumulation=4, max_grad_norm=1.0, learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_summed_in_fp32_in_every_stage(
    stage: Literal[1, 2, 3],
) -> None:
    settings = replace(SETTINGS, stage=stage)
    config = zero_config(settings)
    assert config["zero_optimization"]["stage"] == stage
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["communication_data_type"] == "fp32"
    assert config["bf16"]["immediate_grad_update"], "stage 1 would keep gradients in bf16 until the end of the step"
    assert partition_config(settings) == (config if stage == 3 else None)


@pytest.mark.parametrize(
    ("device", "changes", "fused"),
    [
        ("cuda", {}, True),
        ("cuda", {"kind": "muon"}, True),
        # DeepSpeed's CPU optimizer would have a flag of its own; without a GPU, it is not used.
        ("cuda", {"offload_optimizer": "cpu"}, None),
        ("cpu", {}, None),
    ],
    ids=str,
)
def test_the_update_is_fused_on_a_gpu(
    device: str, changes: dict[str, Any], fused: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, the fused update rounds by the position in a tensor, so results would depend on the world size."""
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: SimpleNamespace(device_name=lambda: device))
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2, 2))], "kind": "adamw"}]
    assert make_optimizer(groups, replace(SETTINGS, **changes)).param_groups[0]["fused"] is fused


def test_nvme_has_a_buffer_for_each_tensor_of_a_sub_group_that_is_not_too_large() -> None:
    zero = zero_config(replace(SETTINGS, offload_optimizer="nvme", nvme_path="/nvme"))["zero_optimization"]
    nvme = {"device": "nvme", "nvme_path": "/nvme", "pin_memory": False, "buffer_count": 4}
    assert zero["offload_optimizer"] == nvme and zero["sub_group_size"] == NVME_SUB_GROUP
    assert "sub_group_size" not in zero_config(replace(SETTINGS, offload_optimizer="cpu"))["zero_optimization"]
    assert zero_config(replace(SETTINGS, sub_group_elements=7))["zero_optimization"]["sub_group_size"] == 7


def test_secondary_shards_are_those_of_stage_3_in_groups_of_several_ranks() -> None:
    size = "zero_hpz_partition_size"
    assert zero_config(replace(SETTINGS, secondary_size=4))["zero_optimization"][size] == 4
    assert size not in zero_config(SETTINGS)["zero_optimization"]
    assert size not in zero_config(replace(SETTINGS, stage=2, secondary_size=4))["zero_optimization"]


@pytest.mark.parametrize(("architecture", "number"), [("mixtral", 2), ("kimi_linear", 1), ("llama", 0)])
def test_the_experts_of_a_layer_are_one_module_to_the_engine(architecture: str, number: int) -> None:
    model = zoo_model(architecture)
    gather_experts_at_once(model)
    leaves = [module for module in model.modules() if getattr(module, "_z3_leaf", False)]
    assert len(leaves) == number and all(type(module).__name__.endswith("Experts") for module in leaves)


def test_a_model_that_transformers_does_not_checkpoint_is_refused_before_workers_are_taken() -> None:
    fields = {
        "model_type": "jetmoe", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "kv_channels": 8, "num_hidden_layers": 2, "vocab_size": 61, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    with pytest.raises(UserError, match=r"^memory\.gradient_checkpointing=true: "):
        check_architecture(parse_config(small_tree(model__config=fields)))
    check_architecture(parse_config(small_tree(model__config=fields, memory__gradient_checkpointing=False)))


@pytest.mark.parametrize(("dtype", "fits", "misfits"), [("bf16", 24, 20), ("fp32", 20, 22)])
def test_experts_whose_rows_are_not_whole_blocks_of_16_bytes_are_refused(
    dtype: Literal["bf16", "fp32"], fits: int, misfits: int
) -> None:
    for width in (fits, misfits):
        config = ARCHITECTURES["qwen3_moe"](moe_intermediate_size=width)
        tree = small_tree(model__config=fields_of(config), model__dtype=dtype)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch_dtype(dtype))
        if width == fits:
            check_architecture(parse_config(tree))
            _train(model)
        else:
            with pytest.raises(UserError, match=rf"^model\.dtype={dtype}: .*\.down_proj is \[4, 32, {misfits}\]"):
                check_architecture(parse_config(tree))
            # If torch can multiply such experts, they need not be refused.
            with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
                _train(model)


def _train(model: Any) -> None:
    model(input_ids=torch.arange(24)[None]).logits.sum().backward()
