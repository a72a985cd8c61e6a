"""Every kernel that runs on a CPU against attention by its definition, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.attention.kernels import KERNELS, Demand, KernelEntry, choose_kernel
from ray_ulysses.attention.kernels import math as math_kernel
from ray_ulysses.attention.kernels import sdpa as sdpa_kernel
from ray_ulysses.attention.kernels.call import Whole
from ray_ulysses.attention.kernels.reference import attention_by_definition, visible_tokens
from ray_ulysses.errors import UserError
from tests.breadth import examples
from tests.unit.attention.kernel_case import assert_close, make_call, make_tensors, results_of, spans_of, wanted_of

ON_CPU = [entry for entry in KERNELS if entry.runs_on("cpu")]


def demand(**changes: Any) -> Demand:
    fields: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float32, "head_size": 8, "value_size": 8}
    return Demand(**{**fields, **changes})


@pytest.fixture(params=ON_CPU, ids=lambda entry: entry.name)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KernelEntry:
    """A kernel with blocks so small that every row takes several."""
    monkeypatch.setattr(math_kernel, "_BLOCK_SCORES", 200)
    monkeypatch.setattr(sdpa_kernel, "_WINDOW_BLOCK_TOKENS", 4)
    entry: KernelEntry = request.param
    return entry


LENGTHS: dict[str, list[int]] = {"one-document": [24], "packed": [7, 9, 8], "one-token-documents": [1, 1, 5, 1]}


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_a_kernel_equals_the_definition_forward_and_backward(
    kernel: KernelEntry, lengths: list[int], window: int | None, softcap: float | None, causal: bool
) -> None:
    if kernel.refuses(demand(has_softcap=softcap is not None, is_causal=causal)):
        pytest.skip(f"{kernel.name} does not support soft-capping")
    tensors = make_tensors(sum(lengths), sum(lengths), 8, 8)
    left = None if window is None else window - 1
    sides = {"causal": causal, "left": left, "right": None if causal else left}
    call = make_call(tensors, spans=spans_of(lengths), softcap=softcap, **sides)
    wanted = wanted_of(tensors, visible_tokens(lengths, sum(lengths), window, causal=causal), softcap)
    assert_close(results_of(kernel, call, tensors[3]), wanted)


@pytest.mark.parametrize("value_size", [4, 12], ids=["narrow-v", "wide-v"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
def test_heads_of_every_kind(kernel: KernelEntry, heads: tuple[int, int], value_size: int) -> None:
    lengths = [5, 11]
    tensors = make_tensors(16, 16, 8, value_size, heads, seed=1)
    for window in (None, 4):
        call = make_call(tensors, spans=spans_of(lengths), left=None if window is None else window - 1)
        wanted = wanted_of(tensors, visible_tokens(lengths, 16, window))
        assert_close(results_of(kernel, call, tensors[3]), wanted)


@settings(max_examples=examples(30))
@given(
    num_queries=st.integers(1, 12),
    num_keys=st.integers(1, 12),
    left=st.none() | st.integers(0, 14),
    right=st.none() | st.integers(0, 14),
)
@pytest.mark.parametrize("entry", ON_CPU, ids=lambda entry: entry.name)
def test_a_rectangle_with_a_window_equals_the_definition(
    entry: KernelEntry, num_queries: int, num_keys: int, left: int | None, right: int | None
) -> None:
    at = torch.arange(num_queries).unsqueeze(1) + num_keys - num_queries
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if left is not None:
        visible &= torch.arange(num_keys).unsqueeze(0) >= at - left
    if right is not None:
        visible &= torch.arange(num_keys).unsqueeze(0) <= at + right
    if not visible.any(dim=1).all():
        return
    tensors = make_tensors(num_queries, num_keys, 8, 8, seed=num_queries)
    call = make_call(tensors, causal=False, left=left, right=right)
    assert_close(results_of(entry, call, tensors[3]), wanted_of(tensors, visible))


def test_parts_are_weighted_by_the_log_sum_exp_of_the_whole(kernel: KernelEntry) -> None:
    q, k, v, upstream = make_tensors(6, 10, 8, 8, seed=3)
    wanted = wanted_of([q, k, v, upstream], torch.ones(6, 10, dtype=torch.bool))
    calls = [make_call([q, k[keys], v[keys]], causal=False) for keys in (slice(0, 3), slice(3, 10))]
    parts = [kernel.forward(call) for call in calls]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = torch.stack([o * (part - lse).exp().T.unsqueeze(-1) for o, part in parts]).sum(0)
    first, second = (kernel.backward(call, Whole(upstream.float(), out, lse)) for call in calls)
    assert_close([out, first[0] + second[0], *map(torch.cat, zip(first[1:], second[1:], strict=True))], wanted)


@pytest.mark.parametrize("window", [None, 3])
def test_the_definition_is_a_softmax_over_visible_tokens(window: int | None) -> None:
    """The oracle, compared with loops over tokens."""
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


def test_auto_takes_the_fastest_that_can_and_says_why_not_the_others() -> None:
    for has_softcap, name, text in ((False, "sdpa", "flash_attn: it req"), (True, "math", "sdpa: it does not support")):
        entry, reason = choose_kernel("auto", demand(has_softcap=has_softcap))
        assert entry.name == name and text in reason


@pytest.mark.parametrize(
    ("name", "asked", "text"),
    [
        ("sdpa", {"has_softcap": True}, "'sdpa' .*soft-capping; use auto or math"),
        *((name, {}, f"'{name}' .*it requires .*use auto or sdpa, math") for name in ("flash_attn", "varlen", "cudnn")),
        ("fast", {}, "'fast' is unknown; use auto or one of "),
    ],
    ids=["unable", "flash_attn", "varlen", "cudnn", "unknown"],
)
def test_a_kernel_that_cannot_run_here_is_refused(name: str, asked: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=rf"model\.attention={text}"):
        choose_kernel(name, demand(**asked))
