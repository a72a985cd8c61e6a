"""Our attention layer beside DeepSpeed's ``UlyssesSPAttentionHF``, in one run over gloo processes on CPU.

Timed is what lies between the projected queries, keys and values ``[B, H, L, D]`` and the attention output
``[B, L, H D]``, forward and backward: once with the real kernel and once with the kernel replaced by a stub that only
writes its results, since on a CPU the kernel hides the exchange. Legend: B rows, L tokens of a rank's slice, S tokens
of a row, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.attention_report import SIDES, markdown, relative, slowest, summary_line, write
from benchmarks.attention_sides import HEAD_SIZE, Case, Layer, build, checkpointed, inputs, reference, step, stubbed
from benchmarks.stored_result import RESULTS, provenance, say

KINDS = {
    "exchange, checkpointed": (True, True),
    "layer, checkpointed": (False, True),
    "exchange": (True, False),
    "layer": (False, False),
}
"""What is timed: with the kernel stubbed or real, and under gradient checkpointing or not."""
LINK_BYTES = 64 * 2**20
LINK_REPETITIONS = 9
MEASURED_S = 0.2
"""A timed stretch repeats its step until it lasts about so long."""
TIMEOUT_S = 3600.0
_M_MMAP_THRESHOLD = -3


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


def _all_gather_bytes(group: dist.ProcessGroup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return float((group.size() - 1) * _tensor(1, args, kwargs).nbytes)


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


def time_rank(rank: int, _: int, case: Case, stub: bool, again: bool, repetitions: int) -> list[list[float]]:
    """Return ``[ours, theirs, ours, theirs]`` of each pair: wall seconds, then this rank's CPU seconds.

    The order of the two sides changes from pair to pair. With ``again``, the layer is under gradient checkpointing.
    """
    tensors, group = inputs(case, rank), _group()
    layers = [build(side, case, [case.sp * case.tokens], group, stub) for side in SIDES]
    if again:
        layers = [checkpointed(side, layer) for side, layer in zip(SIDES, layers, strict=True)]
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


def memory_rank(rank: int, _: int, side: str, case: Case, stub: bool) -> float:
    """Return this rank's peak resident bytes in one step, beyond what was there before it.

    Every tensor of 64 KiB and more gets pages of its own, so that what is freed is gone.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)
    tensors, group = inputs(case, rank), _group()
    with stubbed() if stub else ExitStack():
        small = Case(sp=case.sp, tokens=16, heads=case.heads, kv_heads=case.kv_heads)
        step(build(side, small, [small.sp * small.tokens], group, stub), inputs(small, rank))  # Imports, threads.
        layer = build(side, case, [case.sp * case.tokens], group, stub)
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmHWM")
        kept = step(layer, tensors)
        peak = _status("VmHWM") - before
        del kept
    return peak


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return float(line.split()[1]) * 1024
    raise AssertionError(name)


def error_rank(rank: int, _: int, side: str, case: Case, lengths: list[int]) -> list[tuple[float, float]]:
    """Return ``(|difference|^2, |reference|^2)`` of the output and of the gradients of q, k and v."""
    found = step(build(side, case, lengths, _group(), False), inputs(case, rank))
    places = slice(rank * case.tokens, (rank + 1) * case.tokens)
    wanted = [part[:, places] if part.dim() == 3 else part[:, :, places] for part in reference(case, lengths)]
    pairs = zip(found, wanted, strict=True)
    return [((part.double() - ref).square().sum().item(), ref.square().sum().item()) for part, ref in pairs]


class Bench:
    """Runs the parts and gathers their record."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._link: dict[int, float] = {}

    def record(self) -> dict[str, Any]:
        """Measure everything that the options ask for."""
        options = self._options
        for sp in options.sp:
            self._link[sp] = self._link_speed(sp)
            say(f"link, sp {sp}: {self._link[sp] / 1e9:.2f} GB/s sent a rank")
        sizes = itertools.product(options.sp, options.tokens, options.heads)
        cases = [self._case(Case(sp=s, tokens=t, heads=h, kv_heads=k)) for s, t, (h, k) in sizes]
        return {
            **provenance(("torch", "deepspeed", "transformers"), "one thread a rank, gloo over loopback"),
            "command": " ".join(["python", "benchmarks/bench_attention.py", *sys.argv[1:]]),
            "options": {"repetitions": options.repetitions, "head_size": HEAD_SIZE, "max_gflop": options.max_gflop},
            "link": self._link,
            "cases": cases,
            "errors": [error for sp in options.sp for error in self._errors(sp)],
            "load_average": os.getloadavg(),
        }

    def _run(self, function: Callable[..., Any], sp: int, *args: Any) -> list[Any]:
        from tests.distributed.harness import run_ranks

        return run_ranks(function, sp, *args, timeout_s=TIMEOUT_S)

    def _link_speed(self, sp: int) -> float:
        ranks = self._run(link_rank, sp)
        seconds = sorted(max(times) for times in zip(*ranks, strict=True))
        return float(LINK_BYTES * (sp - 1) / sp / seconds[len(seconds) // 2])

    def _case(self, case: Case) -> dict[str, Any]:
        traffic = {side: self._run(count_rank, case.sp, side, case)[0] for side in SIDES}
        sent = sum(phase["bytes"] for phase in traffic["ours"].values())
        found: dict[str, Any] = {**asdict(case), "head_size": HEAD_SIZE, "gflop": case.gflop(), "traffic": traffic}
        found |= {"bound_s": sent / self._link[case.sp], "memory": {}, "failures": {}}
        real = case.gflop() <= self._options.max_gflop
        for kind, (stub, again) in KINDS.items():
            measured = stub or real
            found[kind] = self._pairs(case, kind, stub, again, found["failures"]) if measured else None
        for side, stub in itertools.product(SIDES, (True, False)):
            if stub or real:
                found["memory"][f"{'stub' if stub else 'real'} {side}"] = self._run(
                    memory_rank, case.sp, side, case, stub
                )
        return found

    def _pairs(self, case: Case, kind: str, stub: bool, again: bool, failures: dict[str, str]) -> list[list[float]]:
        try:
            pairs = slowest(self._run(time_rank, case.sp, case, stub, again, self._options.repetitions))
        except AssertionError as failure:
            failures[kind] = str(failure).strip().splitlines()[-1]
            return []
        say(summary_line(kind, asdict(case), pairs))
        return pairs

    def _errors(self, sp: int) -> Iterator[dict[str, Any]]:
        for heads, kv_heads in ((8, 2), (6, 3)):
            case = Case(sp=sp, tokens=128, heads=heads, kv_heads=kv_heads)
            total = sp * case.tokens
            packed = [total // 2 + 3, total // 4 - 1, total - (total // 2 + 3) - (total // 4 - 1)]
            for row, lengths in (("one document", [total]), ("3 packed documents", packed)):
                for side in SIDES:
                    result: dict[str, Any] = {**asdict(case), "row": row, "side": side, "errors": None}
                    try:
                        result["errors"] = relative(self._run(error_rank, sp, side, case, lengths))
                    except AssertionError as failure:
                        result["failure"] = str(failure).strip().splitlines()[-1]
                    yield result


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description="Our attention layer beside DeepSpeed's, in one run over gloo processes on CPU.",
        epilog="Example: python benchmarks/bench_attention.py --sp 4 --tokens 2048 --heads 8/2 --out /tmp/attention",
    )
    parser.add_argument("--sp", type=int, nargs="+", default=[2, 4], help="sp sizes (default: 2 4)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192], help="tokens a rank")
    parser.add_argument(
        "--heads", type=_heads, nargs="+", default=[(8, 2), (32, 8)], help="query/key-value heads (default: 8/2 32/8)"
    )
    parser.add_argument("--repetitions", type=int, default=15, help="pairs of runs a case (default: 15)")
    parser.add_argument(
        "--max-gflop", type=float, default=500.0, help="leave out the real kernel above so much work a rank (500)"
    )
    parser.add_argument("--quick", action="store_true", help="only sp 2, 512 tokens a rank, 8/2 heads, 3 pairs")
    parser.add_argument(
        "--out", type=Path, help="folder for attention_cpu.md and .json (default: benchmarks/results; --quick: none)"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.sp, options.tokens, options.heads, options.repetitions = [2], [512], [(8, 2)], 3
    elif options.out is None:
        options.out = RESULTS
    return options


def _heads(text: str) -> tuple[int, int]:
    heads, kv_heads = text.split("/")
    return int(heads), int(kv_heads)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, show its page and store it."""
    options = parse(arguments)
    record = Bench(options).record()
    say(markdown(record))
    if options.out is not None:
        say("\n".join(f"written: {path.name}" for path in write(record, options.out)))


if __name__ == "__main__":
    main()
