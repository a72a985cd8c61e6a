"""The GPU kernels in bf16 against attention by its definition in fp64, forward and backward.

Legend: see ``kernels/call.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from ray_ulysses.attention.kernels import KERNELS, Demand, KernelCall, KernelEntry, Spans, choose_kernel, cudnn
from ray_ulysses.attention.kernels.call import Whole
from ray_ulysses.attention.kernels.cudnn import CUDNN
from ray_ulysses.attention.kernels.math import MATH
from ray_ulysses.attention.kernels.reference import attention_by_definition
from ray_ulysses.attention.kernels.table import by_speed

# bf16 has 8 bits of mantissa: 2**-8 of rounding in Q, K, V and P each, norm-wise a tensor. The oracle is given the
# same rounded inputs, so what is left is the kernel's own rounding.
BOUND = 1e-2
# The log-sum-exp is summed in fp32 over exact products of bf16; a cap goes through the GPU's own tanh (2**-11).
LSE_BOUND, CAPPED_LSE_BOUND = 1e-3, 2e-2
HEADS, KV_HEADS = 8, 2

CASES: dict[str, dict[str, Any]] = {
    "dense": {"tokens": 1024},
    "odd-length": {"tokens": 1087},
    "packed": {"spans": [700, 1, 1300, 64, 448, 2]},
    "window": {"tokens": 2048, "left": 127},
    "wide-window": {"spans": [300, 200], "left": 299},
    "packed-softcap-window": {"spans": [500, 1, 300], "softcap": 5.0, "left": 99},
    "head-80": {"spans": [500, 300], "sizes": (80, 80)},
    "head-256-window": {"spans": [500, 300], "sizes": (256, 256), "left": 64},
    "values-smaller": {"spans": [500, 300], "sizes": (96, 64)},
    "latent-attention": {"spans": [500, 300], "sizes": (192, 128)},
    "odd-head": {"spans": [500, 300], "sizes": (60, 60)},
}


WAYS = [(entry, None) for entry in KERNELS] + [(CUDNN, 0.0), (CUDNN, 8 * 400.0**2)]
"""Each kernel; cuDNN also for every document, and for those of 400 tokens and more."""


@pytest.fixture(params=WAYS, ids=lambda way: way[0].name if way[1] is None else f"{way[0].name}-from-{way[1]:g}")
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KernelEntry:
    entry: KernelEntry = request.param[0]
    if request.param[1] is not None:
        monkeypatch.setattr(cudnn, "_LEAST_WORK", request.param[1])
    if not torch.cuda.is_available() or not entry.runs_on("cuda"):
        pytest.skip(f"{entry.name} needs {entry.needs}")
    torch.cuda.init()
    return entry


def demand(sizes: tuple[int, int] = (64, 64), dtype: torch.dtype = torch.bfloat16, **asked: Any) -> Demand:
    return Demand(device_type="cuda", dtype=dtype, head_size=sizes[0], value_size=sizes[1], **asked)


def skip_if_refused(entry: KernelEntry, call: KernelCall) -> None:
    sizes = (call.query_THD.shape[2], call.value_UKE.shape[2])
    asked = {"has_window": call.left is not None, "has_softcap": call.softcap is not None}
    refusal = entry.refuses(demand(sizes, call.query_THD.dtype, **asked))
    if refusal is not None:
        pytest.skip(f"{entry.name}: {refusal}")


def make_inputs(
    num_queries: int, num_keys: int, sizes: tuple[int, int] = (64, 64), heads: tuple[int, int] = (HEADS, KV_HEADS)
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_queries, heads[0], sizes[0]), (num_keys, heads[1], sizes[0]), (num_keys, heads[1], sizes[1])]
    wide = [torch.randn(t, 8 + h * d, generator=generator).to("cuda", torch.bfloat16) for t, h, d in shapes]
    parts = [t[:, 8:].unflatten(1, (h, d)) for t, (_, h, d) in zip(wide, shapes, strict=True)]
    upstream = torch.randn(num_queries, heads[0], sizes[1], generator=generator)
    return [*parts, upstream.to("cuda", torch.bfloat16)]


def spans_of(lengths: Sequence[int]) -> Spans:
    borders = (0, *accumulate(lengths))
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device="cuda")
    return Spans(cu_seqlens=cu_seqlens, borders=borders, max_seqlen=max(lengths))


def make_call(inputs: Sequence[torch.Tensor], **options: Any) -> KernelCall:
    q, k, v = inputs[:3]
    settings = {"spans": None, "scale": q.shape[2] ** -0.5, "causal": True, **options}
    return KernelCall(query_THD=q, key_UKD=k, value_UKE=v, **settings)


def visible_of(call: KernelCall) -> torch.Tensor:
    visible = torch.zeros(call.query_THD.shape[0], call.key_UKD.shape[0], dtype=torch.bool, device="cuda")
    for query, key in call.each_span():
        t, u = query.stop - query.start, key.stop - key.start
        inside = torch.ones(t, u, dtype=torch.bool, device="cuda")
        inside = inside.tril(u - t) if call.causal else inside
        visible[query, key] = inside if call.left is None else inside.triu(u - t - call.left)
    return visible


def wanted_of(inputs: Sequence[torch.Tensor], call: KernelCall, visible: torch.Tensor) -> list[torch.Tensor]:
    leaves = [tensor.detach().double().requires_grad_() for tensor in inputs[:3]]
    out = attention_by_definition(*leaves, visible, call.scale, call.softcap)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].double())]


def wanted_lse(call: KernelCall, visible: torch.Tensor) -> torch.Tensor:
    keys = call.key_UKD.double().repeat_interleave(call.query_THD.shape[1] // call.key_UKD.shape[1], dim=1)
    scores = torch.einsum("thd,uhd->htu", call.query_THD.double(), keys) * call.scale
    scores = scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)
    return scores.masked_fill(~visible, float("-inf")).logsumexp(dim=-1)


def run(entry: KernelEntry, call: KernelCall, upstream: torch.Tensor) -> list[torch.Tensor]:
    out, lse = entry.forward(call)
    assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    return [out, *entry.backward(call, Whole(upstream, out, lse))]


def assert_close(ours: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    whole = max(float(tensor.double().norm()) for tensor in wanted)
    for name, a, b in zip(("output", "dQ", "dK", "dV"), ours, wanted, strict=True):
        assert a.shape == b.shape, name
        assert torch.isfinite(a).all(), name
        # Attention over one token has no gradient to Q and K: such a tensor is held against the whole.
        norm = float(b.double().norm())
        error = float((a.double() - b.double()).norm()) / (norm if norm > 1e-3 * whole else whole)
        assert error <= BOUND, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_kernel_equals_the_definition_forward_and_backward(kernel: KernelEntry, case: dict[str, Any]) -> None:
    options = dict(case)
    lengths, sizes = options.pop("spans", None), options.pop("sizes", (64, 64))
    tokens = options.pop("tokens", None) or sum(lengths)
    inputs = make_inputs(tokens, tokens, sizes)
    call = make_call(inputs, spans=None if lengths is None else spans_of(lengths), **options)
    skip_if_refused(kernel, call)
    visible = visible_of(call)
    assert_close(run(kernel, call, inputs[3]), wanted_of(inputs, call, visible))
    _, lse = kernel.forward(call)
    bound = LSE_BOUND if call.softcap is None else CAPPED_LSE_BOUND
    assert float((lse - wanted_lse(call, visible)).abs().max()) <= bound


@pytest.mark.parametrize("tokens", [64, 1088])
@pytest.mark.parametrize("left", [None, 99])
def test_sequences_of_multiples_of_128_plus_64_have_finite_gradients(
    kernel: KernelEntry, tokens: int, left: int | None
) -> None:
    """pytorch#196678: cuDNN with a mask gives NaN in dQ there."""
    inputs = make_inputs(tokens, tokens)
    call = make_call(inputs, left=left)
    skip_if_refused(kernel, call)
    assert_close(run(kernel, call, inputs[3]), wanted_of(inputs, call, visible_of(call)))


@pytest.mark.parametrize("lengths", [(512, 512), (300, 77), (1, 300), (64, 1500)], ids=str)
def test_parts_of_a_softmax_add_up_to_the_whole(kernel: KernelEntry, lengths: tuple[int, int]) -> None:
    """A ring's rank: its own square, and a rectangle of earlier keys, each with the whole's log-sum-exp."""
    num_queries, num_before = lengths
    q, k, v, upstream = make_inputs(num_queries, num_queries + num_before)
    before, after = slice(0, num_before), slice(num_before, None)
    square, rectangle = make_call([q, k[after], v[after]]), make_call([q, k[before], v[before]], causal=False)
    skip_if_refused(kernel, square)
    parts = [kernel.forward(part) for part in (square, rectangle)]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    shares = [part.float() * (part_lse - lse).exp().transpose(0, 1).unsqueeze(-1) for part, part_lse in parts]
    out = (shares[0] + shares[1]).to(q.dtype)
    first, second = (kernel.backward(part, Whole(upstream, out, lse)) for part in (square, rectangle))
    ours = [out, first[0].float() + second[0].float()]
    ours += [torch.cat([b, a]) for a, b in zip(first[1:], second[1:], strict=True)]
    whole = make_call([q, k, v])
    assert_close(ours, wanted_of([q, k, v, upstream], whole, visible_of(whole)))


def test_a_window_that_reaches_into_earlier_keys_sees_exactly_its_part(kernel: KernelEntry) -> None:
    """A ring's rectangle with a window: all queries see the last keys, fewer and fewer of the earlier ones."""
    inputs = make_inputs(200, 260)
    call = make_call(inputs, causal=False, left=230)
    skip_if_refused(kernel, call)
    assert_close(run(kernel, call, inputs[3]), wanted_of(inputs, call, visible_of(call)))


@pytest.mark.parametrize("left", [None, 127])
def test_no_token_sees_another_document_bitwise(kernel: KernelEntry, left: int | None) -> None:
    inputs = make_inputs(1024, 1024)
    call = make_call(inputs, spans=spans_of([500, 300, 224]), left=left)
    skip_if_refused(kernel, call)
    changed = [tensor.clone() for tensor in inputs[:3]]
    for tensor in changed:
        tensor[500:800] += 1
    other = replace(call, query_THD=changed[0], key_UKD=changed[1], value_UKE=changed[2])
    # Same strides for both: kernels may choose another tiling for others.
    call = replace(call, query_THD=inputs[0].clone(), key_UKD=inputs[1].clone(), value_UKE=inputs[2].clone())
    for ours, theirs in zip(kernel.forward(call), kernel.forward(other), strict=True):
        tokens_first = (ours, theirs) if ours.dim() == 3 else (ours.T, theirs.T)
        a, b = tokens_first
        assert torch.equal(a[:500], b[:500]) and torch.equal(a[800:], b[800:])
        assert not torch.equal(a[500:800], b[500:800])


@pytest.mark.parametrize("lengths", [[2048], [700, 1, 1000, 347]], ids=str)
def test_gradients_are_written_into_views_of_one_payload(kernel: KernelEntry, lengths: list[int]) -> None:
    """As they are with several ranks, where one exchange sends all three."""
    tokens = sum(lengths)
    inputs = make_inputs(tokens, tokens)
    call = make_call(inputs, spans=spans_of(lengths))
    skip_if_refused(kernel, call)
    payload = torch.empty(tokens, sum(one[0].numel() for one in inputs[:3]), dtype=torch.bfloat16, device="cuda")
    parts = payload.split([one[0].numel() for one in inputs[:3]], dim=1)
    views = tuple(part.unflatten(1, one.shape[1:]) for part, one in zip(parts, inputs, strict=False))
    out, lse = kernel.forward(call)
    whole = Whole(inputs[3], out, lse)
    for ours, wanted in zip(kernel.backward(call, whole, lambda: views), kernel.backward(call, whole), strict=True):
        assert float((ours.double() - wanted.double()).norm()) <= 1e-2 * float(wanted.double().norm())


@pytest.mark.parametrize("tokens", [131_072])
@pytest.mark.parametrize("left", [None, 4095])
def test_long_rows_equal_the_math_kernel_and_the_definition_at_their_end(
    kernel: KernelEntry, tokens: int, left: int | None
) -> None:
    """pytorch#162588: torch's memory-efficient kernel, which is never used here, is silently wrong past 65,536."""
    if kernel is MATH:
        pytest.skip("the others are held against it")
    inputs = make_inputs(tokens, tokens, (128, 128), (2, 1))
    call = make_call(inputs, spans=spans_of([tokens - 560, 560]), left=left)
    skip_if_refused(kernel, call)
    ours = run(kernel, call, inputs[3])
    assert_close(ours, run(MATH, call, inputs[3]))
    # The last tokens of the long document by the definition: they see everything before them, or their window.
    last, keys = slice(tokens - 570, tokens - 560), slice(0, tokens - 560)
    q, k, v = (tensor[part].double() for tensor, part in zip(inputs[:3], (last, keys, keys), strict=True))
    end = make_call([q, k, v], left=left)
    wanted = attention_by_definition(q, k, v, visible_of(end), end.scale)
    error = float((ours[0][last].double() - wanted).norm() / wanted.norm())
    assert error <= BOUND, f"the last tokens are off by {error:.1e}"


def test_auto_takes_the_first_of_the_table_that_can_do_a_layer_exactly() -> None:
    torch.cuda.init()
    for asked in (demand(), demand(has_window=True), demand(has_softcap=True), demand((256, 256))):
        able = [entry for entry in by_speed() if entry.runs_on("cuda") and entry.refuses(asked) is None]
        assert choose_kernel("auto", asked)[0] is able[0]
    assert choose_kernel("auto", demand())[0] is not MATH
    assert choose_kernel("auto", demand(has_window=True))[0] is not MATH
    assert choose_kernel("auto", demand(dtype=torch.float32))[0] is MATH
