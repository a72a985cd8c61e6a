"""bf16 gradients of the micro-batches of a step are added up in fp32, in every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ray_ulysses.checkpoint.state import ShardedState
from ray_ulysses.engine.zero import build_engine
from ray_ulysses.engine.zero_state import state_source
from tests.distributed.harness import run_ranks
from tests.distributed.seam_case import zero_settings

pytestmark = pytest.mark.distributed
NUM_MICRO_BATCHES = 16
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def first_moments(rank: int, world_size: int, offload: str) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    """Return this rank's first moments by stage and number of micro-batches, each the same row."""
    return {(stage, n): _moments(stage, offload, n, rank) for stage in (1, 2, 3) for n in (1, NUM_MICRO_BATCHES)}


def _moments(stage: int, offload: str, accumulation: int, rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=61, num_hidden_layers=1, **SIZES)).bfloat16()
    settings = zero_settings(
        stage=stage, dtype="bf16", accumulation=accumulation, betas=(0.5, 0.95), offload_optimizer=offload
    )
    engine = build_engine(model, settings)
    row = torch.randint(0, 61, (1, 16), generator=torch.Generator().manual_seed(rank))
    for _ in range(accumulation):
        engine.backward(engine(input_ids=row, labels=row, use_cache=False).loss)
        held = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        assert offload != "none" or not held, f"ZeRO-{stage}: bf16 gradients are held beside those in fp32: {held}"
        engine.step()
    state = state_source(engine)
    assert isinstance(state, ShardedState)
    moments = {part.key: part.tensor.clone() for part in state.parts if part.key.startswith("exp_avg/")}
    engine.destroy()
    return moments


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.slow
def test_equal_micro_batches_add_up_to_the_gradient_of_one_in_every_stage(offload: str) -> None:
    """A sixteenth of a bf16 value is exact, and so are sums of sixteenths in fp32; in bf16 they are not."""
    for moments in run_ranks(first_moments, 2, offload, timeout_s=120):
        for stage in (1, 2, 3):
            one, many = moments[stage, 1], moments[stage, NUM_MICRO_BATCHES]
            assert one.keys() == many.keys() and any(tensor.any() for tensor in one.values())
            for key, tensor in one.items():
                error = float((many[key] - tensor).norm() / tensor.norm()) if tensor.any() else 0.0
                assert error <= 1e-6, f"ZeRO-{stage}, offload {offload}: {key} is off by {error:.1e}"


def test_the_sum_in_bf16_would_show() -> None:
    part = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16() / NUM_MICRO_BATCHES
    total = torch.zeros_like(part)
    for _ in range(NUM_MICRO_BATCHES):
        total += part
    wanted = NUM_MICRO_BATCHES * part.float()
    assert float((total.float() - wanted).norm() / wanted.norm()) > 1e-3
