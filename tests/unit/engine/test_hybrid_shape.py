"""What `plan` knows of a hybrid: its parameters are those of its modules, and impossible layouts are problems."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ray_ulysses.config import Config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.activation_memory import AttentionSplit, Tiles, activation_terms
from ray_ulysses.planner.flops import step_flops
from ray_ulysses.planner.problems import heads_problems
from ray_ulysses.run.settings import model_shape
from tests.unit.attention.models import HYBRIDS, VOCAB, zoo_model
from tests.unit.planner.runs import make_config


def hybrid_config(architecture: str, **parallel: Any) -> Config:
    described = HYBRIDS[architecture]().to_diff_dict()
    sizes = {"hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"}
    described |= {name: getattr(HYBRIDS[architecture](), name) for name in sizes}
    return make_config(described, parallel=parallel)


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_parameters_are_those_of_the_modules(architecture: str) -> None:
    shape, model = model_shape(hybrid_config(architecture)), zoo_model(architecture)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.is_exact
    assert shape.mixer_layers == (
        4 if architecture.startswith("zamba") else 2 if architecture.startswith("falcon") else 1
    )


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_products_with_weights_are_those_that_torch_counts(architecture: str) -> None:
    shape, tokens = model_shape(hybrid_config(architecture)), 16
    ids = torch.arange(tokens)[None] % VOCAB
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        zoo_model(architecture)(input_ids=ids, use_cache=False)
    counted = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    # Products of states, and attention, are batched ones. The convolution is counted for its padding, too.
    products = sum(counted.get(f"aten.{name}", 0) for name in ("mm", "addmm", "convolution"))
    per_token = step_flops(replace(shape, mixer_multiply_adds=0), tokens=1, sum_squared_lengths=0) / 3
    # Jamba's time steps are made by batched products, and the states of Zamba's heads as well.
    assert products / tokens == pytest.approx(per_token, rel=0.1 if architecture == "zamba" else 0.04)


STATES = {
    # Values of the state, times what reads and what writes them.
    "lfm2": 0,
    "qwen3_next": 8 * 6 * 5 * 3,
    "kimi_linear": 4 * 6 * 6 * 3,
    "minimax": 4 * 6 * 6 * 2,
    "jamba": 64 * 5 * 2,
    "zamba": 4 * 64 * 5 * 2,
    "bamba": 8 * 8 * 5 * 2,
    "falcon_h1": 2 * 8 * 8 * 5 * 2,
    "zamba2": 4 * 8 * 8 * 5 * 2,
}


@pytest.mark.parametrize("architecture", STATES)
def test_reads_and_writes_of_a_state_are_counted(architecture: str) -> None:
    shape = model_shape(hybrid_config(architecture))
    assert shape.mixer_multiply_adds == STATES[architecture]
    without = replace(shape, mixer_multiply_adds=0)
    work = {"tokens": 7, "sum_squared_lengths": 49}
    assert step_flops(shape, **work) - step_flops(without, **work) == 6 * 7 * STATES[architecture]


@pytest.mark.parametrize(
    ("kept", "sp_size", "size"), [("both", 2, 40), ("both", 1, 0), ("kernel", 2, 0), ("none", 2, 0)]
)
def test_kept_outputs_of_layers_that_carry_state_are_in_the_estimate(kept: Any, sp_size: int, size: int) -> None:
    """40 values per token go back from a delta net of 8 heads of 5; under other policies they are sent once more."""
    shape, tiles = model_shape(hybrid_config("qwen3_next")), Tiles(mlp=64, norm=64, query_norm=64)
    assert shape.mixer_width == 40
    split = AttentionSplit(ulysses_size=sp_size, ring_size=1, head_groups=1, kept=kept)

    def total(shape: ModelShape) -> int:
        return sum(one.bytes for one in activation_terms(shape, 64, split, 2, tiles, checkpointed=True))

    assert total(shape) - total(replace(shape, mixer_width=0)) == 64 * 2 * size


def test_sizes_that_can_not_share_the_heads_are_problems() -> None:
    def found(**parallel: Any) -> dict[str, str]:
        config = hybrid_config("qwen3_next", **parallel)
        return {one.path: one.hint for one in heads_problems(config, model_shape(config))}

    valid = "use 1, 2, 4"
    assert found(sp_size=3, allowed_sp=[1, 2, 3]) == {"parallel.sp_size": valid, "parallel.allowed_sp": valid}
    assert found(sp_size=4, ring_size=2) == {"parallel.ring_size": "use 1 or null"}
    assert found(sp_size=4) == {}
