"""Whether the kernels of a layer that carries state keep packed documents apart, so that one call computes them all.

Transformers 5.23 calls the functions of ``causal-conv1d``, ``flash-linear-attention`` and ``mamba-ssm`` where they are
installed, and passes on ``seq_idx`` (the document of each token) and ``cu_seqlens``; a function that does not take them
would mix documents without a word. So all that a layer calls are looked at; a canary test holds what they look like.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from ray_ulysses.attention.context import AttentionContext
    from ray_ulysses.attention.mixer_layouts import MixerLayout

_CONVOLUTION = "causal_conv1d_fn"
_TABLES = {
    _CONVOLUTION: "seq_idx",
    "chunk_gated_delta_rule": "cu_seqlens",
    "chunk_kda": "cu_seqlens",
    "mamba_chunk_scan_combined": "seq_idx",
}
"""By the functions of these packages over whole rows, the argument that keeps documents apart."""

_OWN_NAME = "cu_seq_lens_q"
"""What most layers of Transformers call ``cu_seqlens`` among their own arguments; the others pass it on by its name."""


def packed_arguments(module: nn.Module, layout: MixerLayout, context: AttentionContext) -> dict[str, Any] | None:
    """Return what to call a layer with so that it keeps all documents apart; ``None`` if each takes a call of its own.

    Args:
        module: The layer.
        layout: Its layout.
        context: The batch's tables.
    """
    code = _forward_of(module).__code__
    found = {facts["func_name"]: facts for facts in _package_functions(module) if facts["func_name"] in _TABLES}
    has_recurrence = any(name != _CONVOLUTION for name in found)
    if not found or (layout.multiply_adds > 0) != has_recurrence:
        return None
    if not all(
        one["is_new_implementation"] and _TABLES[name] in one["applicable_params"] for name, one in found.items()
    ):
        return None
    cu_seqlens = context.documents.full.spans.cu_seqlens
    numbers = torch.arange(len(cu_seqlens) - 1, dtype=torch.int32, device=cu_seqlens.device)
    num_tokens = context.documents.full.spans.borders[-1]
    # [1, T]; with its size given, nothing waits for the device.
    seq_idx = numbers.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens).unsqueeze(0)
    tables: dict[str, Any] = {"seq_idx": seq_idx}
    if "cu_seqlens" in (_TABLES[name] for name in found):
        tables[_OWN_NAME if _OWN_NAME in code.co_consts else "cu_seqlens"] = cu_seqlens
    return tables


def _forward_of(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _package_functions(module: nn.Module) -> Iterator[Mapping[str, Any]]:
    """Yield what Transformers knows of each function of a package that a layer's code names."""
    forward = _forward_of(module)
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if inspect.isfunction(function) and "is_new_implementation" in function.__code__.co_freevars:
            yield inspect.getclosurevars(function).nonlocals
