"""The first moment after one optimizer step over equal micro-batches: what of the gradient their sum has kept."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ray_ulysses.checkpoint.state import ShardedState
from ray_ulysses.engine.zero import ZeroSettings, build_engine
from ray_ulysses.engine.zero_state import state_source

BETA = 0.5


def first_moments(
    rank: int, world_size: int, cases: list[tuple[int, str]], accumulations: list[int]
) -> dict[tuple[int, str, int], dict[str, torch.Tensor]]:
    return {
        (stage, offload, accumulation): _moments(stage, offload, accumulation, rank)  # type: ignore[arg-type]
        for stage, offload in cases
        for accumulation in accumulations
    }


def _moments(
    stage: Literal[1, 2, 3], offload: Literal["none", "cpu"], accumulation: int, rank: int
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: Any = LlamaForCausalLM(config).bfloat16()
    settings = ZeroSettings(
        stage=stage,
        dtype="bf16",
        accumulation=accumulation,
        max_grad_norm=None,
        learning_rate=1e-3,
        betas=(BETA, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        offload_optimizer=offload,
        partition_everything=True,
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
