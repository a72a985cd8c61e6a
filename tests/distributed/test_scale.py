"""The gradient's scale, as a scale: SGD and active clipping show every factor that Adam would hide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch
from ray_ulysses.engine.zero import zero_config
from tests.apart import worst
from tests.breadth import fast_cases
from tests.distributed.harness import run_ranks
from tests.distributed.seam_case import zero_settings
from tests.unit.attention.models import VOCAB, magnified, tiny_model

pytestmark = pytest.mark.distributed

LENGTHS, ROW_TOKENS = (17, 1, 9, 13), 48
RATE, CLIP, ACCUMULATION = 0.1, 0.5, 2
# (world size, sp size, ring size)
LAYOUTS = {"sp2": (2, 2, 1), "sp2-ring2-dp2": (4, 2, 2), "sp4-ring2": (4, 4, 2)}


def make_rows(num_rows: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (num_rows, ROW_TOKENS), generator=torch.Generator().manual_seed(11))


def reference_update(num_rows: int, max_norm: float | None) -> tuple[dict[str, torch.Tensor], float]:
    """Return each parameter's change by one SGD step of one process, and the gradient's norm."""
    model, total, count = magnified(tiny_model()), torch.zeros(()), 0
    for row in make_rows(num_rows):
        for ids in row[: sum(LENGTHS)].split(LENGTHS):
            logits = model(input_ids=ids[None], use_cache=False).logits
            total = total + torch.nn.functional.cross_entropy(logits[0, :-1], ids[1:], reduction="sum")
            count += len(ids) - 1
    (total / count).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if max_norm is None else max_norm)
    return {name: -RATE * p.grad for name, p in model.named_parameters()}, float(norm)


def sgd_ratios(
    rank: int, world_size: int, ring_size: int, sp_size: int, stage: Any, max_norm: float | None
) -> tuple[float, float, float, float]:
    """Take one SGD step.

    Returns:
        Norm of the update over one process's, the worst error of a parameter's update over what is allowed it, the
        engine's gradient norm over one process's, and that norm.
    """
    import deepspeed

    dp_size = world_size // sp_size
    groups = [dist.new_group(list(range(d * sp_size, (d + 1) * sp_size))) for d in range(dp_size)]
    mesh = SequenceMesh.from_group(groups[rank // sp_size], ring_size=ring_size)
    settings = zero_settings(stage=stage, accumulation=ACCUMULATION, max_grad_norm=max_norm, learning_rate=RATE)
    model = apply_ulysses(magnified(tiny_model()), mesh)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=zero_config(settings), dist_init_required=False
    )
    rows = make_rows(dp_size * ACCUMULATION)
    tokens = len(rows) * (sum(LENGTHS) - len(LENGTHS))
    for row in rows[rank // sp_size :: dp_size]:
        loss_sum, _ = causal_lm_loss(engine, shard_batch(row, None, LENGTHS, mesh))
        engine.backward(loss_sum * loss_scale(tokens, mesh, zero_stage=stage, accumulation=ACCUMULATION))
        engine.step()
    read = deepspeed.utils.safe_get_full_fp32_param
    updates = {name: read(p).clone() - before[name] for name, p in engine.module.named_parameters()}
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    wanted, wanted_norm = reference_update(len(rows), max_norm)
    whole, wanted_whole = (torch.stack([t.norm() for t in found.values()]).norm() for found in (updates, wanted))
    # A change is read as a difference of fp32 weights, each rounded to 2**-24 of itself: beside law 1's floor.
    allowed = {name: 1e-5 * truth.norm() + 2**-24 * before[name].norm() for name, truth in wanted.items()}
    error = worst(float((updates[name] - truth).norm() / allowed[name]) for name, truth in wanted.items())
    return float(whole / wanted_whole), error, norm / wanted_norm, wanted_norm


def ratios_of_stages(rank: int, world_size: int, sp_size: int, ring_size: int) -> dict[str, tuple[float, ...]]:
    return {
        f"zero{stage}-{clip}": sgd_ratios(rank, world_size, ring_size, sp_size, stage, clip)
        for stage, clip in ((1, CLIP), (2, CLIP), (3, CLIP), (3, None))
    }


@pytest.mark.parametrize(("world_size", "sp_size", "ring_size"), fast_cases(LAYOUTS, "sp2-ring2-dp2"))
def test_an_sgd_step_is_that_of_one_process_for_every_zero_stage_and_clipping(
    world_size: int, sp_size: int, ring_size: int
) -> None:
    for ratios in run_ranks(ratios_of_stages, world_size, sp_size, ring_size, timeout_s=180):
        for case, (update, error, norm, true_norm) in ratios.items():
            assert true_norm > 2 * CLIP, "clipping must be active where it is asked for"
            assert update == pytest.approx(1.0, abs=5e-4), case
            assert norm == pytest.approx(1.0, abs=5e-4), case
            assert error <= 1, case
