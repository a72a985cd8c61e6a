"""The interface of an attention kernel: its inputs, its two functions, and its entry in the kernel table.

A kernel returns its log-sum-exp, and its backward takes the log-sum-exp of the *whole* softmax. So the parts of a ring
are merged outside (Ring Attention, https://arxiv.org/abs/2310.01889), and an attention sink is one more term of the
sum; neither needs support from a kernel.

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
"""The gradients of queries, keys and values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Ranges of consecutive tokens, each of which attends only within itself; together they cover all tokens."""

    cu_seqlens: torch.Tensor
    """int32 ``[num_spans + 1]`` on the device: the start of each span, and the end of the last."""
    borders: tuple[int, ...]
    """The same on the host."""
    max_seqlen: int


class Block(NamedTuple):
    """Queries and keys that are processed together; ``hidden_tu`` is true where a query must not see a key."""

    query: slice
    key: slice
    hidden_tu: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCall:
    """One call of a kernel. Inputs may be strided views; their last dim is contiguous.

    Within a span of ``t`` queries and ``u`` keys, query ``i`` sees key ``j`` if both conditions hold, which is
    flash-attn's convention (aligned to the bottom right corner)::

        j <= i + (u - t)               if causal
        j >= i + (u - t) - left        if left is not None

    Every query sees at least one key.
    """

    query_THD: torch.Tensor
    key_UKD: torch.Tensor
    value_UKE: torch.Tensor
    spans: Spans | None
    """Spans of both queries and keys (``T == U``); ``None``: all queries against all keys, as one span."""
    scale: float
    causal: bool
    left: int | None = None
    """Number of earlier tokens that a query sees; ``None`` for no limit."""
    softcap: float | None = None
    """``c`` of ``c * tanh(score / c)``, applied after the scale; ``None`` for no cap."""

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        return self.query_THD, self.key_UKD, self.value_UKE

    def each_span(self) -> list[tuple[slice, slice]]:
        """Return the query and key tokens of each span, for kernels that process one span at a time."""
        if self.spans is None:
            return [(slice(0, self.query_THD.shape[0]), slice(0, self.key_UKD.shape[0]))]
        return [(slice(start, stop), slice(start, stop)) for start, stop in pairwise(self.spans.borders)]

    def blocks(self, query: slice, key: slice, num_queries: int) -> Iterator[Block]:
        """Yield a span in blocks of ``num_queries`` queries, without keys that all queries of a block ignore."""
        device, length, num_keys = self.query_THD.device, query.stop - query.start, key.stop - key.start
        shift = num_keys - length
        for begin in range(0, length, num_queries):
            end = min(begin + num_queries, length)
            low = 0 if self.left is None else max(0, begin + shift - self.left)
            high = min(num_keys, end + shift) if self.causal else num_keys
            query_at = torch.arange(begin, end, device=device).unsqueeze(1) + shift
            key_at = torch.arange(low, high, device=device).unsqueeze(0)
            hidden_tu = key_at > query_at if self.causal else None
            if self.left is not None:
                early = key_at < query_at - self.left
                hidden_tu = early if hidden_tu is None else hidden_tu | early
            yield Block(
                slice(query.start + begin, query.start + end), slice(key.start + low, key.start + high), hidden_tu
            )

    def trimmed(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Gradients:
        """Return gradients without the padding of their head sizes."""
        head_size = self.query_THD.shape[2]
        return dq[..., :head_size], dk[..., :head_size], dv[..., : self.value_UKE.shape[2]]


class Whole(NamedTuple):
    """The result of the whole softmax, of which a call may be a part, and its output's gradient; contiguous."""

    grad_out_THE: torch.Tensor
    out_THE: torch.Tensor
    lse_HT: torch.Tensor

    def of(self, query: slice) -> Whole:
        """Return the result for some of the queries."""
        return Whole(self.grad_out_THE[query], self.out_THE[query], self.lse_HT[:, query].contiguous())


class Backward(Protocol):
    """The backward of a kernel."""

    def __call__(self, call: KernelCall, whole: Whole, into: Callable[[], Gradients] | None = None) -> Gradients:
        """Return the gradients of query, key and value, in their shapes and in their dtypes or fp32.

        A kernel that can write in place fills and returns the tensors that ``into`` allocates, which may be strided
        views whose last dim is contiguous. Other kernels ignore ``into``, so that these tensors take no memory while
        they run.

        The weights are ``exp(score - lse)``, and the softmax's own term is ``sum_E(grad_out * out)``.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The requirements of a layer; a kernel is used only if it meets all of them exactly."""

    device_type: str
    dtype: torch.dtype
    head_size: int
    value_size: int
    has_window: bool = False
    has_softcap: bool = False

    def in_words(self) -> str:
        """Return the text for a log line, such as ``full layers (cuda, bfloat16, heads of 128)``."""
        kind = "window layers" if self.has_window else "full layers"
        sizes = f"{self.head_size}" if self.head_size == self.value_size else f"{self.head_size}/{self.value_size}"
        capped = ", soft-capped" if self.has_softcap else ""
        return f"{kind}{capped} ({self.device_type}, {str(self.dtype).removeprefix('torch.')}, heads of {sizes})"


def demand_of(like: torch.Tensor, head_size: int, value_size: int, has_window: bool, has_softcap: bool) -> Demand:
    """Return the requirements of a layer on the device and in the dtype of a tensor."""
    return Demand(
        device_type=like.device.type,
        dtype=like.dtype,
        head_size=head_size,
        value_size=value_size,
        has_window=has_window,
        has_softcap=has_softcap,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelEntry:
    """A row of the kernel table: attention without dropout, and its gradients."""

    name: str
    needs: str
    """The device and libraries that it needs, as shown in errors."""
    runs_on: Callable[[str], bool]
    """Returns whether this machine has the kernel for a device type."""
    refuses: Callable[[Demand], str | None]
    """Returns why the kernel can't meet a demand exactly, or ``None``."""
    forward: Callable[[KernelCall], tuple[torch.Tensor, torch.Tensor]]
    """Returns the output ``[T, H, E]`` in the inputs' dtype, and the natural log-sum-exp ``[H, T]`` of the scaled and
    capped scores in fp32 (fp64 for fp64)."""
    backward: Backward
