"""Every kernel that runs on a CPU against attention by its definition, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.attention.kernels import KERNELS, Demand, KernelCall, KernelEntry, Spans, choose_kernel
from ray_ulysses.attention.kernels import math as math_kernel
from ray_ulysses.attention.kernels import sdpa as sdpa_kernel
from ray_ulysses.attention.kernels.call import Whole
from ray_ulysses.attention.kernels.reference import attention_by_definition, visible_tokens
from ray_ulysses.errors import UserError
from tests.breadth import examples

# fp32 against fp64, norm-wise a tensor: law 1's floor. One softmax reduces over at most a row.
BOUND = 1e-5
ON_CPU = [entry for entry in KERNELS if entry.runs_on("cpu")]
SCALE = 0.3


def demand(**changes: Any) -> Demand:
    fields: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float32, "head_size": 8, "value_size": 8}
    return Demand(**{**fields, **changes})


def make_tensors(num_queries: int, num_keys: int, heads: tuple[int, int], value_size: int, seed: int) -> Any:
    """Return Q, K, V and an upstream gradient in fp64, Q, K and V as strided parts of one payload."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv = heads
    sizes = [(num_queries, num_heads, 8), (num_keys, num_kv, 8), (num_keys, num_kv, value_size)]
    wide = [torch.randn(t, h * d + 5, generator=generator, dtype=torch.float64) for t, h, d in sizes]
    parts = [t[:, : h * d].unflatten(1, (h, d)) for t, (_, h, d) in zip(wide, sizes, strict=True)]
    upstream = torch.randn(num_queries, num_heads, value_size, generator=generator, dtype=torch.float64)
    return parts, upstream


def assert_exact(
    entry: KernelEntry, tensors: Sequence[torch.Tensor], upstream: torch.Tensor, visible: torch.Tensor, **options: Any
) -> None:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    softcap = options.get("softcap")
    wanted_out = attention_by_definition(*leaves, visible, SCALE, softcap)
    wanted = [wanted_out.detach(), *torch.autograd.grad(wanted_out, leaves, upstream)]
    q, k, v = (tensor.float() for tensor in tensors)
    call = KernelCall(query_THD=q, key_UKD=k, value_UKE=v, scale=SCALE, **options)
    out, lse = entry.forward(call)
    ours = [out, *entry.backward(call, Whole(upstream.float(), out, lse))]
    assert lse.shape == (q.shape[1], q.shape[0]) and lse.dtype == torch.float32
    whole = max(float(tensor.norm()) for tensor in wanted)
    for name, a, b in zip(("output", "dQ", "dK", "dV"), ours, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32, name
        # Attention over one token has no gradient to Q and K: such a tensor is held against the whole.
        scale = float(b.norm()) if float(b.norm()) > 1e-7 * whole else whole
        assert float((a.double() - b).norm()) <= BOUND * scale, name


def spans_of(lengths: Sequence[int]) -> Spans:
    borders = (0, *accumulate(lengths))
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    return Spans(cu_seqlens=cu_seqlens, borders=borders, max_seqlen=max(lengths))


def can(entry: KernelEntry, **asked: Any) -> bool:
    return entry.refuses(demand(**asked)) is None


@pytest.fixture(params=ON_CPU, ids=lambda entry: entry.name)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KernelEntry:
    """A kernel whose chunks are so small that every row takes several."""
    monkeypatch.setattr(math_kernel, "_BLOCK_SCORES", 200)
    monkeypatch.setattr(sdpa_kernel, "_WINDOW_BLOCK_TOKENS", 4)
    entry: KernelEntry = request.param
    return entry


LENGTHS: dict[str, list[int]] = {"one-document": [24], "packed": [7, 9, 8], "one-token-documents": [1, 1, 5, 1]}


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_a_kernel_equals_the_definition_forward_and_backward(
    kernel: KernelEntry, lengths: list[int], window: int | None, softcap: float | None
) -> None:
    if not can(kernel, has_softcap=softcap is not None):
        pytest.skip(f"{kernel.name} is not offered for soft-capping")
    tensors, upstream = make_tensors(sum(lengths), sum(lengths), (4, 2), 8, seed=0)
    left = None if window is None else window - 1
    visible = visible_tokens(lengths, sum(lengths), window)
    assert_exact(kernel, tensors, upstream, visible, spans=spans_of(lengths), causal=True, left=left, softcap=softcap)


@pytest.mark.parametrize("value_size", [4, 12], ids=["narrow-v", "wide-v"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
def test_heads_of_every_kind(kernel: KernelEntry, heads: tuple[int, int], value_size: int) -> None:
    lengths = [5, 11]
    tensors, upstream = make_tensors(16, 16, heads, value_size, seed=1)
    for window in (None, 4):
        visible = visible_tokens(lengths, 16, window)
        left = None if window is None else window - 1
        assert_exact(kernel, tensors, upstream, visible, spans=spans_of(lengths), causal=True, left=left)


@settings(max_examples=examples(30))
@given(num_queries=st.integers(1, 12), num_keys=st.integers(1, 12), left=st.none() | st.integers(0, 14))
@pytest.mark.parametrize("entry", ON_CPU, ids=lambda entry: entry.name)
def test_a_rectangle_with_a_window_equals_the_definition(
    entry: KernelEntry, num_queries: int, num_keys: int, left: int | None
) -> None:
    """Aligned to the bottom right corner, as flash-attn has it."""
    at = torch.arange(num_queries).unsqueeze(1) + num_keys - num_queries
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if left is not None:
        visible = torch.arange(num_keys).unsqueeze(0) >= at - left
    if not visible.any(dim=1).all():
        return
    tensors, upstream = make_tensors(num_queries, num_keys, (4, 2), 8, seed=num_queries)
    assert_exact(entry, tensors, upstream, visible, spans=None, causal=False, left=left)


def test_parts_are_weighted_by_the_log_sum_exp_of_the_whole(kernel: KernelEntry) -> None:
    """What a ring does: each part's gradients are taken with the whole softmax's output and log-sum-exp."""
    (q, k, v), upstream = make_tensors(6, 10, (4, 2), 8, seed=3)
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    wanted_out = attention_by_definition(*leaves, torch.ones(6, 10, dtype=torch.bool), SCALE)
    wanted = torch.autograd.grad(wanted_out, leaves, upstream)
    q, k, v, upstream = (tensor.float() for tensor in (q, k, v, upstream))
    calls = [
        KernelCall(query_THD=q, key_UKD=k[keys], value_UKE=v[keys], spans=None, scale=SCALE, causal=False)
        for keys in (slice(0, 3), slice(3, 10))
    ]
    parts = [kernel.forward(call) for call in calls]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(o * (part - lse).exp().T.unsqueeze(-1) for o, part in parts).contiguous()
    assert (out.double() - wanted_out).norm() <= BOUND * wanted_out.norm()
    grads = [kernel.backward(call, Whole(upstream, out, lse)) for call in calls]
    ours = (grads[0][0] + grads[1][0], torch.cat([g[1] for g in grads]), torch.cat([g[2] for g in grads]))
    for a, b in zip(ours, wanted, strict=True):
        assert (a.double() - b).norm() <= BOUND * b.norm()


@pytest.mark.parametrize("window", [None, 3])
def test_the_definition_is_a_softmax_over_what_a_token_sees(window: int | None) -> None:
    """The oracle itself, held to loops over tokens."""
    torch.manual_seed(0)
    q, k, v, sinks = torch.randn(7, 2, 4), torch.randn(7, 1, 4), torch.randn(7, 1, 3), torch.randn(2)
    visible = visible_tokens([4, 2], 7, window)
    out = attention_by_definition(q, k, v, visible, 0.5, 0.7, sinks)
    for head in range(2):
        for token, begin in enumerate([0, 0, 0, 0, 4, 4, 6]):
            first = begin if window is None else max(begin, token - window + 1)
            scores = 0.7 * torch.tanh(k[first : token + 1, 0] @ q[token, head] * 0.5 / 0.7)
            weights = torch.cat([scores, sinks[head : head + 1]]).softmax(0)[:-1]
            torch.testing.assert_close(out[token, head], weights @ v[first : token + 1, 0])


def test_the_table_ends_with_the_kernel_that_does_everything() -> None:
    everything = demand(has_window=True, has_softcap=True, head_size=576, value_size=512)
    assert KERNELS[-1].name == "math"
    assert KERNELS[-1].runs_on("anything") and KERNELS[-1].refuses(everything) is None


def test_auto_takes_the_fastest_that_can_and_says_why_not_the_others() -> None:
    entry, reason = choose_kernel("auto", demand())
    assert entry.name == "sdpa"
    assert "flash_attn: it needs" in reason
    entry, reason = choose_kernel("auto", demand(has_softcap=True))
    assert entry.name == "math"
    assert "sdpa: it has no soft-capping" in reason


def test_a_kernel_that_cannot_do_what_a_layer_asks_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"model.attention='sdpa' can't be used: it has no soft-capping; use auto or math"
    ):
        choose_kernel("sdpa", demand(has_softcap=True))


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3", "varlen", "cudnn"])
def test_a_kernel_of_another_machine_is_refused(name: str) -> None:
    match = rf"model.attention='{name}' can't be used: it needs .*, and this device is cpu; use auto or sdpa, math"
    with pytest.raises(UserError, match=match):
        choose_kernel(name, demand())


def test_a_kernel_that_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match=r"model.attention='fast' is unknown; use auto, flash_attn_3, .*, math"):
        choose_kernel("fast", demand())
