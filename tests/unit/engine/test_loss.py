from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_ulysses import causal_lm_loss, loss_scale, shard_batch
from ray_ulysses.attention.batch import IGNORE_INDEX
from ray_ulysses.errors import UserError
from tests.unit.attention.meshes import ALONE, place


def model_of(logits: torch.Tensor, **outputs: Any) -> Any:
    return lambda **inputs: SimpleNamespace(logits=logits, **outputs)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world_size", "sp_size", "accumulation"), [(1, 1, 1), (4, 2, 1), (4, 4, 3), (6, 1, 2)])
def test_the_scale_undoes_the_engines_mean_over_ranks_and_micro_batches(
    zero_stage: int, world_size: int, sp_size: int, accumulation: int
) -> None:
    sums = torch.arange(1.0, 1 + world_size * accumulation).view(accumulation, world_size)
    mesh = place(0, sp_size, world_size)
    scale = loss_scale(50, mesh, zero_stage=zero_stage, accumulation=accumulation)
    averaged = (sums * scale / accumulation).sum(dim=0).mean()
    assert float(averaged) == pytest.approx(float(sums.sum()) / 50, rel=1e-6)
    # As a scale: a factor of sp must not hide.
    assert scale == world_size * accumulation / 50


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_tensor_of_tokens_gives_a_tensor_and_zero_tokens_a_scale_of_zero(dtype: torch.dtype) -> None:
    scale = loss_scale(torch.tensor(7, dtype=dtype), place(0, 2, 4), accumulation=3)
    assert isinstance(scale, torch.Tensor) and float(scale) == pytest.approx(12 / 7, rel=1e-15)
    assert float(loss_scale(torch.tensor(0, dtype=dtype), ALONE)) == loss_scale(0, ALONE) == 0.0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"zero_stage": 4}, "zero_stage=4"),
        ({"accumulation": 0}, "accumulation=0"),
        ({"global_tokens": -1}, "global_tokens=-1"),
    ],
)
def test_impossible_arguments_of_the_scale_are_refused(arguments: dict[str, int], text: str) -> None:
    with pytest.raises(UserError, match=text):
        loss_scale(**{"global_tokens": 5, "mesh": ALONE, **arguments})  # type: ignore[arg-type]


def test_the_loss_is_a_sum_over_supervised_tokens_in_fp32() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 8, 5, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.tensor([0, 1, 2, IGNORE_INDEX, 4, 0, 1, 2])
    loss_sum, num_tokens = causal_lm_loss(model_of(logits), shard_batch(labels.clamp(min=0), labels, [5, 2], ALONE))
    log_p = logits.detach().float()[0].log_softmax(-1)
    wanted = [(0, 1), (1, 2), (3, 4), (5, 1)]
    assert int(num_tokens) == len(wanted)
    assert loss_sum.dtype == torch.float32
    torch.testing.assert_close(loss_sum.detach(), -sum(log_p[token, label] for token, label in wanted))


def test_an_auxiliary_loss_is_refused() -> None:
    batch = shard_batch(torch.zeros(4).long(), None, None, ALONE)
    with pytest.raises(UserError, match="output_router_logits: false"):
        causal_lm_loss(model_of(torch.zeros(1, 4, 5), aux_loss=torch.zeros(())), batch)
    causal_lm_loss(model_of(torch.zeros(1, 4, 5), aux_loss=None), batch)
