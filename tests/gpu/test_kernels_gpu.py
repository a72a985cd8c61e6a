"""The GPU kernels in bf16 against attention by its definition in fp64, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ray_ulysses.attention.documents import PackedDocuments, pack_documents
from ray_ulysses.attention.kernels import KERNELS, KernelEntry, choose_kernel, reference, sdpa, varlen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
# bf16 has 8 bits of mantissa: 2**-8 of rounding in Q, K, V and P each, norm-wise a tensor. The oracle is given the
# same rounded inputs, so what is left is the kernel's own rounding.
BOUND = 1e-2
HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 64

CASES: dict[str, tuple[list[list[int]], int, int | None]] = {
    "one-document": ([[1024]], 1024, None),
    "odd-length": ([[1087]], 1087, None),
    "packed": ([[700, 1, 1300, 64, 448]], 2560, None),
    "padded": ([[900, 500]], 1536, None),
    "two-rows": ([[1000, 24], [512]], 1024, None),
    "window": ([[2048]], 2048, 128),
    "packed-window": ([[1500, 3, 600]], 2112, 256),
}


@pytest.fixture(params=[entry.name for entry in KERNELS])
def kernel(request: pytest.FixtureRequest) -> KernelEntry:
    entry = next(entry for entry in KERNELS if entry.name == request.param)
    if not torch.cuda.is_available() or not entry.usable("cuda", torch.bfloat16):
        pytest.skip(f"{entry.name} needs {entry.needs}")
    return entry


def make_inputs(num_rows: int, tokens: int, heads: int, kv_heads: int, seed: int = 0) -> list[torch.Tensor]:
    """Return bf16 Q, K and V and an upstream gradient, drawn on the host."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, HEAD_SIZE), (kv_heads, HEAD_SIZE), (kv_heads, HEAD_SIZE), (heads, HEAD_SIZE)]
    return [torch.randn(num_rows, tokens, *shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes]


def outputs(
    kernel: Any, inputs: Sequence[torch.Tensor], dtype: torch.dtype, documents: PackedDocuments, window: int | None
) -> list[torch.Tensor]:
    """Return the output and the gradients of Q, K and V."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs[:3]]
    out = kernel(*leaves, documents, HEAD_SIZE**-0.5, window)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].to(dtype))]


def assert_close(ours: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for name, a, b in zip(("output", "dQ", "dK", "dV"), ours, wanted, strict=True):
        assert torch.isfinite(a).all(), name
        error = float((a.double() - b.double()).norm() / b.double().norm())
        assert error <= BOUND, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize(("lengths", "tokens", "window"), CASES.values(), ids=CASES.keys())
def test_a_kernel_equals_the_definition_forward_and_backward(
    kernel: KernelEntry, lengths: list[list[int]], tokens: int, window: int | None
) -> None:
    documents = pack_documents(lengths, tokens, "cuda")
    inputs = make_inputs(len(lengths), tokens, HEADS, KV_HEADS)
    wanted = outputs(reference, inputs, torch.float64, documents, window)
    assert_close(outputs(kernel.run, inputs, torch.bfloat16, documents, window), wanted)


def test_sequences_of_multiples_of_128_plus_64_have_finite_gradients(kernel: KernelEntry) -> None:
    """pytorch#196678: cuDNN with a mask gives NaN in dQ there."""
    for tokens in (64, 192, 1088):
        documents = pack_documents([[tokens]], tokens, "cuda")
        inputs = make_inputs(1, tokens, HEADS, KV_HEADS)
        wanted = outputs(reference, inputs, torch.float64, documents, 100)
        assert_close(outputs(kernel.run, inputs, torch.bfloat16, documents, 100), wanted)


def test_no_token_sees_another_document_bitwise(kernel: KernelEntry) -> None:
    documents = pack_documents([[500, 300, 224]], 1024, "cuda")
    inputs = make_inputs(1, 1024, HEADS, KV_HEADS)
    changed = [tensor.clone() for tensor in inputs[:3]]
    for tensor in changed:
        tensor[:, 500:800] += 1
    ours, theirs = (kernel.run(*three, documents, 0.125, None) for three in (inputs[:3], changed))
    assert torch.equal(ours[:, :500], theirs[:, :500])
    assert torch.equal(ours[:, 800:], theirs[:, 800:])


def test_sdpa_and_varlen_agree_beyond_65536_tokens() -> None:
    """pytorch#162588: the memory-efficient kernel, which is never used here, is silently wrong from there on."""
    tokens = 66_560
    documents = pack_documents([[66_000, 560]], tokens, "cuda")
    inputs = make_inputs(1, tokens, 2, 1)
    ours = outputs(sdpa, inputs, torch.bfloat16, documents, None)
    theirs = outputs(varlen, inputs, torch.bfloat16, documents, None)
    assert_close(ours, theirs)
    # The last tokens by the definition: they see everything before them.
    q, k, v = (tensor.double() for tensor in inputs[:3])
    last = slice(65_990, 66_000)
    scores = torch.einsum("qhd,kd->hqk", q[0, last], k[0, :66_000, 0]) * HEAD_SIZE**-0.5
    hidden = torch.arange(66_000, device="cuda")[None] > torch.arange(65_990, 66_000, device="cuda")[:, None]
    wanted = torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v[0, :66_000, 0])
    error = float((ours[0][0, last].double() - wanted).norm() / wanted.norm())
    assert error <= BOUND, f"the last tokens are off by {error:.1e}"


def test_auto_takes_the_first_of_the_table_that_can_run() -> None:
    usable = [entry for entry in KERNELS if entry.usable("cuda", torch.bfloat16)]
    assert choose_kernel("auto", "cuda", torch.bfloat16) is usable[0]
    assert choose_kernel("auto", "cuda", torch.float32).name == "sdpa"
