"""Our attention layer beside DeepSpeed's ``UlyssesSPAttentionHF``, in one run over gloo processes on CPU.

Timed is what lies between the projected queries, keys and values ``[B, H, L, D]`` and the attention output
``[B, L, H D]``, forward and backward, under gradient checkpointing: once with the real kernel and once with the kernel
replaced by a stub that only writes its results, since on a CPU the kernel hides the exchange. Legend: B rows, L tokens
of a rank's slice, S tokens of a row, H query heads, h of this rank, K KV heads, D head size.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from benchmarks.runner import MIB, NOT_MEASURED, Benchmark, Record, columns, header, main, say
from ray_ulysses.attention import ring
from ray_ulysses.attention.batch import MODEL_INPUT
from ray_ulysses.attention.documents import pack_documents
from ray_ulysses.attention.kernels import KernelCall, KernelEntry
from ray_ulysses.attention.kernels.call import Gradients, Whole
from ray_ulysses.attention.recompute import checkpoint_contexts
from ray_ulysses.attention.ulysses import AttentionContext, set_window, ulysses_attention
from tests.distributed.harness import run_ranks

HEAD_SIZE = 64
SIDES = ("ours", "theirs")
KINDS = {"exchange": True, "layer": False}
"""Whether the kernel is a stub, by what is timed."""
LINK_BYTES = 64 * 2**20
LINK_REPETITIONS = 9
MEASURED_S = 0.2
"""A timed stretch repeats its step until it lasts about so long."""
TIMEOUT_S = 3600.0

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One size: ``sp`` ranks with ``tokens`` tokens each of one row, query and key-value heads."""

    sp: int
    tokens: int
    heads: int
    kv_heads: int

    def gflop(self) -> float:
        """Return what the kernel computes on the fullest rank, forward and backward, causal, in 10^9 operations."""
        return 7 * (self.sp * self.tokens) ** 2 * HEAD_SIZE * math.ceil(self.heads / self.sp) / 1e9


def inputs(case: Case, rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return this rank's slice of queries, keys, values and the output's gradient, in a model's memory layout."""
    tensors = []
    for seed, heads in enumerate((case.heads, case.kv_heads, case.kv_heads, case.heads)):
        # One seed a rank, so that the reference can make every slice. [B, L, H, D] -> [B, H, L, D], a view.
        random = torch.Generator().manual_seed(1000 * rank + seed)
        slice_BLHD = torch.randn(1, case.tokens, heads, HEAD_SIZE, generator=random).to(dtype)
        tensors.append(slice_BLHD.transpose(1, 2) if seed < 3 else slice_BLHD.flatten(2))
    return [*(t.requires_grad_() for t in tensors[:3]), tensors[3]]


def ours(case: Case, lengths: list[int], group: dist.ProcessGroup) -> Layer:
    """Return our layer as Transformers calls it."""
    context = AttentionContext(
        documents=pack_documents([lengths], case.sp * case.tokens), kernel="auto", local_tokens=case.tokens,
        ulysses=group.group_name, ulysses_rank=group.rank(), ulysses_size=group.size(), ring="", head_groups=1,
        announce=lambda demand: None,
    )  # fmt: skip
    module, keywords = torch.nn.Module(), cast("dict[str, Any]", {MODEL_INPUT: context})
    set_window(module, None)

    def layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out_BLHE, _ = ulysses_attention(module, query, key, value, None, **keywords)
        return out_BLHE.flatten(2)

    return layer


def theirs(case: Case, lengths: list[int], group: dist.ProcessGroup, core: Callable[..., Any] | None = None) -> Layer:
    """Return DeepSpeed's layer as its wrapper in Transformers calls it: no mask, positions in a keyword."""
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    attention = UlyssesSPAttentionHF(
        attn=core or sdpa_attention_forward, batch_size=1, attn_head_count=case.heads, attn_head_size=HEAD_SIZE,
        kv_head_count=case.kv_heads, num_hidden_layers=1, process_group=group, seq_length_is_variable=True,
    )  # fmt: skip
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, case.heads // case.kv_heads  # type: ignore[assignment]
    positions_1S = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    positions_1L = positions_1S[:, group.rank() * case.tokens :][:, : case.tokens].contiguous()

    def layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attention(module, query, key, value, None, position_ids=positions_1L)[0]
        return out

    return layer


def _stub_forward(call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output and a log-sum-exp of the right shapes."""
    query = call.query_THD
    return torch.ones(query.shape), torch.ones(query.shape[1], query.shape[0])


def _stub_backward(call: KernelCall, whole: Whole, into: Callable[[], Gradients] | None = None) -> Gradients:
    """Write gradients in place, as flash-attn does."""
    assert into is not None
    grads = into()
    for grad in grads:
        grad.fill_(1.0)
    return grads


class _StubCore(torch.autograd.Function):
    """The same for theirs: it writes as much, keeps as much and uses torch's memory layout, tokens before heads."""

    @staticmethod
    def forward(ctx: Any, query_BhSD: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows, heads, tokens, size = query_BhSD.shape
        out_BShD = torch.ones(rows, tokens, heads, size)
        ctx.save_for_backward(query_BhSD, key, value, out_BShD, torch.ones(rows, heads, tokens))
        return out_BShD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = (tensor.transpose(1, 2).shape for tensor in ctx.saved_tensors[:3])
        return tuple(torch.ones(shape).transpose(1, 2) for shape in kept)


def stub_core(_: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **kw: Any) -> Any:
    """Stand in for Transformers' attention function."""
    return _StubCore.apply(query, key, value), None  # type: ignore[no-untyped-call]


@contextmanager
def stubbed() -> Iterator[None]:
    """Give our layer the stub for a kernel."""
    entry = KernelEntry(
        name="stub", needs="", runs_on=lambda device_type: True, refuses=lambda demand: None, forward=_stub_forward,
        backward=_stub_backward,
    )  # fmt: skip
    with mock.patch.object(ring, "choose_kernel", return_value=(entry, "stub")):
        yield


def build(side: str, case: Case, lengths: list[int], group: dist.ProcessGroup, stub: bool) -> Layer:
    """Return a layer of a side."""
    if side == "ours":
        return ours(case, lengths, group)
    return theirs(case, lengths, group, stub_core if stub else None)


def checkpointed(side: str, layer: Layer) -> Layer:
    """Return a layer under gradient checkpointing, as users train: ours keeps its output, as it does by default.

    What follows the layer in a decoder needs its output in the backward pass, so that all of it is computed again;
    a square stands for that on both sides.
    """
    context = checkpoint_contexts("both") if side == "ours" else None
    options: dict[str, Any] = {"use_reentrant": False} | ({} if context is None else {"context_fn": context})

    def used(*qkv: torch.Tensor) -> torch.Tensor:
        return layer(*qkv).square()

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(used, query, key, value, **options)
        return out

    return run


def step(layer: Layer, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run forward and backward; return the output and the three gradients."""
    out = layer(*tensors[:3])
    return [out.detach(), *torch.autograd.grad(out, tensors[:3], tensors[3])]


def reference(case: Case, lengths: list[int]) -> list[torch.Tensor]:
    """Return the output ``[1, S, H D]`` and the gradients in fp64, from one process, each document by itself."""
    slices = [inputs(case, rank, torch.float64) for rank in range(case.sp)]
    query, key, value = (torch.cat([s[i].detach() for s in slices], dim=2).requires_grad_() for i in range(3))
    outs, group = [], torch.arange(case.heads) // (case.heads // case.kv_heads)
    for q, k, v in zip(*(whole.split(lengths, dim=2) for whole in (query, key, value)), strict=True):
        scores = q @ k[:, group].transpose(2, 3) * HEAD_SIZE**-0.5
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        outs.append(scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v[:, group])
    out = torch.cat(outs, dim=2).transpose(1, 2).flatten(2)
    upstream = torch.cat([s[3] for s in slices], dim=1)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), upstream)]


@contextmanager
def counting(counts: dict[str, float]) -> Iterator[None]:
    """Count collectives and the bytes that this rank sends to others, by wrapping torch.distributed."""

    def add(sent: float) -> None:
        counts["collectives"] = counts.get("collectives", 0) + 1
        counts["bytes"] = counts.get("bytes", 0) + sent

    def wrap(name: str, sent: Callable[[dist.ProcessGroup, tuple[Any, ...], dict[str, Any]], float]) -> Any:
        real = getattr(dist, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            add(sent(kwargs.get("group") or _group(), args, kwargs))
            return real(*args, **kwargs)

        return mock.patch.object(dist, name, called)

    with ExitStack() as stack:
        stack.enter_context(wrap("all_to_all_single", _all_to_all_bytes))
        stack.enter_context(wrap("batch_isend_irecv", lambda group, args, kwargs: _sent_bytes(args[0])))
        stack.enter_context(
            wrap("all_gather", lambda group, args, kwargs: (group.size() - 1) * _tensor(1, args, kwargs).nbytes)
        )
        for name in ("all_to_all", "all_reduce", "all_gather_into_tensor", "broadcast"):
            # Neither side uses these here; a figure would be wrong, so that a change must be noticed.
            stack.enter_context(mock.patch.object(dist, name, mock.Mock(side_effect=AssertionError(name))))
        yield


def _group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _tensor(place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = args[place] if len(args) > place else kwargs["input" if "input" in kwargs else "tensor"]
    return found


def _sent_bytes(operations: Sequence[dist.P2POp]) -> float:
    return float(sum(one.tensor.nbytes for one in operations if one.op is dist.isend))


def _all_to_all_bytes(group: dist.ProcessGroup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    sent = _tensor(1, args, kwargs)
    sizes = args[3] if len(args) > 3 else kwargs.get("input_split_sizes")
    if not sizes:
        return float(sent.nbytes * (group.size() - 1) / group.size())
    return float(sent.nbytes * (1 - sizes[group.rank()] / sum(sizes)))


def count_rank(rank: int, _: int, side: str, case: Case) -> dict[str, dict[str, float]]:
    """Return collectives and bytes of forward and of backward."""
    tensors, group = inputs(case, rank), _group()
    layer = build(side, case, [case.sp * case.tokens], group, True)
    with stubbed():
        forward: dict[str, float] = {}
        backward: dict[str, float] = {}
        with counting(forward):
            out = layer(*tensors[:3])
        with counting(backward):
            torch.autograd.grad(out, tensors[:3], tensors[3])
    return {"forward": forward, "backward": backward}


def time_rank(rank: int, _: int, case: Case, stub: bool, repetitions: int) -> list[list[float]]:
    """Return ``[ours, theirs, ours, theirs]`` of each pair: wall seconds, then this rank's CPU seconds.

    The order of the two sides changes from pair to pair.
    """
    tensors, group = inputs(case, rank), _group()
    layers = [checkpointed(side, build(side, case, [case.sp * case.tokens], group, stub)) for side in SIDES]
    pairs = []
    with stubbed() if stub else ExitStack():
        warm = max(_seconds(layer, tensors, 1)[0] for layer in layers for _ in range(2))
        slowest_rank = torch.tensor([warm])
        dist.all_reduce(slowest_rank, op=dist.ReduceOp.MAX)
        inner = max(1, min(40, math.ceil(MEASURED_S / slowest_rank.item())))
        for repetition in range(repetitions):
            pair = [0.0] * 4
            for side in (0, 1) if repetition % 2 == 0 else (1, 0):
                pair[side], pair[side + 2] = _seconds(layers[side], tensors, inner)
            pairs.append(pair)
    return pairs


def _seconds(layer: Layer, tensors: list[torch.Tensor], inner: int) -> tuple[float, float]:
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(inner):
        step(layer, tensors)
    return (time.perf_counter() - start) / inner, (time.process_time() - cpu_start) / inner


def link_rank(rank: int, size: int) -> list[float]:
    """Return this rank's seconds of bare all-to-alls of big buffers."""
    sent, received = torch.ones(LINK_BYTES // 4), torch.empty(LINK_BYTES // 4)
    seconds = []
    for _ in range(LINK_REPETITIONS + 1):
        dist.barrier()
        start = time.perf_counter()
        dist.all_to_all_single(received, sent)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def error_rank(rank: int, _: int, side: str, case: Case, lengths: list[int]) -> list[tuple[float, float]]:
    """Return ``(|difference|^2, |reference|^2)`` of the output and of the gradients of q, k and v."""
    found = step(build(side, case, lengths, _group(), False), inputs(case, rank))
    places = slice(rank * case.tokens, (rank + 1) * case.tokens)
    wanted = [part[:, places] if part.dim() == 3 else part[:, :, places] for part in reference(case, lengths)]
    pairs = zip(found, wanted, strict=True)
    return [((part.double() - ref).square().sum().item(), ref.square().sum().item()) for part, ref in pairs]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the link, and each case in pairs."""
    link = {}
    for sp in options.sp:
        seconds = sorted(max(times) for times in zip(*run_ranks(link_rank, sp), strict=True))
        link[sp] = LINK_BYTES * (sp - 1) / sp / median(seconds)
    cases = []
    for sp, tokens, heads in itertools.product(options.sp, options.tokens, options.heads):
        query_heads, kv_heads = map(int, heads.split("/"))
        case = Case(sp=sp, tokens=tokens, heads=query_heads, kv_heads=kv_heads)
        traffic = {side: run_ranks(count_rank, sp, side, case)[0] for side in SIDES}
        bound_s = sum(phase["bytes"] for phase in traffic["ours"].values()) / link[sp]
        found: dict[str, Any] = {**asdict(case), "traffic": traffic, "bound_s": bound_s, "times": {}}
        for kind, stub in KINDS.items():
            if stub or case.gflop() <= options.max_gflop:
                ranks = run_ranks(time_rank, sp, case, stub, options.repetitions, timeout_s=TIMEOUT_S)
                found["times"][kind] = slowest(ranks)
                say(f"{kind} {found['sp']}, {tokens}: theirs/ours {spread_of(found['times'][kind], 0)}")
        cases.append(found)
    return {"link": link, "cases": cases, "errors": [error for sp in options.sp for error in _errors(sp)]}


def _errors(sp: int) -> Iterator[dict[str, Any]]:
    for heads, kv_heads in ((8, 2), (6, 3)):
        case = Case(sp=sp, tokens=128, heads=heads, kv_heads=kv_heads)
        total = sp * case.tokens
        packed = [total // 2 + 3, total // 4 - 1, total - (total // 2 + 3) - (total // 4 - 1)]
        for row, lengths in (("one document", [total]), ("3 packed documents", packed)):
            for side in SIDES:
                result: dict[str, Any] = {**asdict(case), "row": row, "side": side, "errors": None}
                try:
                    result["errors"] = relative(run_ranks(error_rank, sp, side, case, lengths))
                except AssertionError as failure:
                    result["failure"] = str(failure).strip().splitlines()[-1]
                yield result


def slowest(ranks: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Return the slowest rank's wall seconds and the mean rank's CPU seconds of each pair.

    Args:
        ranks: Per rank and pair, ``[ours, theirs, ours, theirs]``: wall, then CPU seconds.
    """
    return [
        [*(max(pair[i] for pair in pairs) for i in (0, 1)), *(mean(pair[i] for pair in pairs) for i in (2, 3))]
        for pairs in zip(*ranks, strict=True)
    ]


def spread_of(pairs: Sequence[Sequence[float]], first: int) -> str:
    """Return median, minimum and maximum of theirs/ours; ``first`` is ours' place in a pair."""
    each = [pair[first + 1] / pair[first] for pair in pairs]
    return f"**{median(each):.2f}** ({min(each):.2f} to {max(each):.2f})"


def relative(ranks: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return the norm-wise relative error of each tensor from every rank's ``(|difference|^2, |reference|^2)``."""
    return [
        math.sqrt(sum(part[0] for part in parts) / sum(part[1] for part in parts)) for parts in zip(*ranks, strict=True)
    ]


def _size(case: Record) -> str:
    return f"sp {case['sp']}, {case['tokens']:,} tokens per rank, {case['heads']}/{case['kv_heads']} heads"


def page(record: Record) -> str:
    """Return the page."""
    links = "; ".join(f"sp {sp}: {speed / 1e9:.2f} GB/s sent per rank" for sp, speed in record["link"].items())
    text = (
        f"fp32, one row, heads of {HEAD_SIZE}. A ratio is theirs/ours of pairs that alternate on the same tensors "
        "(above 1: ours is better): median, minimum and maximum; a time is the slowest rank's, CPU time the mean "
        "rank's. **Bound**: our layer's bytes at the speed of bare `all_to_all_single` calls of 64 MiB in the same "
        "run. **exchange**: the kernel is a stub; **layer**: torch's fused SDPA on both sides. Timed are forward, "
        f"recomputation and backward, ours with its attention output kept (the default). Link: {links}."
    )
    lines = [(case, kind) for kind in KINDS for case in record["cases"]]

    def seconds(side: int) -> Callable[[Any], str]:
        def cell(line: tuple[Record, str]) -> str:
            pairs = line[0]["times"].get(line[1])
            return f"{1e3 * median(pair[side] for pair in pairs):.1f} ms" if pairs else NOT_MEASURED

        return cell

    def ratio(first: int) -> Callable[[Any], str]:
        return lambda line: spread_of(line[0]["times"][line[1]], first) if line[1] in line[0]["times"] else ""

    def traffic(side: str, name: str, unit: float, form: str) -> Callable[[Record], str]:
        return lambda case: " + ".join(form.format(phase[name] / unit) for phase in case["traffic"][side].values())

    times = columns(
        lines,
        what=lambda line: line[1],
        size=lambda line: _size(line[0]),
        ours=seconds(0),
        theirs=seconds(1),
        ratio=ratio(0),
        CPU_time_ratio=ratio(2),
        bound=lambda line: f"{line[0]['bound_s'] * 1e3:.1f} ms",
    )
    sent = columns(
        record["cases"],
        size=_size,
        collectives=traffic("ours", "collectives", 1, "{:.0f}"),
        theirs=traffic("theirs", "collectives", 1, "{:.0f}"),
        MiB_sent=traffic("ours", "bytes", MIB, "{:.2f}"),
        theirs_=traffic("theirs", "bytes", MIB, "{:.2f}"),
    )
    errors = columns(
        record["errors"],
        size=_size,
        row=lambda one: one["row"],
        side=lambda one: one["side"],
        output_and_gradients_of_q_k_v=lambda one: (
            ", ".join(f"{error:.1e}" for error in one["errors"] or []) or one["failure"]
        ),
    )
    parts = ["## Collectives and bytes of rank 0, forward + backward", sent]
    parts += ["## Error against one process in fp64, norm-wise, each document by itself", errors]
    title = "Attention layer on CPU: ours beside DeepSpeed's UlyssesSPAttentionHF"
    return "\n\n".join([header(title, record, text), times, *parts])


BENCHMARK = Benchmark(
    name="attention_cpu",
    about="Our attention layer beside DeepSpeed's, in one run over gloo processes on CPU.",
    measure=measure,
    page=page,
    packages=("torch", "deepspeed", "transformers"),
    hardware="one thread per rank, gloo over loopback",
    options={
        "sp": ([2, 4], "sp sizes"),
        "tokens": ([512, 2048, 8192], "tokens per rank"),
        "heads": (["8/2", "32/8"], "query/key-value heads"),
        "repetitions": (15, "pairs of runs of a case"),
        "max_gflop": (500.0, "leave out the real kernel above so much work per rank"),
    },
    quick={"sp": [2], "tokens": [512], "heads": ["8/2"], "repetitions": 3},
)

if __name__ == "__main__":
    main(BENCHMARK)
