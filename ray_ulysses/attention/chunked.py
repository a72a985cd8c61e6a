"""Exchange and attention for a fraction of the KV heads at a time, to save memory.

With ``n`` chunks, the buffers of the exchange and the kernel's inputs are ``1 / n`` of their size. Nothing is kept in
the kernel's layout: the forward sends queries, keys and values, and returns the output; the backward sends them again
with the output and its gradient, and returns the gradients. That takes two collectives per chunk in each direction and
none for recomputation under checkpointing: (6 hq + 6 hkv) bytes, against (5 hq + 6 hkv) without chunks.

Legend: B rows, L tokens of a slice, T tokens of this ring rank (rows concatenated), H query heads and K KV heads, h
query heads of this rank, D head size of Q and K, E head size of V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from ray_ulysses.attention.exchange import (
    QKV,
    HeadKind,
    gradient_buffers,
    plan_of,
    ranks_first,
    refuse_second_order,
    return_heads,
    send_heads,
    split_heads,
    tokens_first,
)
from ray_ulysses.attention.kernels.call import Gradients
from ray_ulysses.attention.operators import (
    NUM_SETTINGS,
    SETTINGS_SCHEMA,
    OperatorSettings,
    keep_inputs,
    kept_inputs,
    or_empty,
)
from ray_ulysses.attention.ring import attend, attend_backward
from ray_ulysses.parallel.collectives import group_named
from ray_ulysses.parallel.layout import HeadPlan, RankHeads, part_of

_BACKWARD_KINDS: tuple[HeadKind, ...] = (*QKV, "query", "query")


def attend_in_chunks(
    query_BHLD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLE: torch.Tensor,
    settings: OperatorSettings,
    num_chunks: int,
) -> torch.Tensor:
    """Exchange heads, attend and exchange back, in chunks; differentiable. Returns ``[B, L, H, E]``, contiguous.

    Every rank of ``sp`` must call.
    """
    out: torch.Tensor = torch.ops.ray_ulysses.attend_in_chunks(query_BHLD, key_BKLD, value_BKLE, *settings, num_chunks)[
        0
    ]
    return out


def _chunks(given: OperatorSettings, num_chunks: int) -> Iterator[tuple[HeadPlan, RankHeads, slice]]:
    """Yield, per chunk, the heads of all ranks, those of this rank, and their positions among its query heads."""
    plan, whole = plan_of(given.heads[0], given.heads[1], given.ulysses)
    rank = group_named(given.ulysses).rank()
    for chunk in range(num_chunks):
        part = part_of(plan, chunk, num_chunks)
        mine = part.ranks[rank]
        yield part, mine, slice(mine.first - whole.first, mine.stop - whole.first)


@torch.library.custom_op(
    "ray_ulysses::attend_in_chunks",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {SETTINGS_SCHEMA}, int num_chunks) -> (Tensor, Tensor)",
)
def _attend(
    query_BHLD: torch.Tensor, key_BKLD: torch.Tensor, value_BKLE: torch.Tensor, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    given = OperatorSettings(*settings[:-1])
    layer, group, sinks = given.layer(), group_named(given.ulysses), given.sinks
    out_BLHE, lse_hT = _result_buffers(query_BHLD, value_BKLE, given.ulysses)
    sizes = (query_BHLD.shape[3], key_BKLD.shape[3], value_BKLE.shape[3])
    for plan, mine, own in _chunks(given, settings[-1]):
        payload = send_heads((query_BHLD, key_BKLD, value_BKLE), QKV, plan, group)
        part_ThE = query_BHLD.new_empty(lse_hT.shape[1], mine.num_heads, value_BKLE.shape[3])
        if mine.num_heads:
            q, k, v = split_heads(tokens_first(payload), mine, QKV, sizes)
            chunk_sinks = None if sinks is None else sinks[own]
            part_ThE, lse_hT[own] = attend(q, k, v, chunk_sinks, replace(layer, calls=mine.calls()))
        blocks = ranks_first(part_ThE.flatten(1, 2), len(plan.ranks), query_BHLD.shape[0])
        return_heads(blocks, [out_BLHE.transpose(1, 2)], ["query"], plan, group)
    return out_BLHE, lse_hT


@_attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _result_buffers(query, value, OperatorSettings(*rest[:-1]).ulysses)


def _result_buffers(
    query_BHLD: torch.Tensor, value_BKLE: torch.Tensor, ulysses: str
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_heads, tokens, _ = query_BHLD.shape
    plan, mine = plan_of(num_heads, value_BKLE.shape[1], ulysses)
    precision = torch.promote_types(query_BHLD.dtype, torch.float32)
    return (
        query_BHLD.new_empty(num_rows, tokens, num_heads, value_BKLE.shape[3]),
        query_BHLD.new_empty(mine.num_heads, num_rows * tokens * len(plan.ranks), dtype=precision),
    )


@torch.library.custom_op(
    "ray_ulysses::attend_in_chunks_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, {SETTINGS_SCHEMA}, "
    "int num_chunks) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad_BLHE: torch.Tensor,
    query_BHLD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLE: torch.Tensor,
    out_BLHE: torch.Tensor,
    lse_hT: torch.Tensor,
    *settings: Any,
) -> tuple[torch.Tensor, ...]:
    given = OperatorSettings(*settings[:-1])
    layer, group, sinks = given.layer(), group_named(given.ulysses), given.sinks
    tensors = (query_BHLD, key_BKLD, value_BKLE, grad_BLHE.transpose(1, 2), out_BLHE.transpose(1, 2))
    sizes = [tensor.shape[3] for tensor in tensors]
    grads, grad_sinks = _gradients_of(tensors, given.ulysses), or_empty(sinks, grad_BLHE).clone()
    written_kv: set[int] = set()
    for plan, mine, own in _chunks(given, settings[-1]):
        payload = send_heads(tensors, _BACKWARD_KINDS, plan, group)
        q, k, v, upstream, out = split_heads(tokens_first(payload), mine, _BACKWARD_KINDS, sizes)
        width = mine.num_heads * sizes[0] + mine.num_kv_heads * (sizes[1] + sizes[2])
        made = cache(partial(payload.new_empty, q.shape[0], width))
        if mine.num_heads:
            dsinks = attend_backward(
                upstream.contiguous(), q, k, v, None if sinks is None else sinks[own], out.contiguous(),
                lse_hT[own].contiguous(), replace(layer, calls=mine.calls()), partial(_parts, made, mine, sizes),
            )  # fmt: skip
            if dsinks is not None:
                grad_sinks[own] = dsinks
        return_heads(ranks_first(made(), len(plan.ranks), query_BHLD.shape[0]), grads, QKV, plan, group, written_kv)
    dq, dk, dv = (grad.to(query_BHLD.dtype) for grad in grads)
    return dq, dk, dv, grad_sinks


def _parts(make: Callable[[], torch.Tensor], heads: RankHeads, sizes: Sequence[int]) -> Gradients:
    """Return the gradients of queries, keys and values as views of the tensor that is sent back."""
    dq, dk, dv = split_heads(make(), heads, QKV, sizes[:3])
    return dq, dk, dv


@_backward.register_fake
def _(grad: torch.Tensor, *tensors_and_settings: Any) -> tuple[torch.Tensor, ...]:
    tensors, given = tensors_and_settings[:3], OperatorSettings(*tensors_and_settings[5:-1])
    dq, dk, dv = (one.to(tensors[0].dtype) for one in _gradients_of(tensors, given.ulysses))
    return dq, dk, dv, or_empty(given.sinks, grad).clone()


def _gradients_of(tensors: tuple[torch.Tensor, ...], ulysses: str) -> tuple[torch.Tensor, ...]:
    query, key, value = tensors[:3]
    num_rows, num_heads, tokens, head_size = query.shape
    plan, _ = plan_of(num_heads, key.shape[1], ulysses)
    return gradient_buffers(query, plan, num_rows, tokens, head_size, value.shape[3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    keep_inputs(ctx, inputs[:-1], output)
    ctx.num_chunks = inputs[-1]


def _gradient(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    tensors, settings = kept_inputs(ctx)
    *grads, sinks = torch.ops.ray_ulysses.attend_in_chunks_backward(grad, *tensors, *settings, ctx.num_chunks)
    return (*grads, sinks if ctx.has_sinks else None, *[None] * NUM_SETTINGS)


_attend.register_autograd(_gradient, setup_context=_keep)
_backward.register_autograd(refuse_second_order)
