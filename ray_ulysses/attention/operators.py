"""One layer's attention as ``torch.library`` operators, which are opaque to ``torch.compile``.

The forward is a single operator, regardless of the kernel, the ring and the number of kernel calls. The backward needs
only the inputs and the operator's results, so a checkpointing policy that saves these results never recomputes
attention.

``attend_in_head_groups`` saves memory by processing one group of KV heads at a time. With ``n`` groups, the exchange
buffers and the kernel's inputs shrink to ``1 / n`` of their size. No tensor is saved in the kernel's layout: the
forward sends queries, keys and values, and returns the output; the backward sends them again together with the output
and its gradient, and returns the gradients. This takes two collectives per group in the forward and in the backward,
and none for recomputation under checkpointing. The traffic is (6 hq + 6 hkv) bytes, against (5 hq + 6 hkv) without head
groups.

Legend: U ranks of the Ulysses group, B rows, L tokens of a slice, T tokens of this ring rank (rows concatenated), H
query heads and K KV heads, h and k heads of this rank, D head size of Q and K, E head size of V, F = h D + k (D + E).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ray_ulysses.attention.documents import Rectangle
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
from ray_ulysses.attention.kernels.call import Gradients, Spans
from ray_ulysses.attention.ring import RingLayer, attend, attend_backward
from ray_ulysses.parallel.collectives import group_named
from ray_ulysses.parallel.layout import HeadPlan, RankHeads, part_of

_SETTINGS = (
    "Tensor? sinks, Tensor cu_seqlens, Tensor borders, Tensor rectangles, int[] heads, float scale, int window, "
    "bool causal, float softcap, str kernel, str ulysses, str ring"
)
"""Schema of the arguments that follow each operator's tensors: the fields of :class:`OperatorSettings`."""


class OperatorSettings(NamedTuple):
    """A layer's document tables and settings, in types that operators accept: tensors, numbers and strings."""

    sinks: torch.Tensor | None
    """Attention sinks of this rank's query heads, ``[h]``, or None if the layer has no sinks."""
    cu_seqlens: torch.Tensor
    borders: torch.Tensor
    rectangles: torch.Tensor
    heads: list[int]
    """``[H, K, D, E]``: the layer's numbers of heads and head sizes."""
    scale: float
    window: int
    """Number of tokens of its document that each token sees, including itself; 0 for no limit. In bidirectional
    attention, on either side."""
    causal: bool
    softcap: float
    """Cap on the scores; 0 for no cap."""
    kernel: str
    ulysses: str
    """Name of the Ulysses group; empty if the group has a single rank."""
    ring: str
    """Name of the ring's group; empty if there is no ring."""

    @property
    def rank_heads(self) -> RankHeads:
        """The heads of this rank."""
        return plan_of(self.heads[0], self.heads[1], self.ulysses)[1]

    def layer(self) -> RingLayer:
        """Convert the settings to the `RingLayer` that `attend` expects."""
        # Compute the longest span here: as an integer argument, it would make torch.compile recompile at each step.
        borders = tuple(self.borders.tolist())
        longest = max(stop - start for start, stop in pairwise(borders))
        return RingLayer(
            kernel=self.kernel,
            scale=self.scale,
            window=self.window or None,
            causal=self.causal,
            softcap=self.softcap or None,
            spans=Spans(cu_seqlens=self.cu_seqlens, borders=borders, max_seqlen=longest),
            rectangles=tuple(Rectangle(*fields) for fields in self.rectangles.tolist()),
            calls=self.rank_heads.calls(),
            ring=group_named(self.ring) if self.ring else None,
        )


_NUM_SETTINGS = len(OperatorSettings._fields)


def attend_payload(payload_UBLF: torch.Tensor, settings: OperatorSettings) -> torch.Tensor:
    """Compute attention ``[T, h, E]`` of this rank's heads from a :func:`gather_heads` payload; differentiable."""
    out: torch.Tensor = torch.ops.ray_ulysses.attend(payload_UBLF, None, None, *settings)[0]
    return out


def attend_heads(
    query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKE: torch.Tensor, settings: OperatorSettings
) -> torch.Tensor:
    """Compute attention ``[T, H, E]`` if all heads are on this rank; differentiable."""
    out: torch.Tensor = torch.ops.ray_ulysses.attend(query_THD, key_TKD, value_TKE, *settings)[0]
    return out


@torch.library.custom_op(
    "ray_ulysses::attend",
    mutates_args=(),
    schema=f"(Tensor query_or_payload, Tensor? key, Tensor? value, {_SETTINGS}) -> (Tensor, Tensor)",
)
def _attend(
    first: torch.Tensor, key_TkD: torch.Tensor | None, value_TkE: torch.Tensor | None, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    given = OperatorSettings(*settings)
    return attend(*_heads_of(first, key_TkD, value_TkE, given), given.sinks, given.layer())


@_attend.register_fake
def _attend_shape(
    first: torch.Tensor, key_TkD: torch.Tensor | None, value_TkE: torch.Tensor | None, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    given, tokens = OperatorSettings(*settings), first.shape[0]
    if key_TkD is None:
        ranks, rows, of_slice = first.shape[:3]
        tokens = ranks * rows * of_slice
    num_heads, precision = given.rank_heads.num_heads, torch.promote_types(first.dtype, torch.float32)
    return first.new_empty(tokens, num_heads, given.heads[3]), first.new_empty(num_heads, tokens, dtype=precision)


@torch.library.custom_op(
    "ray_ulysses::attend_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor query_or_payload, Tensor? key, Tensor? value, Tensor out, Tensor lse, "
    f"{_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attend_backward(
    grad_ThE: torch.Tensor,
    first: torch.Tensor,
    key_TkD: torch.Tensor | None,
    value_TkE: torch.Tensor | None,
    out_ThE: torch.Tensor,
    lse_hT: torch.Tensor,
    *settings: Any,
) -> tuple[torch.Tensor, ...]:
    given = OperatorSettings(*settings)
    heads = _heads_of(first, key_TkD, value_TkE, given)
    made = cache(partial(_gradients_of, grad_ThE, first, key_TkD, value_TkE, given))
    upstream = grad_ThE.contiguous()
    dsinks = attend_backward(upstream, *heads, given.sinks, out_ThE, lse_hT, given.layer(), lambda: made()[1])
    return *made()[0], _or_empty(dsinks, grad_ThE)


@_attend_backward.register_fake
def _attend_backward_shape(grad_ThE: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    first, key_TkD, value_TkE, _, _, *settings = inputs
    given = OperatorSettings(*settings)
    grads, _ = _gradients_of(grad_ThE, first, key_TkD, value_TkE, given)
    return *grads, _or_empty(None if given.sinks is None else torch.empty_like(given.sinks), grad_ThE)


def _heads_of(
    first: torch.Tensor, key_TkD: torch.Tensor | None, value_TkE: torch.Tensor | None, given: OperatorSettings
) -> Gradients:
    """Return queries, keys and values of this rank's heads. If ``first`` is a payload, they are views of it."""
    if key_TkD is None or value_TkE is None:
        return _views(tokens_first(first), given)
    return first, key_TkD, value_TkE


def _gradients_of(
    grad_ThE: torch.Tensor,
    first: torch.Tensor,
    key_TkD: torch.Tensor | None,
    value_TkE: torch.Tensor | None,
    given: OperatorSettings,
) -> tuple[Gradients, Gradients]:
    """Allocate the gradients of the operator's inputs, and return them with the gradients of Q, K and V.

    If the input is a payload, the gradients of Q, K and V are views of the payload's gradient.
    """
    if key_TkD is None or value_TkE is None:
        grad_TF = grad_ThE.new_empty(grad_ThE.shape[0], first.shape[3])
        return (grad_TF, grad_ThE.new_empty(0), grad_ThE.new_empty(0)), _views(grad_TF, given)
    grads = first.new_empty(first.shape), key_TkD.new_empty(key_TkD.shape), value_TkE.new_empty(value_TkE.shape)
    return grads, grads


def _views(features_TF: torch.Tensor, given: OperatorSettings) -> Gradients:
    _, _, head_size, value_size = given.heads
    q, k, v = split_heads(features_TF, given.rank_heads, QKV, (head_size, head_size, value_size))
    return q, k, v


def _or_empty(grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Replace a missing gradient of the sinks by an empty tensor, because an operator can't return None."""
    return like.new_empty(0) if grad is None else grad


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    tensors, given = inputs[:-_NUM_SETTINGS], OperatorSettings(*inputs[-_NUM_SETTINGS:])
    ctx.num_tensors = len(tensors)
    ctx.has_sinks = given.sinks is not None
    sinks = (given.sinks,) if ctx.has_sinks else ()
    ctx.save_for_backward(*tensors, *output, given.cu_seqlens, given.borders, given.rectangles, *sinks)
    ctx.rest = given[4:]
    ctx.set_materialize_grads(False)


def _kept_inputs(ctx: Any) -> tuple[tuple[Any, ...], OperatorSettings]:
    saved, count = ctx.saved_tensors, ctx.num_tensors + 2
    sinks = saved[-1] if ctx.has_sinks else None
    return saved[:count], OperatorSettings(sinks, *saved[count : count + 3], *ctx.rest)


def _gradient(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    tensors, settings = _kept_inputs(ctx)
    *grads, sinks = torch.ops.ray_ulysses.attend_backward(grad, *tensors, *settings)
    if tensors[1] is None:
        ranks, rows = tensors[0].shape[:2]
        # Free the payload and the output before the gradients are exchanged, which is the peak of memory.
        del tensors
        ctx.maybe_clear_saved_tensors()
        grads = [ranks_first(grads[0], ranks, rows), None, None]
    return (*grads, sinks if ctx.has_sinks else None, *[None] * (_NUM_SETTINGS - 1))


_attend.register_autograd(_gradient, setup_context=_keep_inputs)
_attend_backward.register_autograd(refuse_second_order)


_BACKWARD_KINDS: tuple[HeadKind, ...] = (*QKV, "query", "query")


def attend_in_head_groups(
    query_BHLD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLE: torch.Tensor,
    settings: OperatorSettings,
    num_groups: int,
) -> torch.Tensor:
    """Exchange heads, compute attention and exchange back, for one head group after another; differentiable.

    All ranks of ``sp`` must call this function. Returns a contiguous tensor ``[B, L, H, E]``.
    """
    out: torch.Tensor = torch.ops.ray_ulysses.attend_in_head_groups(
        query_BHLD, key_BKLD, value_BKLE, *settings, num_groups
    )[0]
    return out


def _head_groups(given: OperatorSettings, num_groups: int) -> Iterator[tuple[HeadPlan, RankHeads, slice]]:
    """Yield each group's head plan, this rank's heads in the group, and the slice of its query heads in the group."""
    plan, whole = plan_of(given.heads[0], given.heads[1], given.ulysses)
    rank = group_named(given.ulysses).rank()
    for group in range(num_groups):
        part = part_of(plan, group, num_groups)
        mine = part.ranks[rank]
        yield part, mine, slice(mine.first - whole.first, mine.stop - whole.first)


@torch.library.custom_op(
    "ray_ulysses::attend_in_head_groups",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_SETTINGS}, int num_groups) -> (Tensor, Tensor)",
)
def _attend_groups(
    query_BHLD: torch.Tensor, key_BKLD: torch.Tensor, value_BKLE: torch.Tensor, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    given = OperatorSettings(*settings[:-1])
    layer, group, sinks = given.layer(), group_named(given.ulysses), given.sinks
    out_BLHE, lse_hT = _result_buffers(query_BHLD, value_BKLE, given.ulysses)
    sizes = (query_BHLD.shape[3], key_BKLD.shape[3], value_BKLE.shape[3])
    for plan, mine, own in _head_groups(given, settings[-1]):
        payload = send_heads((query_BHLD, key_BKLD, value_BKLE), QKV, plan, group)
        part_ThE = query_BHLD.new_empty(lse_hT.shape[1], mine.num_heads, value_BKLE.shape[3])
        if mine.num_heads:
            q, k, v = split_heads(tokens_first(payload), mine, QKV, sizes)
            group_sinks = None if sinks is None else sinks[own]
            part_ThE, lse_hT[own] = attend(q, k, v, group_sinks, replace(layer, calls=mine.calls()))
        blocks = ranks_first(part_ThE.flatten(1, 2), len(plan.ranks), query_BHLD.shape[0])
        return_heads(blocks, [out_BLHE.transpose(1, 2)], ["query"], plan, group)
    return out_BLHE, lse_hT


@_attend_groups.register_fake
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
    "ray_ulysses::attend_in_head_groups_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, {_SETTINGS}, "
    "int num_groups) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _groups_backward(
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
    grads, grad_sinks = _group_gradients(tensors, given.ulysses), _or_empty(sinks, grad_BLHE).clone()
    written_kv: set[int] = set()
    for plan, mine, own in _head_groups(given, settings[-1]):
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
    """Return views of the payload that the backward sends, for the gradients of Q, K and V."""
    dq, dk, dv = split_heads(make(), heads, QKV, sizes[:3])
    return dq, dk, dv


@_groups_backward.register_fake
def _(grad: torch.Tensor, *tensors_and_settings: Any) -> tuple[torch.Tensor, ...]:
    tensors, given = tensors_and_settings[:3], OperatorSettings(*tensors_and_settings[5:-1])
    dq, dk, dv = (one.to(tensors[0].dtype) for one in _group_gradients(tensors, given.ulysses))
    return dq, dk, dv, _or_empty(given.sinks, grad).clone()


def _group_gradients(tensors: tuple[torch.Tensor, ...], ulysses: str) -> tuple[torch.Tensor, ...]:
    query, key, value = tensors[:3]
    num_rows, num_heads, tokens, head_size = query.shape
    plan, _ = plan_of(num_heads, key.shape[1], ulysses)
    return gradient_buffers(query, plan, num_rows, tokens, head_size, value.shape[3])


def _keep_groups(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _keep_inputs(ctx, inputs[:-1], output)
    ctx.num_groups = inputs[-1]


def _groups_gradient(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    tensors, settings = _kept_inputs(ctx)
    *grads, sinks = torch.ops.ray_ulysses.attend_in_head_groups_backward(grad, *tensors, *settings, ctx.num_groups)
    return (*grads, sinks if ctx.has_sinks else None, *[None] * _NUM_SETTINGS)


_attend_groups.register_autograd(_groups_gradient, setup_context=_keep_groups)
_groups_backward.register_autograd(refuse_second_order)
