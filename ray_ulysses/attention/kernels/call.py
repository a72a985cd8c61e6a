"""The interface of an attention kernel: its inputs, its forward and backward, and its entry in the kernel table.

The forward returns the log-sum-exp over the keys in the call, and the backward takes the log-sum-exp of the *complete*
softmax. The caller can therefore merge partial results in a ring (Ring Attention, https://arxiv.org/abs/2310.01889) and
add attention sinks, without support from the kernel.

Legend: T query tokens and U key tokens, with the rows of a batch concatenated, H query heads, K KV heads (H a multiple
of K), D head size of Q and K, E head size of V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Gradients of queries, keys and values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """A partition of all tokens into consecutive ranges; tokens attend only within their range."""

    cu_seqlens: torch.Tensor
    """Start of each span and end of the last span, int32 ``[num_spans + 1]`` on the device."""
    borders: tuple[int, ...]
    """The values of ``cu_seqlens`` on the host."""
    max_seqlen: int


class Block(NamedTuple):
    """A block of queries and keys. ``hidden_tu`` is true where a query must not see a key, or None without a mask."""

    query: slice
    key: slice
    hidden_tu: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCall:
    """The arguments of one kernel call. Tensors may be strided views with a contiguous last dim.

    Within a span of ``t`` queries and ``u`` keys, query ``i`` sees key ``j`` if all of the following conditions hold.
    As in flash-attn, the mask is aligned to the bottom right corner::

        j <= i + (u - t)               if causal
        j <= i + (u - t) + right       if right is not None
        j >= i + (u - t) - left        if left is not None

    Every query sees at least one key.
    """

    query_THD: torch.Tensor
    key_UKD: torch.Tensor
    value_UKE: torch.Tensor
    spans: Spans | None
    """Spans of both queries and keys (``T == U``), or None for a single span with all queries and keys."""
    scale: float
    causal: bool
    left: int | None = None
    """Number of earlier tokens that a query sees, or None for no limit."""
    right: int | None = None
    """Number of later tokens that a query sees, or None for no limit; None if ``causal``."""
    softcap: float | None = None
    """Cap ``c`` in ``c * tanh(score / c)``, applied to scaled scores, or None for no cap."""

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        return self.query_THD, self.key_UKD, self.value_UKE

    @property
    def most_right(self) -> int | None:
        """Number of later tokens that a query sees at most, or None for no limit."""
        return 0 if self.causal else self.right

    @property
    def has_window(self) -> bool:
        """Whether a query sees a limited number of earlier or later tokens."""
        return self.left is not None or self.right is not None

    def each_span(self) -> list[tuple[slice, slice]]:
        """Return the query and key slices of each span, for kernels that process one span at a time."""
        if self.spans is None:
            return [(slice(0, self.query_THD.shape[0]), slice(0, self.key_UKD.shape[0]))]
        return [(slice(start, stop), slice(start, stop)) for start, stop in pairwise(self.spans.borders)]

    def blocks(self, query: slice, key: slice, num_queries: int) -> Iterator[Block]:
        """Split a span into blocks of ``num_queries`` queries, and drop keys that no query in the block sees."""
        device, length, num_keys = self.query_THD.device, query.stop - query.start, key.stop - key.start
        shift = num_keys - length
        for begin in range(0, length, num_queries):
            end = min(begin + num_queries, length)
            low = 0 if self.left is None else max(0, begin + shift - self.left)
            right = self.most_right
            high = num_keys if right is None else min(num_keys, end + shift + right)
            query_at = torch.arange(begin, end, device=device).unsqueeze(1) + shift
            key_at = torch.arange(low, high, device=device).unsqueeze(0)
            hidden_tu = None if right is None else key_at > query_at + right
            if self.left is not None:
                early = key_at < query_at - self.left
                hidden_tu = early if hidden_tu is None else hidden_tu | early
            yield Block(
                slice(query.start + begin, query.start + end), slice(key.start + low, key.start + high), hidden_tu
            )

    def trimmed(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Gradients:
        """Remove the head-size padding from gradients."""
        head_size = self.query_THD.shape[2]
        return dq[..., :head_size], dk[..., :head_size], dv[..., : self.value_UKE.shape[2]]


class Whole(NamedTuple):
    """Output gradient, and output and log-sum-exp of the complete softmax, even if a call covers only a part of it."""

    grad_out_THE: torch.Tensor
    out_THE: torch.Tensor
    lse_HT: torch.Tensor

    def of(self, query: slice) -> Whole:
        """Return the results for a slice of the queries."""
        return Whole(self.grad_out_THE[query], self.out_THE[query], self.lse_HT[:, query].contiguous())


class Backward(Protocol):
    """Backward function of a kernel."""

    def __call__(self, call: KernelCall, whole: Whole, into: Callable[[], Gradients] | None = None) -> Gradients:
        """Return the gradients of query, key and value, in the inputs' shapes and in either the inputs' dtype or fp32.

        ``into`` allocates gradient tensors, possibly strided views with a contiguous last dim. A kernel that can write
        to given tensors fills and returns them. Other kernels do not call ``into``, to save memory while they run.

        Attention weights are ``exp(score - lse)``; the softmax correction term is ``sum_E(grad_out * out)``.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Requirements of a layer. A kernel is used only if it meets all of them exactly."""

    device_type: str
    dtype: torch.dtype
    head_size: int
    value_size: int
    has_window: bool = False
    has_softcap: bool = False
    is_causal: bool = True

    def in_words(self) -> str:
        """Return a description for log lines, such as ``full layers (cuda, bfloat16, heads of 128)``."""
        kind = "window layers" if self.has_window else "full layers"
        sizes = f"{self.head_size}" if self.head_size == self.value_size else f"{self.head_size}/{self.value_size}"
        capped = (", soft-capped" if self.has_softcap else "") + ("" if self.is_causal else ", bidirectional")
        return f"{kind}{capped} ({self.device_type}, {str(self.dtype).removeprefix('torch.')}, heads of {sizes})"


def demand_of(
    like: torch.Tensor, head_size: int, value_size: int, has_window: bool, has_softcap: bool, is_causal: bool
) -> Demand:
    """Return the requirements of a layer whose inputs have the device and dtype of ``like``."""
    return Demand(
        device_type=like.device.type,
        dtype=like.dtype,
        head_size=head_size,
        value_size=value_size,
        has_window=has_window,
        has_softcap=has_softcap,
        is_causal=is_causal,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelEntry:
    """A kernel for attention without dropout, and the conditions for using it."""

    name: str
    needs: str
    """Required device and libraries, in the form shown in errors."""
    runs_on: Callable[[str], bool]
    """Returns whether the kernel is available on this machine for a device type."""
    refuses: Callable[[Demand], str | None]
    """Returns why the kernel can't meet a demand exactly, or None if it can."""
    forward: Callable[[KernelCall], tuple[torch.Tensor, torch.Tensor]]
    """Returns the output ``[T, H, E]`` in the inputs' dtype, and the natural log-sum-exp ``[H, T]`` of the scaled and
    capped scores in fp32 (in fp64 for fp64 inputs)."""
    backward: Backward
