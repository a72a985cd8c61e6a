"""The GPU kernels on a CPU: each calls a stand-in that has its library's signature and naive arithmetic.

A stand-in asserts the library's requirements, so the passed arguments are tested too.
Legend: see ``kernels/call.py``; W padded head size.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_ulysses.attention.kernels import cudnn as cudnn_module
from ray_ulysses.attention.kernels import flash as flash_module
from ray_ulysses.attention.kernels import table as table_module
from ray_ulysses.attention.kernels.call import Demand, Gradients, KernelCall, KernelEntry, Whole
from ray_ulysses.attention.kernels.cudnn import CUDNN, padded_length
from ray_ulysses.attention.kernels.flash import (
    FLASH_2,
    FLASH_3,
    FLASH_4,
    FlashFunctions,
    fitted,
    flash_backward,
    flash_forward,
    unknown_signature,
    version_4,
)
from ray_ulysses.attention.kernels.table import HOPPER_TFLOPS, by_speed
from ray_ulysses.attention.kernels.varlen import VARLEN
from tests.unit.attention.kernel_case import (
    SCALE,
    Tensor,
    assert_close,
    make_call,
    make_tensors,
    results_of,
    spans_of,
    wanted_of,
)

RECORDED: list[dict[str, Any]] = []
"""Windows, scales and caps of the calls to stand-ins."""


def limits(scale: float, causal: bool, left: int, right: int, softcap: float) -> dict[str, Any]:
    return {"scale": scale, "causal": causal, "left": left, "right": right, "softcap": softcap}


def weights_of(q: Tensor, k: Tensor, seen: dict[str, Any]) -> tuple[Tensor, Tensor | float]:
    """Return masked scores ``[H, t, u]`` and the slope of the cap, as flash-attn defines them."""
    copies, (t, u) = q.shape[1] // k.shape[1], (q.shape[0], k.shape[0])
    scores = torch.einsum("thd,uhd->htu", q, k.repeat_interleave(copies, 1)) * seen["scale"]
    slope: Tensor | float = 1.0
    if seen["softcap"]:
        bent = torch.tanh(scores / seen["softcap"])
        scores, slope = bent * seen["softcap"], 1 - bent**2
    left, right = seen["left"], 0 if seen["causal"] else seen["right"]
    at = torch.arange(t)[:, None] + u - t
    distance = torch.arange(u)[None] - at
    hidden = torch.zeros(t, u, dtype=torch.bool)
    hidden |= distance > right if right >= 0 else hidden
    hidden |= distance < -left if left >= 0 else hidden
    return scores.masked_fill(hidden, float("-inf")), slope


def naive_forward(q: Tensor, k: Tensor, v: Tensor, borders: Sequence[int] | None, **seen: Any) -> tuple[Tensor, Tensor]:
    RECORDED.append(seen)
    assert k.shape == v.shape and q.shape[2] == k.shape[2] and q.shape[2] % 8 == 0
    for tensor in (q, k, v):
        assert tensor.stride(-1) == 1 and all(s % 8 == 0 for s in (tensor.storage_offset(), *tensor.stride()[:-1]))
    outs, lses = [], []
    for (a, b), (c, d) in cuts(q, k, borders):
        scores, _ = weights_of(q[a:b], k[c:d], seen)
        values = v[c:d].repeat_interleave(q.shape[1] // k.shape[1], 1)
        lses.append(scores.logsumexp(-1))
        outs.append(torch.einsum("htu,uhe->the", scores.softmax(-1), values))
    return torch.cat(outs), torch.cat(lses, dim=1)


def naive_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, borders: Sequence[int] | None, **seen: Any
) -> tuple[Tensor, Tensor, Tensor]:
    RECORDED.append(seen)
    assert dout.shape == out.shape == q.shape and lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    copies = q.shape[1] // k.shape[1]
    for (a, b), (c, d) in cuts(q, k, borders):
        scores, slope = weights_of(q[a:b], k[c:d], seen)
        keys, values = (x[c:d].repeat_interleave(copies, 1) for x in (k, v))
        weights = torch.exp(scores - lse[:, a:b, None])
        delta = (dout[a:b] * out[a:b]).sum(-1).T[..., None]
        grads = weights * (torch.einsum("the,uhe->htu", dout[a:b], values) - delta) * slope * seen["scale"]
        dq[a:b] = torch.einsum("htu,uhd->thd", grads, keys)
        dk[c:d] = torch.einsum("htu,thd->uhd", grads, q[a:b]).unflatten(1, (-1, copies)).sum(2)
        dv[c:d] = torch.einsum("htu,the->uhe", weights, dout[a:b]).unflatten(1, (-1, copies)).sum(2)
    return dq, dk, dv


def cuts(q: Tensor, k: Tensor, borders: Sequence[int] | None) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    if borders is None:
        yield (0, q.shape[0]), (0, k.shape[0])
        return
    yield from ((cut, cut) for cut in pairwise(borders))


def table(cu_seqlens: Tensor, max_seqlen: int) -> list[int]:
    assert cu_seqlens.dtype == torch.int32
    borders: list[int] = cu_seqlens.tolist()
    assert max_seqlen == max(b - a for a, b in pairwise(borders))
    return borders


# --- flash-attn 2.8.3: flash_attn/flash_attn_interface.py -------------------------------------------------------------


def fa2_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    assert not dropout_p and alibi_slopes is None and return_softmax is False
    seen = limits(softmax_scale, causal, window_size_left, window_size_right, softcap)
    out, lse = naive_forward(q.squeeze(0), k.squeeze(0), v.squeeze(0), None, **seen)
    return out[None], lse[None], torch.empty(0), torch.empty(2)


def fa2_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    assert not dropout_p and cu_seqlens_q is cu_seqlens_k and max_seqlen_k == max_seqlen_q
    seen = limits(softmax_scale, causal, window_size_left, window_size_right, softcap)
    return *naive_forward(q, k, v, table(cu_seqlens_q, max_seqlen_q), **seen), torch.empty(0), torch.empty(2)


def fa2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert not dropout_p and alibi_slopes is None and deterministic is False
    seen = limits(softmax_scale, causal, window_size_left, window_size_right, softcap)
    grads = naive_backward(*(t.squeeze(0) for t in (dout, q, k, v, out, softmax_lse)), None, **seen)
    for kept, grad in zip((dq, dk, dv), grads, strict=True):
        kept.copy_(grad[None])
    return torch.empty(0)


def fa2_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    seen = limits(softmax_scale, causal, window_size_left, window_size_right, softcap)
    grads = naive_backward(dout, q, k, v, out, softmax_lse, table(cu_seqlens_q, max_seqlen_q), **seen)
    for kept, grad in zip((dq, dk, dv), grads, strict=True):
        kept.copy_(grad)
    return torch.empty(0)


# --- flash-attn 4 (4.0.0b36), flash_attn/cute/interface.py ------------------------------------------------------------


def fa4_limits(softmax_scale, causal, window_size_left, window_size_right, softcap):
    """Return the limits in version 2's notation, as `_resolve_causal_local_window` reads them."""
    assert window_size_left is None or window_size_left >= 0, "a number without a None is a limit"
    assert window_size_right is None or window_size_right >= 0
    right = 0 if causal else window_size_right
    return softmax_scale, causal, *(-1 if one is None else one for one in (window_size_left, right)), softcap


def fa4_forward(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
    max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
    window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, return_lse=False, out=None,
    lse=None,
):  # fmt: skip
    assert return_lse and qv is page_table is learnable_sink is out is lse is None
    seen = fa4_limits(softmax_scale, causal, window_size_left, window_size_right, softcap or 0.0)
    if cu_seqlens_q is None:
        found = fa2_forward(q, k, v, 0.0, *seen, None, False)
    else:
        found = fa2_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, *seen)
    return *found[:2], None, None, None


def fa4_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, dlse=None,
):  # fmt: skip
    assert softcap is not None and dlse is score_mod is None
    seen = (*fa4_limits(softmax_scale, causal, window_size_left, window_size_right, softcap), None, deterministic)
    first = (dout, q, k, v, out, lse, dq, dk, dv)
    if cu_seqlens_q is None:
        fa2_backward(*first, 0.0, *seen)
    else:
        fa2_varlen_backward(*first, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, *seen)
    return dq, dk, dv


# --- flash-attn 3, hopper/flash_attn_interface.py: as in flash-attn 2.8.3, and as a custom operator -------------------


def fa3_early_forward(
    q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q,
    max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale,
    v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    assert k_new is v_new is qv is out is cu_seqlens_k_new is seqused_q is page_table is rotary_cos is q_descale is None
    if cu_seqlens_q is None:
        return fa2_forward(q, k, v, 0.0, softmax_scale, causal, *window_size, softcap, None, False)
    return fa2_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, *window_size,
        softcap,
    )  # fmt: skip


def fa3_early_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k, dq,
    dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    first = (dout, q, k, v, out, softmax_lse, dq, dk, dv)
    last = (0.0, softmax_scale, causal, *window_size, softcap, None, deterministic)
    if cu_seqlens_q is None:
        fa2_backward(*first, *last)
    else:
        fa2_varlen_backward(*first, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *last)
    return dq, dk, dv, torch.empty(0)


_LIMITS = "float? softmax_scale=None, bool {causal}=False, int window_size_left=-1, int window_size_right=-1, "
_EXTENTS = "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "


@torch.library.custom_op(
    "ray_ulysses_test::fa3_forward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? out_=None, "
    + _EXTENTS
    + "Tensor? seqused_q=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    + _LIMITS.format(causal="causal")
    + "int attention_chunk=0, float softcap=0.0, int num_splits=1) -> (Tensor, Tensor, Tensor, Tensor)",
)
def fa3_forward(
    q, k, v, k_new, out_, cu_q, cu_k, seqused_q, max_q, max_k, scale, causal=False, left=-1, right=-1, chunk=0,
    cap=0.0, splits=1,
):  # fmt: skip
    rest = (0.0, scale, causal, left, right, cap)
    if cu_q is None:
        return fa2_forward(q, k, v, *rest, None, False)
    return fa2_varlen_forward(q, k, v, cu_q, cu_k, max_q, max_k, *rest)


@torch.library.custom_op(
    "ray_ulysses_test::fa3_backward",
    mutates_args=("dq", "dk", "dv"),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    + _EXTENTS
    + "Tensor? sequed_q=None, Tensor? sequed_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    + "Tensor(a!)? dq=None, Tensor(b!)? dk=None, Tensor(c!)? dv=None, "
    + _LIMITS.format(causal="is_causal")
    + "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> Tensor",
)
def fa3_backward(
    dout, q, k, v, out, lse, cu_q, cu_k, sequed_q, sequed_k, max_q, max_k, dq, dk, dv, scale, causal=False, left=-1,
    right=-1, cap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    fa3_early_backward(
        dout, q, k, v, out, lse, cu_q, cu_k, None, None, max_q, max_k, dq, dk, dv, scale, causal, (left, right), cap,
        deterministic,
    )  # fmt: skip
    return torch.empty(0)


# --- torch's operators ------------------------------------------------------------------------------------------------


def aten_flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale,
    window_size_left, window_size_right,
):  # fmt: skip
    assert not dropout_p and return_debug_mask is False
    rest = (0.0, scale, is_causal, window_size_left, window_size_right, 0.0)
    if cum_seq_q is None:
        assert (query.dim(), max_q, max_k) == (4, query.shape[1], key.shape[1])
        return *fa2_forward(query, key, value, *rest, None, False), torch.empty(0)
    return *fa2_varlen_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, *rest), torch.empty(0)


def aten_flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale, window_size_left, window_size_right,
):  # fmt: skip
    assert not dropout_p and (rng_state.dtype, rng_state.shape) == (torch.uint64, (2,))
    grads = [torch.empty_like(t) for t in (query, key, value)]
    first = (grad_out, query, key, value, out, logsumexp, *grads)
    last = (0.0, scale, is_causal, window_size_left, window_size_right, 0.0, None, False)
    if cum_seq_q is None:
        fa2_backward(*first, *last)
    else:
        fa2_varlen_backward(*first, cum_seq_q, cum_seq_k, max_q, max_k, *last)
    return tuple(grads)


def make_cudnn(keeps_last_dim: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def rows_first(tensors: Sequence[Tensor]) -> list[Tensor]:
        assert all(t.dim() == 4 and t.shape[0] == 1 for t in tensors)
        return [t[0].transpose(0, 1) for t in tensors]

    def forward(q, k, v, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, *, scale):
        assert attn_bias is None and compute_log_sumexp and not dropout_p and return_debug_mask is False
        assert k.shape[2] > 1 and q.shape[2] % 128 == 0 and (q.shape[2] == k.shape[2] or not is_causal)
        seen = limits(scale, is_causal, -1, -1, 0.0)
        inputs = [t.float() if t.dtype == torch.bfloat16 else t for t in rows_first((q, k, v))]
        out, lse = naive_forward(*inputs, None, **seen)
        lse = lse[None, ..., None] if keeps_last_dim else lse[None]
        return out.transpose(0, 1)[None], lse, None, None, q.shape[2], k.shape[2], None, None, None

    def backward(
        grad, q, k, v, out, lse, seed, offset, attn_bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *, scale
    ):  # fmt: skip
        assert attn_bias is None and cum_q is None and cum_k is None and seed.dtype == offset.dtype == torch.int64
        assert (max_q, max_k) == (q.shape[2], k.shape[2]) and grad.stride() == out.stride()
        assert lse.shape == ((1, q.shape[1], max_q, 1) if keeps_last_dim else (1, q.shape[1], max_q))
        seen = limits(scale, is_causal, -1, -1, 0.0)
        grads = naive_backward(*rows_first((grad, q, k, v, out)), lse.reshape(q.shape[1], max_q), None, **seen)
        return tuple(grad.transpose(0, 1)[None] for grad in grads)

    return forward, backward


# --- the kernels over them --------------------------------------------------------------------------------------------


def library(forward: Any, backward: Any, forward_spans: Any = None, backward_spans: Any = None) -> FlashFunctions:
    return FlashFunctions(
        forward_dense=forward,
        forward_spans=forward_spans or forward,
        backward_dense=backward,
        backward_spans=backward_spans or backward,
    )


FUNCTIONS = {
    "flash_attn": library(fa2_forward, fa2_backward, fa2_varlen_forward, fa2_varlen_backward),
    "flash_attn_3-early": library(fa3_early_forward, fa3_early_backward),
    "flash_attn_3": library(fa3_forward, fa3_backward),
    "flash_attn_4": version_4(fa4_forward, fa4_backward),
}
ENTRIES = {"flash_attn": FLASH_2, "flash_attn_3-early": FLASH_3, "flash_attn_3": FLASH_3, "varlen": VARLEN}
ENTRIES |= {"flash_attn_4": FLASH_4, "cudnn-3d": CUDNN, "cudnn-4d": CUDNN, "cudnn-shared": CUDNN}
LEAST_WORK = {"cudnn-3d": 0, "cudnn-4d": 0, "cudnn-shared": 4 * 9**2}
"""Work per document from which cuDNN is used. With "shared" and 4 heads, this is 9 tokens."""


@pytest.fixture(params=ENTRIES)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelEntry]:
    """A kernel that calls the stand-in for its library."""
    name = request.param
    kernel = ENTRIES[name]
    if name in FUNCTIONS:
        kernel = replace(
            kernel,
            forward=partial(flash_forward, lambda: FUNCTIONS[name]),
            backward=partial(flash_backward, lambda: FUNCTIONS[name]),
        )
    if name in ("varlen", "cudnn-shared"):
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten_flash_forward)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", aten_flash_backward)
    if kernel is CUDNN:
        monkeypatch.setattr(cudnn_module, "_LEAST_WORK", LEAST_WORK[name])
        forward, backward = make_cudnn(name == "cudnn-4d")
        monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", forward)
        monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", backward)
    cudnn_module._keeps_last_dim.cache_clear()
    RECORDED.clear()
    yield kernel
    cudnn_module._keeps_last_dim.cache_clear()


def skip_if_refused(kernel: KernelEntry, call: KernelCall) -> None:
    has_window, has_softcap = call.has_window, call.softcap is not None
    if (kernel in (CUDNN, VARLEN) and has_softcap) or (kernel is CUDNN and has_window):
        pytest.skip(f"{kernel.name} refuses it")


def visible_of(call: KernelCall) -> Tensor:
    visible = torch.zeros(call.query_THD.shape[0], call.key_UKD.shape[0], dtype=torch.bool)
    for query, key in call.each_span():
        t, u = query.stop - query.start, key.stop - key.start
        inside = torch.ones(t, u, dtype=torch.bool)
        inside = inside if call.most_right is None else inside.tril(u - t + call.most_right)
        visible[query, key] = inside if call.left is None else inside.triu(u - t - call.left)
    return visible


CALLS: dict[str, dict[str, Any]] = {
    "one-document": {},
    "packed": {"spans": [20, 1, 9, 7]},
    "packed-short-runs": {"spans": [3, 8, 20, 1, 11, 2, 2, 5]},
    "full": {"causal": False},
    "window": {"left": 9},
    "packed-window": {"left": 5, "spans": [20, 1, 9, 7]},
    "window-longer-than-documents": {"left": 19, "spans": [20, 1, 9, 7]},
    "window-both-ways": {"causal": False, "left": 9, "right": 9},
    "packed-window-both-ways": {"causal": False, "left": 5, "right": 5, "spans": [20, 1, 9, 7]},
    "packed-both-ways": {"causal": False, "spans": [20, 1, 9, 7]},
    "packed-softcap": {"softcap": 1.5, "left": 20, "spans": [30, 7]},
}


@pytest.mark.parametrize("sizes", [(16, 16), (24, 16), (9, 12)], ids=lambda s: f"{s[0]}/{s[1]}")
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())
def test_a_kernel_is_attention_by_definition_forward_and_backward(
    stand_in: KernelEntry, options: dict[str, Any], sizes: tuple[int, int]
) -> None:
    spans = spans_of(options["spans"]) if "spans" in options else None
    tokens = 37 if spans is None else spans.borders[-1]
    tensors = make_tensors(tokens, tokens, *sizes)
    call = make_call(tensors, **{**options, "spans": spans})
    skip_if_refused(stand_in, call)
    assert all(result.is_contiguous() for result in stand_in.forward(call))
    assert_close(results_of(stand_in, call, tensors[3]), wanted_of(tensors, visible_of(call), call.softcap))


@pytest.mark.parametrize("num_before", [1, 5, 130])
@pytest.mark.parametrize("left", [None, 40])
def test_parts_of_a_softmax_add_up_to_the_whole(stand_in: KernelEntry, num_before: int, left: int | None) -> None:
    """As on a ring: a causal square and a rectangle of earlier keys, with the complete softmax's log-sum-exp."""
    q, k, v, upstream = make_tensors(33, 33 + num_before, 16, 16)
    before, after = slice(0, num_before), slice(num_before, None)
    square = make_call([q, k[after], v[after]], left=left)
    rectangle = make_call([q, k[before], v[before]], causal=False)
    skip_if_refused(stand_in, square)
    parts = [stand_in.forward(part) for part in (square, rectangle)]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(part * (part_lse - lse).exp().T[..., None] for part, part_lse in parts)
    assert isinstance(out, Tensor)
    first, second = (stand_in.backward(part, Whole(upstream.float(), out, lse)) for part in (square, rectangle))
    ours = [out, first[0] + second[0], *(torch.cat([b, a]) for a, b in zip(first[1:], second[1:], strict=True))]
    visible = torch.cat([torch.ones(33, num_before, dtype=torch.bool), visible_of(square)], dim=1)
    assert_close(ours, wanted_of([q, k, v, upstream], visible))


@pytest.mark.parametrize(("sizes", "right"), [((6, 3), 3), ((6, 6), 0), ((3, 9), 1), ((9, 4), 8), ((1, 5), 0)])
def test_a_rectangle_of_later_keys_is_attention_by_definition(
    stand_in: KernelEntry, sizes: tuple[int, int], right: int
) -> None:
    tensors = make_tensors(*sizes, 16, 16)
    call = make_call(tensors, causal=False, right=right)
    skip_if_refused(stand_in, call)
    assert_close(results_of(stand_in, call, tensors[3]), wanted_of(tensors, visible_of(call)))


@pytest.mark.parametrize("stand_in", ["cudnn-shared"], indirect=True)
def test_short_documents_go_to_the_flash_kernel_in_one_call_per_run(
    stand_in: KernelEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []

    def flash(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(tuple(cu_q.tolist()))
        return aten_flash_forward(q, k, v, cu_q, *rest, **options)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    tensors = make_tensors(47, 47, 16, 16)
    call = make_call(tensors, spans=spans_of([3, 8, 20, 1, 11, 2, 2]))
    out, lse = CUDNN.forward(call)
    assert calls == [(0, 3, 11), (0, 1), (0, 2, 4)]
    # Gradients are written to the caller's memory: parts of one payload.
    payload = torch.full((47, 128), float("nan"))
    into = tuple(t.unflatten(1, (-1, 16)) for t in payload.split([64, 32, 32], dim=1))
    grads = CUDNN.backward(call, Whole(tensors[3].float(), out, lse), lambda: into)
    assert all(a is b for a, b in zip(grads, into, strict=True))
    assert_close([out, *grads], wanted_of(tensors, visible_of(call)))


@pytest.mark.parametrize("stand_in", FUNCTIONS, indirect=True)
@pytest.mark.parametrize("sizes", [(16, 16), (24, 16), (9, 9)], ids=lambda s: f"{s[0]}/{s[1]}")
def test_flash_attn_writes_gradients_to_given_memory_if_head_sizes_allow(
    stand_in: KernelEntry, sizes: tuple[int, int]
) -> None:
    tensors = make_tensors(30, 30, *sizes)
    call, asked = make_call(tensors), []

    def into() -> Gradients:
        asked.append(True)
        return torch.empty(30, 4, 16), torch.empty(30, 2, 16), torch.empty(30, 2, 16)

    out, lse = stand_in.forward(call)
    grads = stand_in.backward(call, Whole(tensors[3].float(), out, lse), into)
    assert bool(asked) == (sizes == (16, 16))
    assert_close([out, *grads], wanted_of(tensors, visible_of(call)))


@pytest.mark.parametrize("stand_in", [*FUNCTIONS, "varlen"], indirect=True)
def test_a_window_is_passed_to_both_sides_and_none_as_minus_one(stand_in: KernelEntry) -> None:
    tensors = make_tensors(30, 30, 16, 16)
    for options, window in (
        ({}, (-1, 0)),
        ({"left": 7}, (7, 0)),
        ({"left": 29}, (-1, 0)),
        ({"left": 7, "causal": False}, (7, -1)),
        ({"causal": False}, (-1, -1)),
        ({"left": 7, "right": 7, "causal": False}, (7, 7)),
        ({"right": 0, "causal": False}, (-1, 0)),
        ({"left": 29, "right": 29, "causal": False}, (-1, -1)),
    ):
        call = make_call(tensors, **options)
        results_of(stand_in, call, tensors[3])
        # torch's operators take a causal window as (left, 0) and False, the libraries as (left, 0) and True.
        causal = window == (-1, 0) if stand_in is VARLEN else call.causal
        for seen in RECORDED[-2:]:
            assert seen == limits(SCALE, causal, *window, 0.0), options


def test_an_unknown_signature_is_refused_with_the_argument() -> None:
    assert [unknown_signature(functions) for functions in FUNCTIONS.values()] == [None] * 4

    def lacking(q, k, v, softmax_scale, causal, window_size): ...

    def demanding(q, k, v, softmax_scale, causal, window_size, softcap, sinks): ...

    assert "(lacks: softcap; " in str(unknown_signature(library(lacking, lacking)))
    assert "; requires: sinks)" in str(unknown_signature(library(demanding, demanding)))


def demand(**changes: Any) -> Demand:
    fields: dict[str, Any] = {"device_type": "cuda", "dtype": torch.bfloat16, "head_size": 128, "value_size": 128}
    return Demand(**{**fields, **changes})


@pytest.mark.parametrize(
    ("entry", "changes", "text"),
    [
        (VARLEN, {}, None),
        (VARLEN, {"has_window": True, "head_size": 256, "value_size": 192}, None),
        (VARLEN, {"has_softcap": True}, "soft-capping"),
        (VARLEN, {"dtype": torch.float32}, "float32"),
        (VARLEN, {"head_size": 512}, "512"),
        (CUDNN, {"value_size": 64}, None),
        (CUDNN, {"has_softcap": True}, "soft-capping"),
        (CUDNN, {"has_window": True}, "pytorch#196678"),
        (CUDNN, {"head_size": 192}, "head sizes above 128"),
        (CUDNN, {"dtype": torch.float32}, "float32"),
        (FLASH_2, {"dtype": torch.float64}, "float64"),
        (FLASH_3, {"value_size": 320}, "320"),
    ],
)
def test_a_demand_that_a_kernel_cannot_meet_is_refused(
    entry: KernelEntry, changes: dict[str, Any], text: str | None
) -> None:
    refusal = entry.refuses(demand(**changes))
    assert refusal is None if text is None else text in (refusal or "")


def test_flash_attn_is_refused_by_gpu_by_version_by_build_and_if_it_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules: dict[str, Any] = {"flash_attn": types.SimpleNamespace(__version__="2.7.4.post1")}
    monkeypatch.setattr(flash_module.importlib, "import_module", modules.__getitem__)
    assert FLASH_2.refuses(demand()) == "it requires flash-attn 2.8 or later, but version 2.7.4.post1 is installed"
    modules["flash_attn"].__version__ = "2.8.3"
    monkeypatch.setattr(flash_module, "flash_attn_2", lambda: FUNCTIONS["flash_attn"])
    assert FLASH_2.refuses(demand(has_window=True, has_softcap=True)) is None
    monkeypatch.setattr(flash_module, "flash_attn_3", lambda: FUNCTIONS["flash_attn_3"])
    monkeypatch.setattr(flash_module, "compute_capability", lambda: (9, 0))
    assert FLASH_3.refuses(demand(has_window=True, has_softcap=True)) is None
    flags = {"FLASHATTENTION_DISABLE_SOFTCAP": True, "FLASHATTENTION_DISABLE_HDIM256": True}
    config = types.SimpleNamespace(CONFIG={"build_flags": flags})
    monkeypatch.setattr(flash_module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(flash_module.importlib, "import_module", lambda name: config)
    assert FLASH_3.refuses(demand()) is None
    refusal = FLASH_3.refuses(demand(has_softcap=True, head_size=256))
    assert refusal == "it was built without softcap, heads of 256"
    monkeypatch.setattr(flash_module, "compute_capability", lambda: (10, 0))
    assert FLASH_3.refuses(demand()) == "it requires Hopper (compute capability 9.0), but the GPU has 10.0"

    def broken() -> FlashFunctions:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(flash_module, "compute_capability", lambda: None)
    monkeypatch.setattr(flash_module, "flash_attn_3", broken)
    assert FLASH_3.refuses(demand()) == "flash_attn_interface can't be used: undefined symbol"


def test_flash_attn_4_is_for_hopper_and_blackwell_and_seen_without_importing_version_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(flash_module, "flash_attn_4", lambda: FUNCTIONS["flash_attn_4"])
    for capability, size, refusal in (
        ((9, 0), 192, None),
        ((10, 0), 128, None),
        ((10, 3), 250, None),
        ((10, 0), 192, "on Blackwell, it does not support heads of 192"),
        ((8, 0), 128, "it requires Hopper or Blackwell (9.0 or 10.x), but the GPU has 8.0"),
    ):
        monkeypatch.setattr(flash_module, "compute_capability", lambda found=capability: found)
        assert FLASH_4.refuses(demand(has_window=True, has_softcap=True, head_size=size)) == refusal
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    assert not FLASH_4.runs_on("cuda")
    (package / "cute").mkdir()
    assert FLASH_4.runs_on("cuda") and not FLASH_4.runs_on("cpu")
    assert "flash_attn" not in sys.modules


def test_hopper_prefers_kernels_by_their_stored_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "compute_capability", lambda: (9, 0))
    assert [entry.name for entry in by_speed()[:3]] == ["cudnn", "flash_attn", "varlen"]
    assert by_speed()[-1].name == "math"
    page = (Path(__file__).parents[3] / "benchmarks/results/h200/kernels_gpu.md").read_text()
    rows = page.partition("## 131k, one document, 1 of sp 8")[2].partition("## ")[0]
    assert {name: int(rate) for name, rate in re.findall(r"\| ours: (\w+) .* (\d+) \|", rows)} == HOPPER_TFLOPS


def test_cudnn_is_refused_by_an_environment_variable_and_by_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert "torch.use_deterministic_algorithms is enabled" in str(CUDNN.refuses(demand()))
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    assert re.search("TORCH_CUDNN_SDPA_AVOID_RECOMPILE .*unset it", str(CUDNN.refuses(demand())))


def test_lengths_of_documents_are_padded_to_few() -> None:
    assert [padded_length(n) for n in (1, 128, 129, 2048, 5000, 100_000, 131_072)] == [
        128, 128, 256, 2048, 5120, 102_400, 131_072,
    ]  # fmt: skip
    lengths = {padded_length(n) for n in range(1, 70_000)}
    assert len(lengths) <= 16 * 7 and all(n <= padded_length(n) <= max(128, 1.125 * n) + 127 for n in range(1, 70_000))


def test_an_aligned_view_is_passed_on_as_it_is_and_another_is_copied() -> None:
    payload = torch.zeros(5, 32)
    aligned = payload[:, 8:24].unflatten(1, (1, 16))
    assert fitted(aligned, 16) is aligned
    for begin in (3, 4):
        shifted = payload[:, begin : begin + 16].unflatten(1, (1, 16))
        assert fitted(shifted, 16).data_ptr() != shifted.data_ptr()
    whole = torch.zeros(1 + 5 * 16)[1:].view(5, 1, 16)
    assert whole.is_contiguous() and fitted(whole, 16).storage_offset() == 0
