"""Compares attention over a packed row (exchange, kernel and ring) with the definition of attention in fp64.

Legend: B rows, L slice tokens, S row tokens, H query heads, K KV heads, D head size of Q and K, E head size of V.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ray_ulysses.attention.batch import MODEL_INPUT, held_tokens, shard_batch
from ray_ulysses.attention.kernels import Demand, KernelName, choose_kernel
from ray_ulysses.attention.kernels.reference import attention_by_definition, visible_tokens
from ray_ulysses.attention.ulysses import context_maker, set_window, ulysses_attention
from ray_ulysses.parallel.layout import row_multiple
from ray_ulysses.parallel.mesh import SequenceMesh

_LEAST_TOKENS = 256
_SEED = 20


EXACT_FP32 = 1e-5
"""Bound on a tensor's norm-wise relative error in fp32."""

EXACT_BF16 = 2e-2
"""Bound on a tensor's norm-wise relative error in bf16, compared with fp64. bf16 has 8 significant bits, and kernels
round attention weights and outputs, with norm-wise errors of 2e-3 to 6e-3. Lost or misplaced tokens, heads or ranks
cause errors above 1e-1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSettings:
    """Attention settings of a run."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    dtype: torch.dtype
    kernel: KernelName = "auto"
    windows: tuple[int | None, ...] = (None,)
    """Sliding window of each kind of layer, in tokens; None for full attention."""
    causal: bool = True
    softcap: float | None = None
    has_sinks: bool = False
    head_groups: int = 1
    """Number of groups into which KV heads are split for the exchange."""

    @property
    def bound(self) -> float:
        """Upper bound on the relative error."""
        return EXACT_BF16 if self.dtype in (torch.bfloat16, torch.float16) else EXACT_FP32

    def kernel_names(self, device: torch.device) -> tuple[str, ...]:
        """Return the names of the kernels that the run's layers use, without duplicates.

        Raises:
            UserError: The kernel is not available, or does not support the model.
        """
        names = []
        for window in self.windows:
            demand = Demand(
                device_type=device.type,
                dtype=self.dtype,
                head_size=self.head_size,
                value_size=self.value_size,
                has_window=window is not None,
                has_softcap=self.softcap is not None,
                is_causal=self.causal,
            )
            names.append(choose_kernel(self.kernel, demand)[0].name)
        return tuple(dict.fromkeys(names))

    def in_words(self) -> str:
        """Return a description for error messages."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.num_heads} heads on {self.num_kv_heads} KV heads of {self.head_size}, {dtype}"


def document_lengths(num_tokens: int) -> tuple[int, ...]:
    """Return document lengths for a row of at least 64 tokens. At least a sixteenth of the row is padding.

    One document spans several ranks, and one has a single token. No document ends at a slice boundary.
    """
    return (num_tokens // 2 + 1, 1, num_tokens // 8 - 1, num_tokens // 4 + 1)


def measure_attention(
    mesh: SequenceMesh, device: torch.device, settings: AttentionSettings, window: int | None
) -> dict[str, float]:
    """Return the relative errors of this rank's attention output and gradients.

    All ranks of ``sp`` must call this function. The window is limited to a quarter of the row, so that it masks some
    tokens.
    """
    multiple = row_multiple(mesh.sp_size, mesh.ring_size)
    num_tokens = -(-_LEAST_TOKENS // multiple) * multiple
    window = None if window is None else min(window, num_tokens // 4)
    whole, upstream_BSHE, sinks = _inputs(settings, num_tokens, device)
    wanted_out, wanted_grads = _by_definition(settings, whole, upstream_BSHE, sinks, window)

    row = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    batch = shard_batch(row, None, document_lengths(num_tokens), mesh)
    inputs: dict[str, Any] = {MODEL_INPUT: context_maker(mesh, settings.kernel, settings.head_groups)(batch)}
    local = [held_tokens(tensor, mesh).requires_grad_() for tensor in whole]
    sinks_H = None if sinks is None else sinks.clone().requires_grad_()
    # [B, L, H, D] -> [B, H, L, D], as a model passes them.
    query, key, value = (tensor.transpose(1, 2) for tensor in local)
    layer = nn.Identity()
    set_window(layer, window, causal=settings.causal)
    out_BLHE, _ = ulysses_attention(layer, query, key, value, None, softcap=settings.softcap, s_aux=sinks_H, **inputs)
    out_BLHE.backward(held_tokens(upstream_BSHE, mesh))
    pairs = {"the output": (out_BLHE.detach(), wanted_out)}
    names = ("the gradient of Q", "the gradient of K", "the gradient of V")
    for name, tensor, wanted in zip(names, local, wanted_grads[:3], strict=True):
        assert tensor.grad is not None
        pairs[name] = (tensor.grad, wanted)
    errors = {name: slice_error(ours, held_tokens(truth, mesh), truth) for name, (ours, truth) in pairs.items()}
    if sinks_H is not None:
        assert sinks_H.grad is not None
        grad_H = sinks_H.grad.double()
        if mesh.sp_size > 1:
            # Each rank's gradient covers only its own heads and tokens.
            dist.all_reduce(grad_H, group=mesh.group("sp"))
        errors["the gradient of the sinks"] = slice_error(grad_H, wanted_grads[3], wanted_grads[3])
    return errors


def slice_error(ours: torch.Tensor, truth: torch.Tensor, whole: torch.Tensor) -> float:
    """Return a slice's norm-wise error, relative to the row's norm scaled to the slice's number of elements.

    The slice's own norm can't serve as the reference, because that norm may be 0: the true gradient of Q is 0 for
    one-token documents.
    """
    share = math.sqrt(truth.numel() / whole.numel())
    scale = float(whole.double().norm()) * share
    return float((ours.double() - truth.double()).norm()) / scale


def _inputs(
    settings: AttentionSettings, num_tokens: int, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """Return Q, K and V as ``[1, S, heads, size]``, the output's gradient and the sinks, identical on every rank."""
    generator = torch.Generator().manual_seed(_SEED)

    def draw(*shape: int) -> torch.Tensor:
        # Draw values on the host, so that they are identical on every device.
        return torch.randn(*shape, generator=generator).to(device=device, dtype=settings.dtype)

    kv = settings.num_kv_heads
    sizes = ((settings.num_heads, settings.head_size), (kv, settings.head_size), (kv, settings.value_size))
    whole = [draw(1, num_tokens, *size) for size in sizes]
    upstream = draw(1, num_tokens, settings.num_heads, settings.value_size)
    return whole, upstream, draw(settings.num_heads) if settings.has_sinks else None


def _by_definition(
    settings: AttentionSettings,
    whole: list[torch.Tensor],
    upstream_BSHE: torch.Tensor,
    sinks_H: torch.Tensor | None,
    window: int | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the output and gradients in fp64, computed for one KV head at a time to save memory."""
    num_tokens, group = upstream_BSHE.shape[1], settings.num_heads // settings.num_kv_heads
    lengths, device = document_lengths(num_tokens), upstream_BSHE.device
    visible = visible_tokens(lengths, num_tokens, window, device, causal=settings.causal)
    leaves = [tensor[0].double() for tensor in whole] + ([] if sinks_H is None else [sinks_H.double()])
    outs, grads = [], []
    for kv in range(settings.num_kv_heads):
        heads = slice(kv * group, (kv + 1) * group)
        own = [leaves[0][:, heads], leaves[1][:, kv : kv + 1], leaves[2][:, kv : kv + 1]]
        own = [tensor.clone().requires_grad_() for tensor in (*own, *(sinks[heads] for sinks in leaves[3:]))]
        out = attention_by_definition(
            own[0],
            own[1],
            own[2],
            visible,
            settings.head_size**-0.5,
            settings.softcap,
            own[3] if len(own) > 3 else None,
        )
        grads.append(torch.autograd.grad(out, own, upstream_BSHE[0, :, heads].double()))
        outs.append(out.detach())
    # Q, K and V: [S, heads, size] -> [1, S, heads, size]; sinks: [H].
    joined = [torch.cat(parts, dim=1).unsqueeze(0) for parts in list(zip(*grads, strict=True))[:3]]
    joined += [torch.cat(parts) for parts in list(zip(*grads, strict=True))[3:]]
    return torch.cat(outs, dim=1).unsqueeze(0), joined
