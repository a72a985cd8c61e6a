"""A step on pairs takes no more memory than one on the next token, whatever its reference model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses import apply_ulysses, shard_batch
from ray_ulysses.attention.batch import IGNORE_INDEX
from ray_ulysses.engine.preferences import Preference
from ray_ulysses.trainer.row_loss import PairObjective, row_loss
from tests.unit.attention.meshes import ALONE
from tests.unit.engine.steps import checkpointed, peak_bytes

TOKENS, PAIRS = 2048, 2


def test_the_peak_of_dpo_is_that_of_a_step_on_the_next_token() -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=2048, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = checkpointed(AutoModelForCausalLM.from_config(config).train())
    apply_ulysses(model, ALONE)
    ids = torch.randint(0, 2048, (1, TOKENS))
    labels = ids.clone()
    labels.view(2 * PAIRS, -1)[:, :100] = IGNORE_INDEX
    batch = shard_batch(ids, labels, [TOKENS // (2 * PAIRS)] * (2 * PAIRS), ALONE)
    reference_D = torch.full((2 * PAIRS,), -5000.0, dtype=torch.float64)

    def peak(objective: PairObjective | None) -> int:
        def step() -> None:
            row: Any = None  # only its number is used, for reading
            row_loss(model, batch, row, tile="auto", objective=objective).objective_sum.backward()

        step()  # gradients exist from here on
        return peak_bytes(step)

    of_tokens, of_pairs = (
        peak(None),
        peak(PairObjective(preference=Preference(kind="dpo"), reference=lambda row: reference_D)),
    )
    assert of_tokens > 4 * TOKENS * 64 * 4, "activations dominate"
    assert of_pairs <= 1.1 * of_tokens, f"{of_pairs / 2**20:.1f} MiB, {of_tokens / 2**20:.1f} MiB for the next token"
