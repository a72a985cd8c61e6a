"""What a kernel is asked for, and the two functions that every kernel has.

A kernel returns its log-sum-exp, and its backward takes the log-sum-exp of the *whole* softmax. So the parts of a ring
are merged outside (Ring Attention, https://arxiv.org/abs/2310.01889), an attention sink is one more term of the sum,
and neither needs anything of a kernel.

Legend: T query tokens and U key tokens, the rows of a batch laid end to end, H query heads, K KV heads (H a multiple
of K), D head size of Q and K, E head size of V.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Stretches of consecutive tokens, each of which attends inside itself only; together they cover all tokens.

    Attributes:
        cu_seqlens: int32 ``[num_spans + 1]`` on the device: where each stretch begins, and the end of the last.
        borders: The same on the host.
        max_seqlen: Longest stretch in tokens.
    """

    cu_seqlens: torch.Tensor
    borders: tuple[int, ...]
    max_seqlen: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCall:
    """One call of a kernel. Inputs may be strided views; their last dim is contiguous.

    Within a stretch of ``t`` queries and ``u`` keys, query ``i`` sees key ``j`` where both hold, the convention of
    flash-attn (aligned to the bottom right corner)::

        j <= i + (u - t)               if causal
        j >= i + (u - t) - left        if left is not None

    Every query sees at least one key.

    Attributes:
        query_THD: Queries.
        key_UKD: Keys.
        value_UKE: Values.
        spans: Where queries and keys are cut alike (``T == U``); ``None``: all queries against all keys, one stretch.
        scale: Factor on the scores.
        causal: Whether a query sees no later key.
        left: How far back a query sees, in tokens; ``None``: to the beginning.
        softcap: ``c`` of ``c * tanh(score / c)``, applied after the scale; ``None``: none.
    """

    query_THD: torch.Tensor
    key_UKD: torch.Tensor
    value_UKE: torch.Tensor
    spans: Spans | None
    scale: float
    causal: bool
    left: int | None = None
    softcap: float | None = None

    def stretches(self) -> list[tuple[slice, slice]]:
        """Return the query and key tokens of each stretch, for kernels that take one at a time."""
        if self.spans is None:
            return [(slice(0, self.query_THD.shape[0]), slice(0, self.key_UKD.shape[0]))]
        borders = self.spans.borders
        cuts = [slice(start, stop) for start, stop in pairwise(borders)]
        return [(cut, cut) for cut in cuts]


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of queries, keys and values."""


class Kernel(Protocol):
    """Attention without dropout over one call, and its gradients."""

    def forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output ``[T, H, E]`` in the inputs' dtype and the log-sum-exp ``[H, T]`` in fp32 (fp64 for fp64).

        The log-sum-exp is natural, of the scaled and capped scores.
        """
        ...

    def backward(
        self,
        call: KernelCall,
        grad_out_THE: torch.Tensor,
        out_THE: torch.Tensor,
        lse_HT: torch.Tensor,
        into: Gradients | None = None,
    ) -> Gradients:
        """Return the gradients of query, key and value, in their shapes, and in their dtypes or in fp32.

        A kernel that can write its results in place writes them into the tensors of ``into`` and returns these; they
        may be strided views whose last dim is contiguous. Any other kernel ignores them.

        ``out_THE`` and ``lse_HT`` belong to the whole softmax, of which this call may be a part only: the weights are
        ``exp(score - lse)`` and the softmax's own term is ``sum_E(grad_out * out)``. Both are contiguous.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a layer asks of a kernel; a kernel that can't do all of it exactly is not offered.

    Attributes:
        device_type: ``cuda`` or ``cpu``.
        dtype: Of queries, keys and values.
        head_size: ``D``.
        value_size: ``E``.
        has_window: Whether a sliding window limits what a query sees.
        has_softcap: Whether scores are capped.
    """

    device_type: str
    dtype: torch.dtype
    head_size: int
    value_size: int
    has_window: bool = False
    has_softcap: bool = False

    def in_words(self) -> str:
        """Return the demand as a log line names it."""
        kind = "window layers" if self.has_window else "full layers"
        sizes = f"{self.head_size}" if self.head_size == self.value_size else f"{self.head_size}/{self.value_size}"
        capped = ", soft-capped" if self.has_softcap else ""
        return f"{kind}{capped} ({self.device_type}, {str(self.dtype).removeprefix('torch.')}, heads of {sizes})"


def demand_of(like: torch.Tensor, head_size: int, value_size: int, window: int | None, softcap: float | None) -> Demand:
    """Return the demand of a layer on the device and in the dtype of a tensor."""
    return Demand(
        device_type=like.device.type,
        dtype=like.dtype,
        head_size=head_size,
        value_size=value_size,
        has_window=window is not None,
        has_softcap=softcap is not None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelEntry:
    """A row of the kernel table.

    Attributes:
        name: What ``model.attention`` calls it.
        needs: What it needs of the machine, in words.
        runs_on: Whether this machine and a device type have it.
        refuses: Why it can't do a demand exactly, or ``None``.
        kernel: The kernel.
    """

    name: str
    needs: str
    runs_on: RunsOn
    refuses: Refuses
    kernel: Kernel


class RunsOn(Protocol):
    """Whether a kernel is there at all."""

    def __call__(self, device_type: str) -> bool:
        """Return whether the kernel can run on a device type here."""
        ...


class Refuses(Protocol):
    """What a kernel can't do."""

    def __call__(self, demand: Demand) -> str | None:
        """Return why the kernel can't do the demand exactly, or ``None`` where it can."""
        ...
