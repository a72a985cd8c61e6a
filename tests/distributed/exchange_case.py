"""The head exchange on gloo ranks against plain slicing, and length-dependent RoPE against one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ray_ulysses import SequenceMesh, apply_ulysses, shard_batch, unshard
from ray_ulysses.attention.exchange import gather_heads, kv_copies, scatter_heads
from ray_ulysses.parallel.collectives import gather_sequence

ROWS, TOKENS, HEAD_SIZE, VALUE_SIZE = 2, 8, 4, 6


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeReport:
    """What one rank found.

    Attributes:
        wrong: What differs from plain slicing; bitwise where only copies move, 1e-6 where copies' gradients add.
        forward_collectives: Collectives of the forward, by name.
        backward_collectives: Collectives of the backward, by name.
    """

    wrong: tuple[str, ...]
    forward_collectives: dict[str, int]
    backward_collectives: dict[str, int]


def exchange_equals_slicing(
    rank: int, world_size: int, num_heads: int, num_kv_heads: int, num_rows: int
) -> ExchangeReport:
    """Exchange heads, do something that is not linear to them, exchange back; hold it to slices of whole tensors."""
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)
    shapes = [(num_heads, HEAD_SIZE), (num_kv_heads, HEAD_SIZE), (num_kv_heads, VALUE_SIZE)]
    whole = [torch.randn(num_rows, heads, TOKENS, size, requires_grad=True) for heads, size in shapes]
    upstream = torch.randn(num_rows, TOKENS, num_heads, VALUE_SIZE)
    local_tokens = TOKENS // world_size
    mine = slice(rank * local_tokens, (rank + 1) * local_tokens)
    local = [tensor.detach()[:, :, mine].contiguous().requires_grad_() for tensor in whole]

    group = dist.group.WORLD
    assert group is not None
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        gathered = gather_heads(*local, group)
        out = scatter_heads(_stand_in(*gathered), group)
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        out.backward(upstream[:, mine])

    wanted_out = _stand_in(*(tensor.transpose(1, 2) for tensor in whole))
    wanted_out.backward(upstream)
    copies = kv_copies(num_heads, num_kv_heads, world_size)
    expected = [whole[0], *(tensor.repeat_interleave(copies, dim=1) for tensor in whole[1:])]
    wrong = []
    for name, ours, full in zip("qkv", gathered, expected, strict=True):
        heads = full.shape[1] // world_size
        mine_of_heads = full.detach()[:, rank * heads : (rank + 1) * heads].transpose(1, 2)
        if not torch.equal(ours.detach(), mine_of_heads):
            wrong.append(f"{name} is not the whole sequence of this rank's heads")
    if not torch.equal(out.detach(), wanted_out.detach()[:, mine]):
        wrong.append("output is not this rank's slice of every head")
    for name, one, full in zip("qkv", local, whole, strict=True):
        assert one.grad is not None and full.grad is not None
        truth = full.grad[:, :, mine]
        # fp32; the gradients of KV copies are added in another order.
        if not (one.grad - truth).norm() <= 1e-6 * truth.norm():
            wrong.append(f"the gradient of {name}")
    return ExchangeReport(
        wrong=tuple(wrong), forward_collectives=_collectives(forward), backward_collectives=_collectives(backward)
    )


def _stand_in(query_BSHD: torch.Tensor, key_BSKD: torch.Tensor, value_BSKE: torch.Tensor) -> torch.Tensor:
    """Mix tokens and heads as attention does, without its cost: each query head with its KV head."""
    copies = query_BSHD.shape[2] // key_BSKD.shape[2]
    key_BSHD, value_BSHE = (tensor.repeat_interleave(copies, dim=2) for tensor in (key_BSKD, value_BSKE))
    weights_BSH = (query_BSHD * key_BSHD.cumsum(dim=1)).sum(dim=-1).tanh()
    return weights_BSH.unsqueeze(-1) * value_BSHE.cumsum(dim=1)


def _collectives(profiler: Any) -> dict[str, int]:
    return {event.key: event.count for event in profiler.key_averages() if event.key.startswith("c10d::")}


def layer_collectives(rank: int, world_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the collectives of forward and backward of a decoder of two layers."""
    from torch.profiler import ProfilerActivity, profile

    from tests.unit.attention.models import tiny_model

    mesh = SequenceMesh.from_group(dist.group.WORLD)
    model = apply_ulysses(tiny_model(), mesh)
    batch = shard_batch(torch.arange(16), None, [9, 7], mesh)
    with profile(activities=[ProfilerActivity.CPU]) as forward:
        logits = model(**batch.model_inputs()).logits
    with profile(activities=[ProfilerActivity.CPU]) as backward:
        logits.sum().backward()
    return _collectives(forward), _collectives(backward)


def gathered_sequence(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gathered sequence and the gradient of this rank's slice, under a loss that differs by rank."""
    local = (torch.arange(6.0).view(2, 3) + 10 * rank).requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    whole = gather_sequence(local, group)
    weights = torch.arange(float(whole.numel())).view_as(whole) * (rank + 1)
    (whole * weights).sum().backward()
    assert local.grad is not None
    return whole.detach(), local.grad


def rope_error(rank: int, world_size: int, kind: str, tokens: int) -> tuple[float, float]:
    """Return the relative error of logits and of all gradients, after longer and shorter rows, against one process."""
    from tests.unit.attention.models import magnified, tiny_model
    from tests.unit.attention.test_rope import KINDS

    mesh = SequenceMesh.from_group(dist.group.WORLD)
    model: Any = apply_ulysses(magnified(tiny_model(**KINDS[kind])), mesh)
    row = torch.arange(tokens).unsqueeze(0) * 7 % 61
    with torch.no_grad():
        for other in (60, 12):
            model(**shard_batch(torch.arange(other) % 61, None, None, mesh).model_inputs())
    batch = shard_batch(row, None, None, mesh)
    logits = unshard(model(**batch.model_inputs()).logits, batch)
    # Every rank computes the whole loss from the gathered logits: it counts once a rank.
    (logits.float() ** 2).sum().div(world_size).backward()
    eager = magnified(tiny_model(**KINDS[kind]))
    wanted = eager(input_ids=row, use_cache=False).logits
    (wanted.float() ** 2).sum().backward()
    worst = 0.0
    for ours, truth in zip(model.parameters(), eager.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        worst = max(worst, float((ours.grad - truth.grad).norm() / truth.grad.norm()))
    return float(((logits - wanted).norm() / wanted.norm()).detach()), worst
