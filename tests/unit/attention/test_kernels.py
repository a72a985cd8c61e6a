"""Every kernel that runs on a CPU against attention by its definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.attention import kernels
from ray_ulysses.attention.documents import pack_documents
from ray_ulysses.attention.kernels import choose_kernel, reference, sdpa
from ray_ulysses.errors import UserError

# fp32 against fp64, norm-wise a tensor: law 1's floor. One softmax reduces over at most a row.
BOUND = 1e-5


def forward_and_gradients(
    kernel: Any, inputs: Sequence[torch.Tensor], dtype: torch.dtype, *args: Any
) -> list[torch.Tensor]:
    """Return a kernel's output and the gradients of Q, K and V under one fixed upstream gradient."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    out = kernel(*leaves, *args)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).cos().view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))]


def assert_equals_reference(
    lengths: list[list[int]],
    row_tokens: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 8,
    value_size: int = 8,
    window: int | None = None,
    seed: int = 0,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, head_size), (kv_heads, head_size), (kv_heads, value_size)]
    inputs = [torch.randn(len(lengths), row_tokens, *shape, generator=generator) for shape in shapes]
    args = (pack_documents(lengths, row_tokens), 0.3, window)
    ours = forward_and_gradients(sdpa, inputs, torch.float32, *args)
    wanted = forward_and_gradients(reference, inputs, torch.float64, *args)
    assert ours[0].shape == (len(lengths), row_tokens, heads, value_size)
    whole = max(float(tensor.norm()) for tensor in wanted)
    for name, a, b in zip(("output", "dQ", "dK", "dV"), ours, wanted, strict=True):
        # Attention over one token has no gradient to Q and K: such a tensor is held against the whole.
        scale = float(b.norm()) if float(b.norm()) > 1e-7 * whole else whole
        assert float((a.double() - b).norm()) <= BOUND * scale, name


CASES: dict[str, tuple[list[list[int]], int, dict[str, Any]]] = {
    "one-document": ([[24]], 24, {}),
    "packed": ([[7, 9, 8]], 24, {}),
    "padded": ([[7, 9]], 24, {}),
    "one-token-documents": ([[1, 1, 5, 1]], 8, {}),
    "padding-alone": ([[]], 8, {}),
    "two-rows": ([[5, 6], [11, 1]], 13, {}),
    "whole-heads": ([[7, 9]], 16, {"kv_heads": 4}),
    "one-kv-head": ([[7, 9]], 16, {"kv_heads": 1}),
    "other-v-head-size": ([[7, 9]], 16, {"value_size": 12}),
    "window": ([[7, 9, 2]], 20, {"window": 3}),
    "window-of-one-token": ([[7, 9]], 16, {"window": 1}),
    "window-of-a-document": ([[7, 9]], 16, {"window": 7}),
    "window-wider-than-all": ([[7, 9]], 16, {"window": 100}),
    "window-other-v-head-size": ([[9, 9], [1, 12]], 18, {"window": 4, "value_size": 4, "kv_heads": 1}),
}


@pytest.mark.parametrize(("lengths", "row_tokens", "options"), CASES.values(), ids=CASES.keys())
def test_sdpa_equals_the_definition_forward_and_backward(
    lengths: list[list[int]], row_tokens: int, options: dict[str, Any]
) -> None:
    assert_equals_reference(lengths, row_tokens, **options)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 12), max_size=4), min_size=1, max_size=2),
    padding=st.integers(0, 4),
    groups=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    value_size=st.sampled_from([4, 8]),
    window=st.none() | st.integers(1, 14),
    seed=st.integers(0, 100),
)
def test_sdpa_equals_the_definition_for_any_packing(
    lengths: list[list[int]], padding: int, groups: tuple[int, int], value_size: int, window: int | None, seed: int
) -> None:
    row_tokens = max(1, max(sum(row) for row in lengths) + padding)
    assert_equals_reference(
        lengths, row_tokens, heads=groups[0], kv_heads=groups[1], value_size=value_size, window=window, seed=seed
    )


def test_a_window_over_several_chunks_of_queries_equals_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_WINDOW_CHUNK_TOKENS", 8)
    for window in (1, 3, 8, 9, 20):
        assert_equals_reference([[30, 5], [17, 8]], 36, window=window)


@pytest.mark.parametrize("window", [None, 3])
def test_the_reference_is_a_softmax_over_what_a_token_sees(window: int | None) -> None:
    """The oracle itself, held to loops over tokens."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 7, 2, 4), torch.randn(1, 7, 1, 4), torch.randn(1, 7, 1, 3)
    out = reference(q, k, v, pack_documents([[4, 2]], 7), 0.5, window)
    begins = [0, 0, 0, 0, 4, 4, 6]
    for head in range(2):
        for token, begin in enumerate(begins):
            first = begin if window is None else max(begin, token - window + 1)
            weights = (k[0, first : token + 1, 0] @ q[0, token, head] * 0.5).softmax(0)
            torch.testing.assert_close(out[0, token, head], weights @ v[0, first : token + 1, 0])


def test_the_table_ends_with_the_kernel_that_always_runs() -> None:
    assert kernels.KERNELS[-1].name == "sdpa"
    assert choose_kernel("auto", "cpu", torch.float32).run is sdpa
    assert choose_kernel("sdpa", "cpu", torch.bfloat16).run is sdpa
    assert choose_kernel("varlen", "cuda", torch.bfloat16).name == "varlen"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "text"),
    [
        (
            "flash_attn",
            "cpu",
            torch.bfloat16,
            r"model\.attention='flash_attn' needs a CUDA device, bf16 and the flash-attn package; here the device is "
            r"cpu with torch\.bfloat16: use auto or sdpa",
        ),
        ("varlen", "cpu", torch.bfloat16, r"model\.attention='varlen' needs a CUDA device and bf16; .* auto or sdpa"),
        ("varlen", "cuda", torch.float32, r"needs a CUDA device and bf16; here the device is cuda with torch\.float32"),
    ],
)
def test_a_kernel_that_cannot_run_here_is_refused(name: Any, device: str, dtype: torch.dtype, text: str) -> None:
    with pytest.raises(UserError, match=text):
        choose_kernel(name, device, dtype)
