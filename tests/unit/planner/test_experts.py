"""The traffic of ZeRO-3 for experts, against numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_ulysses.config import parse_config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.experts import ExpertTraffic
from ray_ulysses.trained_part import TrainedPart
from tests.unit.config.trees import small_tree

QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
LORA = TrainedPart(added=1, trained=1, has_embedding=False, has_head=False)
FROZEN_EMBEDDING = TrainedPart(added=0, trained=1, has_embedding=False, has_head=True)


def traffic(part: TrainedPart | None = None, **changes: Any) -> ExpertTraffic | None:
    tree = small_tree(model__dtype="bf16", **{"memory__zero_stage": 3, **changes})
    return ExpertTraffic.of(parse_config(tree), replace(ModelShape.from_config_dict(QWEN3_30B_A3B), part=part))


@pytest.mark.parametrize(
    ("part", "zero_bytes", "tokens"),
    [
        (None, 4_831_838_208, 36_864),
        (FROZEN_EMBEDDING, 4_831_838_208, 36_864),
        (LORA, 2_415_919_104, 18_432),
    ],
)
def test_a_layer_of_qwen3_30b_a3b_is_gathered_twice_and_reduced_in_fp32(
    part: Any, zero_bytes: int, tokens: int
) -> None:
    found = traffic(part)
    assert found is not None
    assert (found.zero_bytes, found.token_bytes, found.break_even_tokens) == (zero_bytes, 131_072, tokens)


def test_a_stage_that_does_not_gather_weights_has_no_such_traffic() -> None:
    assert traffic(memory__zero_stage=3) is not None
    tree = small_tree(model__dtype="bf16", memory__zero_stage=1)
    assert ExpertTraffic.of(parse_config(tree), ModelShape.from_config_dict(QWEN3_30B_A3B)) is None
