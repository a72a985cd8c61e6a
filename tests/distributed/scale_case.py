"""One SGD step through a ZeRO engine against one process: Adam would hide a wrong scale, SGD and clipping don't."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch
from ray_ulysses.engine.zero import ZeroSettings, zero_config
from tests.apart import worst
from tests.unit.attention.models import VOCAB, magnified, tiny_model

LENGTHS = (17, 1, 9, 13)
ROW_TOKENS = 48
RATE = 0.1


def make_rows(num_rows: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (num_rows, ROW_TOKENS), generator=torch.Generator().manual_seed(11))


def reference_update(num_rows: int, max_norm: float | None) -> tuple[dict[str, torch.Tensor], float]:
    model = magnified(tiny_model())
    sums, count = [], 0
    for row in make_rows(num_rows):
        start = 0
        for length in LENGTHS:
            ids = row[start : start + length].unsqueeze(0)
            logits = model(input_ids=ids, use_cache=False).logits
            sums.append(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))
            count += length - 1
            start += length
    (torch.stack(sums).sum() / count).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if max_norm is None else max_norm)
    return {name: -RATE * p.grad for name, p in model.named_parameters()}, float(norm)


def sgd_ratios(
    rank: int, world_size: int, ring_size: int, sp_size: int, stage: Any, accumulation: int, max_norm: float | None
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
    settings = ZeroSettings(
        stage=stage, dtype="fp32", accumulation=accumulation, max_grad_norm=max_norm, learning_rate=RATE,
        betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, partition_everything=True,
    )  # fmt: skip
    model = apply_ulysses(magnified(tiny_model()), mesh)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=zero_config(settings), dist_init_required=False
    )
    rows = make_rows(dp_size * accumulation)
    tokens = len(rows) * (sum(LENGTHS) - len(LENGTHS))
    for row in rows[rank // sp_size :: dp_size]:
        loss_sum, _ = causal_lm_loss(engine, shard_batch(row, None, LENGTHS, mesh))
        engine.backward(loss_sum * loss_scale(tokens, mesh, zero_stage=stage, accumulation=accumulation))
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


def ratios_of_stages(
    rank: int, world_size: int, ring_size: int, sp_size: int, max_norm: float
) -> dict[str, tuple[float, float, float, float]]:
    return {
        f"zero{stage}-{clip}": sgd_ratios(rank, world_size, ring_size, sp_size, stage, 2, clip)
        for stage in (1, 2, 3)
        for clip in (None, max_norm)
    }
