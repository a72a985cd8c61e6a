"""The two attention layers on the same tensors, stubs for their kernels, and the reference in fp64.

Legend: B rows, L tokens of a rank's slice, S tokens of a row, H query heads, h of this rank, K KV heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ray_ulysses.attention import ring
from ray_ulysses.attention.batch import MODEL_INPUT
from ray_ulysses.attention.documents import pack_documents
from ray_ulysses.attention.kernels import KernelCall, KernelEntry
from ray_ulysses.attention.kernels.call import Gradients, Whole
from ray_ulysses.attention.recompute import checkpoint_contexts
from ray_ulysses.attention.ulysses import AttentionContext, set_window, ulysses_attention

HEAD_SIZE = 64

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One size: ``sp`` ranks with ``tokens`` tokens each of one row, query and key-value heads."""

    sp: int
    tokens: int
    heads: int
    kv_heads: int

    def gflop(self) -> float:
        """Return what the kernel computes on the fullest rank, forward and backward, causal, in 10^9 operations."""
        return 7 * (self.sp * self.tokens) ** 2 * HEAD_SIZE * math.ceil(self.heads / self.sp) / 1e9


def inputs(case: Case, rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return this rank's slice of queries, keys, values and the output's gradient, in a model's memory layout."""
    tensors = []
    for seed, heads in enumerate((case.heads, case.kv_heads, case.kv_heads, case.heads)):
        # One seed a rank, so that the reference can make every slice. [B, L, H, D] -> [B, H, L, D], a view.
        random = torch.Generator().manual_seed(1000 * rank + seed)
        slice_BLHD = torch.randn(1, case.tokens, heads, HEAD_SIZE, generator=random).to(dtype)
        tensors.append(slice_BLHD.transpose(1, 2) if seed < 3 else slice_BLHD.flatten(2))
    return [*(t.requires_grad_() for t in tensors[:3]), tensors[3]]


def ours(case: Case, lengths: list[int], group: dist.ProcessGroup) -> Layer:
    """Return our layer as Transformers calls it."""
    context = AttentionContext(
        documents=pack_documents([lengths], case.sp * case.tokens),
        kernel="auto",
        local_tokens=case.tokens,
        ulysses=group.group_name,
        ulysses_rank=group.rank(),
        ulysses_size=group.size(),
        ring="",
        head_groups=1,
        announce=lambda demand: None,
    )
    module, keywords = torch.nn.Module(), cast("dict[str, Any]", {MODEL_INPUT: context})
    set_window(module, None)

    def layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out_BLHE, _ = ulysses_attention(module, query, key, value, None, **keywords)
        return out_BLHE.flatten(2)

    return layer


def theirs(case: Case, lengths: list[int], group: dist.ProcessGroup, core: Callable[..., Any] | None = None) -> Layer:
    """Return DeepSpeed's layer as its wrapper in Transformers calls it: no mask, positions in a keyword."""
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    attention = UlyssesSPAttentionHF(
        attn=core or sdpa_attention_forward,
        batch_size=1,
        attn_head_count=case.heads,
        attn_head_size=HEAD_SIZE,
        kv_head_count=case.kv_heads,
        num_hidden_layers=1,
        process_group=group,
        seq_length_is_variable=True,
    )
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, case.heads // case.kv_heads  # type: ignore[assignment]
    positions_1S = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    positions_1L = positions_1S[:, group.rank() * case.tokens :][:, : case.tokens].contiguous()

    def layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attention(module, query, key, value, None, position_ids=positions_1L)[0]
        return out

    return layer


def _stub_forward(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output and a log-sum-exp of the right shapes."""
    query = call.query_THD
    return torch.ones(query.shape), torch.ones(query.shape[1], query.shape[0])


def _stub_backward(call: KernelCall, whole: Whole, into: Callable[[], Gradients] | None = None) -> Gradients:
    """Write gradients in place, as flash-attn does."""
    assert into is not None
    grads = into()
    for grad in grads:
        grad.fill_(1.0)
    return grads


class _StubCore(torch.autograd.Function):
    """The same for theirs: it writes as much, keeps as much and uses torch's memory layout, tokens before heads."""

    @staticmethod
    def forward(ctx: Any, query_BhSD: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows, heads, tokens, size = query_BhSD.shape
        out_BShD = torch.ones(rows, tokens, heads, size)
        ctx.save_for_backward(query_BhSD, key, value, out_BShD, torch.ones(rows, heads, tokens))
        return out_BShD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = (tensor.transpose(1, 2).shape for tensor in ctx.saved_tensors[:3])
        return tuple(torch.ones(shape).transpose(1, 2) for shape in kept)


def stub_core(_: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **kw: Any) -> Any:
    """Stand in for Transformers' attention function."""
    return _StubCore.apply(query, key, value), None  # type: ignore[no-untyped-call]


@contextmanager
def stubbed() -> Iterator[None]:
    """Give our layer the stub for a kernel."""
    entry = KernelEntry(
        name="stub",
        needs="",
        runs_on=lambda device_type: True,
        refuses=lambda demand: None,
        forward=_stub_forward,
        backward=_stub_backward,
    )
    with mock.patch.object(ring, "choose_kernel", return_value=(entry, "stub")):
        yield


def build(side: str, case: Case, lengths: list[int], group: dist.ProcessGroup, stub: bool) -> Layer:
    """Return a layer of a side."""
    if side == "ours":
        return ours(case, lengths, group)
    return theirs(case, lengths, group, stub_core if stub else None)


def checkpointed(side: str, layer: Layer) -> Layer:
    """Return a layer under gradient checkpointing, as users train: ours keeps its output, as it does by default.

    What follows the layer in a decoder needs its output in the backward pass, so that all of it is computed again;
    a square stands for that on both sides.
    """
    context = checkpoint_contexts("both") if side == "ours" else None
    options: dict[str, Any] = {"use_reentrant": False} | ({} if context is None else {"context_fn": context})

    def used(*qkv: torch.Tensor) -> torch.Tensor:
        return layer(*qkv).square()

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(used, query, key, value, **options)
        return out

    return run


def step(layer: Layer, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run forward and backward; return the output and the three gradients."""
    out = layer(*tensors[:3])
    return [out.detach(), *torch.autograd.grad(out, tensors[:3], tensors[3])]


def reference(case: Case, lengths: list[int]) -> list[torch.Tensor]:
    """Return the output ``[1, S, H D]`` and the gradients in fp64, from one process, each document by itself."""
    slices = [inputs(case, rank, torch.float64) for rank in range(case.sp)]
    query, key, value = (torch.cat([s[i].detach() for s in slices], dim=2).requires_grad_() for i in range(3))
    outs, group = [], torch.arange(case.heads) // (case.heads // case.kv_heads)
    for q, k, v in zip(*(whole.split(lengths, dim=2) for whole in (query, key, value)), strict=True):
        scores = q @ k[:, group].transpose(2, 3) * HEAD_SIZE**-0.5
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        outs.append(scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v[:, group])
    out = torch.cat(outs, dim=2).transpose(1, 2).flatten(2)
    upstream = torch.cat([s[3] for s in slices], dim=1)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), upstream)]
