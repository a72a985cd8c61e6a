"""cuDNN attention with one call per long document. Consecutive short documents share a call to torch's flash kernel.

Masks are avoided, because cuDNN's dQ is NaN with a mask if S % 128 == 64 (pytorch#196678). Sliding windows are
therefore refused, and each call is either a causal square or an unmasked rectangle. Argument lists follow torch 2.11.0
and 2.13.0: ``native_functions.yaml``, ``derivatives.yaml``, ``_meta_registrations.py``, ``MHA.cpp``, ``sdp_utils.cpp``
and ``attention_backward.cu``.
Legend: see ``call.py``; t and u queries and keys of a span, n padded number of tokens, W padded head size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise

import torch

from ray_ulysses.attention.kernels.call import Demand, Gradients, KernelCall, KernelEntry, Spans, Whole
from ray_ulysses.attention.kernels.flash import ampere_refusal, fitted
from ray_ulysses.attention.kernels.math import MATH
from ray_ulysses.attention.kernels.varlen import VARLEN

_LEAST_WORK = 4e8
"""Break-even point in ``tokens ** 2 * query heads``. Shorter documents use torch's flash kernel.

cuDNN has an overhead of 0.55 ms per document (forward and backward) and then reaches 550 TFLOP/s, against 320 for the
flash kernel (H100, head size 128: benchmarks/results/kernels_gpu.md)."""
_MAX_HEAD_SIZE = 128
_LENGTH_STEP = 128
_RECOMPILE_SWITCH = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"


def padded_length(num_tokens: int) -> int:
    """Return the length to which a span is padded: a multiple of 128, with at most 16 lengths per power of two.

    cuDNN builds a graph for every new shape (55 to 70 ms, flashinfer#5245), and torch never frees the graphs. Without
    padding, almost every document would need a new graph. Multiples of a 16th of a power of two are not padded.
    """
    step = max(_LENGTH_STEP, (1 << (num_tokens.bit_length() - 1)) // 16)
    return -(-num_tokens // step) * step


def _forward(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    subcalls = list(_subcalls(call))
    if len(subcalls) == 1:
        # A single long document, or only short documents: no results to concatenate.
        out_THE, lse_HT = _forward_part(_part(call, *subcalls[0]))
        return out_THE.contiguous(), lse_HT.contiguous()
    tokens, heads, value_size = *call.query_THD.shape[:2], call.value_UKE.shape[2]
    out_THE = call.query_THD.new_empty(tokens, heads, value_size)
    lse_HT = torch.empty(heads, tokens, dtype=torch.float32, device=out_THE.device)
    for query, key, spans in subcalls:
        out_THE[query], lse_HT[:, query] = _forward_part(_part(call, query, key, spans))
    return out_THE, lse_HT


def _backward(call: KernelCall, whole: Whole, into: Callable[[], Gradients] | None = None) -> Gradients:
    subcalls = list(_subcalls(call))
    if len(subcalls) == 1:
        return _backward_part(_part(call, *subcalls[0]), whole)
    if into is None:
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in call.inputs)
    else:
        dq, dk, dv = into()
    for query, key, spans in subcalls:
        dq[query], dk[key], dv[key] = _backward_part(_part(call, query, key, spans), whole.of(query))
    return dq, dk, dv


def _subcalls(call: KernelCall) -> Iterator[tuple[slice, slice, Spans | None]]:
    """Yield each call's query and key slices, for one long span or for consecutive short spans with their ``Spans``."""
    if call.spans is None:
        yield *call.each_span()[0], None
        return
    borders = call.spans.borders
    lengths = [stop - start for start, stop in pairwise(borders)]
    is_long = [length**2 * call.query_THD.shape[1] >= _LEAST_WORK for length in lengths]
    first = 0
    while first < len(lengths):
        last = first + 1
        while not is_long[first] and last < len(lengths) and not is_long[last]:
            last += 1
        tokens = slice(borders[first], borders[last])
        yield tokens, tokens, None if is_long[first] else _run_of(call.spans, first, last)
        first = last


def _run_of(spans: Spans, first: int, last: int) -> Spans:
    """Return spans ``first`` to ``last - 1`` as new ``Spans``, without synchronizing with the device."""
    borders = spans.borders[first : last + 1]
    if len(borders) == len(spans.borders):
        return spans
    return Spans(
        cu_seqlens=spans.cu_seqlens[first : last + 1] - borders[0],
        borders=tuple(border - borders[0] for border in borders),
        max_seqlen=max(stop - start for start, stop in pairwise(borders)),
    )


def _part(call: KernelCall, query: slice, key: slice, spans: Spans | None) -> KernelCall:
    assert call.right is None and (call.left is None or call.left >= key.stop - key.start - 1), "cuDNN has no windows"
    return replace(
        call, query_THD=call.query_THD[query], key_UKD=call.key_UKD[key], value_UKE=call.value_UKE[key], spans=spans
    )


def _lengths(part: KernelCall) -> tuple[int, int]:
    """Return the padded numbers of queries and keys.

    In a causal square, the mask hides padded keys from real queries. In a rectangle, every query sees all keys, so keys
    are not padded.
    """
    num_queries, num_keys = part.query_THD.shape[0], part.key_UKD.shape[0]
    # torch aligns cuDNN's causal mask to the top left (MHA.cpp: TOP_LEFT), which is KernelCall's mask only in a square.
    assert not part.causal or num_queries == num_keys
    length = padded_length(num_queries)
    return length, length if part.causal else num_keys


def _too_few_keys(part: KernelCall) -> bool:
    # "cudnn SDPA does not support key/value sequence length 1" (sdp_utils.cpp). Causal squares are padded, so longer.
    return not part.causal and part.key_UKD.shape[0] == 1


def _forward_part(part: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    if part.spans is not None:
        return VARLEN.forward(part)
    if _too_few_keys(part):
        return MATH.forward(part)
    q, k, v = _inputs(part)
    out_1HnW, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, part.causal, False, scale=part.scale
    )
    num_queries = part.query_THD.shape[0]
    # Some builds return [1, H, n], others [1, H, n, 1].
    lse_Hn = lse.reshape(lse.shape[1], lse.shape[2])
    out_nHW = out_1HnW[0].transpose(0, 1)
    return out_nHW[:num_queries, :, : part.value_UKE.shape[2]], lse_Hn[:, :num_queries]


def _backward_part(part: KernelCall, whole: Whole) -> Gradients:
    if part.spans is not None:
        return VARLEN.backward(part, whole)
    if _too_few_keys(part):
        return MATH.backward(part, whole)
    q, k, v = _inputs(part)
    (num_queries, num_keys), length = (part.query_THD.shape[0], part.key_UKD.shape[0]), q.shape[2]
    upstream, out = (_heads_first(t, length, q.shape[3]) for t in (whole.grad_out_THE, whole.out_THE))
    # Padded queries and their upstream gradients are 0. With a log-sum-exp of 0, their attention weights are 1 and they
    # contribute 0 to all gradients.
    lse = torch.nn.functional.pad(whole.lse_HT, (0, length - num_queries)).unsqueeze(0)
    if _keeps_last_dim(q.device):
        lse = lse.unsqueeze(-1)
    no_seed = torch.zeros((), dtype=torch.int64, device=q.device)
    # The operator expects undefined tensors for bias and cu_seqlens; in Python, an undefined tensor is None.
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        upstream, q, k, v, out, lse.contiguous(), no_seed, no_seed, None, None, None, length, k.shape[2], 0.0,
        part.causal, scale=part.scale,
    )  # fmt: skip
    # [1, H, n, W] -> [n, H, W]
    dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
    return part.trimmed(dq[:num_queries], dk[:num_keys], dv[:num_keys])


def _inputs(part: KernelCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return padded queries, keys and values ``[1, H or K, n, W]``. cuDNN supports GQA without repeated KV heads."""
    num_queries, num_keys = _lengths(part)
    width = -(-max(part.query_THD.shape[2], part.value_UKE.shape[2]) // 8) * 8
    return (
        _heads_first(part.query_THD, num_queries, width),
        _heads_first(part.key_UKD, num_keys, width),
        _heads_first(part.value_UKE, num_keys, width),
    )


def _heads_first(heads_THD: torch.Tensor, length: int, width: int) -> torch.Tensor:
    """Return ``[1, H, length, width]``, padded with zeros. In memory, tokens remain the outermost dim."""
    missing = length - heads_THD.shape[0]
    if missing:
        heads_THD = torch.nn.functional.pad(heads_THD, (0, width - heads_THD.shape[2], 0, 0, 0, missing))
    return fitted(heads_THD, width).transpose(0, 1).unsqueeze(0)


@cache
def _keeps_last_dim(device: torch.device) -> bool:
    """Return whether this PyTorch build returns the log-sum-exp as ``[B, H, S, 1]`` rather than ``[B, H, S]``.

    The backward requires the shape that the forward returns, which differs between PyTorch releases. A tiny forward
    determines it.
    """
    tiny = torch.zeros(1, _LENGTH_STEP, 1, 64, dtype=torch.bfloat16, device=device).transpose(1, 2)
    _, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        tiny, tiny, tiny, None, True, 0.0, True, False, scale=1.0
    )
    assert lse.shape[:3] == (1, 1, _LENGTH_STEP)
    return bool(lse.dim() == 4)


def _refuses(demand: Demand) -> str | None:
    if demand.has_softcap:
        return "it does not support soft-capping"
    if not demand.is_causal:
        return "documents can be padded only with a causal mask, so each length would need a cuDNN graph of its own"
    if demand.has_window:
        return "it supports sliding windows only through a mask, with which dQ can be NaN (pytorch#196678)"
    if max(demand.head_size, demand.value_size) > _MAX_HEAD_SIZE:
        # Some pairs of head sizes up to 256 work on Hopper with cuDNN 9.10, but later PyTorch releases reject most of
        # them in the backward (check_cudnn_d256_bprop_head_dim in sdp_utils.cpp).
        return f"head sizes above {_MAX_HEAD_SIZE} depend on the GPU and the cuDNN version, so they are not supported"
    if os.environ.get(_RECOMPILE_SWITCH, "0") not in ("", "0"):
        # With this variable, the log-sum-exp is [B, S, H, 1] in the forward and the backward (pytorch#155958).
        return f"the environment variable {_RECOMPILE_SWITCH} changes the layout of the log-sum-exp; unset it"
    if torch.are_deterministic_algorithms_enabled():
        return "its backward is not deterministic, but torch.use_deterministic_algorithms is enabled"
    return ampere_refusal(demand)


CUDNN = KernelEntry(
    name="cudnn",
    needs="a CUDA device and cuDNN",
    runs_on=lambda device_type: (
        device_type == "cuda" and torch.version.cuda is not None and torch.backends.cudnn.is_available()
    ),
    refuses=_refuses,
    forward=_forward,
    backward=_backward,
)
