"""Our attention kernels on one GPU, beside what torch offers for the same rows, forward and backward in bf16.

Every kernel's error against the slow reference stands beside its times. Another cuDNN is measured by running the script
again with its library in ``LD_PRELOAD``, its folder in ``LD_LIBRARY_PATH``, ``--add`` and ``--cudnn``.
Peers: ``scaled_dot_product_attention`` with its flash kernel (which can't keep documents apart without a mask), and
``flex_attention``, compiled, with a block mask of documents, the way of torchtitan and others.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu import clocks
from benchmarks.runner import RESULTS, gpu_provenance, origin, say, store, table
from ray_ulysses.attention.kernels import KERNELS, Demand, KernelCall, Spans
from ray_ulysses.attention.kernels.call import Whole

HEAD_SIZE = 128
FLEX_STEP = 128
CHECKED = (1500, 1, 547)
"""Documents of the row over which a kernel's error is measured."""

Run = Callable[[], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of documents, and the heads that one rank has of it."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return sum(self.lengths)

    def flops(self) -> tuple[float, float]:
        """Return the causal operations of forward and of backward."""
        forward = 2.0 * sum(length**2 for length in self.lengths) * self.heads * HEAD_SIZE
        return forward, 2.5 * forward


def drawn(tokens: int, middle: int) -> tuple[int, ...]:
    """Return lengths of documents of a log-normal distribution around ``middle`` that fill a row."""
    source = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(max(16, min(round(source.lognormvariate(0.0, 1.0) * middle), tokens - sum(lengths))))
    lengths[-1] -= sum(lengths) - tokens
    return tuple(length for length in lengths if length > 0)


def rows() -> list[Row]:
    """Return the rows: one long document and packed ones, with a rank's share of the heads of an 8B model."""
    one, share = {"heads": 32, "kv_heads": 8}, {"heads": 4, "kv_heads": 1}
    return [
        Row(name="32k, one document, sp 1", lengths=(32_768,), **one),
        Row(name="32k, documents around 4,000, sp 1", lengths=drawn(32_768, 4000), **one),
        Row(name="32k, documents around 500, sp 1", lengths=drawn(32_768, 500), **one),
        Row(name="131k, one document, 1 of sp 8", lengths=(131_072,), **share),
        Row(name="131k, documents around 20,000, 1 of sp 8", lengths=drawn(131_072, 20_000), **share),
        Row(name="131k, documents around 4,000, 1 of sp 8", lengths=drawn(131_072, 4000), **share),
        Row(name="131k, documents around 500, 1 of sp 8", lengths=drawn(131_072, 500), **share),
        Row(name="524k, one document, 1 of sp 8", lengths=(524_288,), **share),
    ]


def tiny_rows() -> list[Row]:
    """Return rows of the same kinds that a CPU takes in a moment."""
    return [replace(row, lengths=(96,) if len(row.lengths) == 1 else (64, 32), heads=2, kv_heads=1) for row in rows()]


def inputs(row: Row, device: str) -> list[torch.Tensor]:
    """Return Q, K, V and the output's gradient ``[T, heads, D]``; Q, K and V are views of one payload, as at work."""
    sizes = [row.heads * HEAD_SIZE, row.kv_heads * HEAD_SIZE, row.kv_heads * HEAD_SIZE]
    payload = torch.randn(row.tokens, sum(sizes), dtype=torch.bfloat16, device=device)
    parts = [part.unflatten(1, (-1, HEAD_SIZE)) for part in payload.split(sizes, dim=1)]
    return [*parts, torch.randn(row.tokens, row.heads, HEAD_SIZE, dtype=torch.bfloat16, device=device)]


def our_runs(name: str, row: Row, tensors: Sequence[torch.Tensor]) -> tuple[Run, Run]:
    """Return forward and backward of a kernel of the table."""
    entry = next(entry for entry in KERNELS if entry.name == name)
    borders = (0, *accumulate(row.lengths))
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=tensors[0].device)
    spans = Spans(cu_seqlens=cu_seqlens, borders=borders, max_seqlen=max(row.lengths))
    call = KernelCall(
        query_THD=tensors[0],
        key_UKD=tensors[1],
        value_UKE=tensors[2],
        spans=spans,
        scale=HEAD_SIZE**-0.5,
        causal=True,
    )
    out, lse = entry.forward(call)
    return partial(entry.forward, call), partial(entry.backward, call, Whole(tensors[3], out, lse))


def error_of(name: str, row: Row, device: str) -> float:
    """Return the worst error of output and gradients, norm-wise, against the slow reference in bf16."""
    torch.manual_seed(0)
    tensors = inputs(row, device)
    found, wanted = (
        [forward()[0], *backward()] for forward, backward in (our_runs(one, row, tensors) for one in (name, "math"))
    )
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, wanted, strict=True))


def _through_autograd(attend: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> tuple[Run, Run]:
    # [T, H, D] -> [1, H, T, D], a view, as a model has it.
    leaves = [tensor.detach().transpose(0, 1).unsqueeze(0).requires_grad_() for tensor in tensors[:3]]
    upstream = tensors[3].transpose(0, 1).unsqueeze(0)
    out = attend(*leaves)
    return partial(attend, *leaves), lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True)


def sdpa_runs(row: Row, tensors: Sequence[torch.Tensor]) -> tuple[Run, Run]:
    """Return forward and backward of torch's flash kernel over the whole row; it is one document only."""
    if len(row.lengths) > 1:
        raise ValueError("it would attend across documents")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return _through_autograd(attend, tensors)


def flex_runs(row: Row, tensors: Sequence[torch.Tensor]) -> tuple[Run, Run]:
    """Return forward and backward of ``flex_attention`` with a block mask of documents."""
    lengths = torch.tensor(row.lengths, device="cuda")
    document = torch.arange(len(lengths), device="cuda").repeat_interleave(lengths)

    def visible(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (document[query] == document[key])

    mask = torch.compile(create_block_mask)(visible, None, None, row.tokens, row.tokens, device="cuda")
    # The gradients are asked for again and again from one forward.
    torch._functorch.config.donated_buffer = False  # type: ignore[attr-defined]
    compiled = torch.compile(flex_attention)
    return _through_autograd(lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True), tensors)


def milliseconds(run: Run, device: str) -> list[float]:
    """Return the times of a run on the device; as many as fit half a second, three at least."""
    run()
    run()
    times: list[float] = []
    if device != "cuda":
        began = time.perf_counter()
        run()
        return [(time.perf_counter() - began) * 1e3]
    while len(times) < 3 or (sum(times) < 500 and len(times) < 50):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return times


def sides(device: str) -> dict[str, Callable[[Row, Sequence[torch.Tensor]], tuple[Run, Run]]]:
    """Return every kernel of ours that runs here, and on a GPU the peers."""
    asked = Demand(device_type=device, dtype=torch.bfloat16, head_size=HEAD_SIZE, value_size=HEAD_SIZE)
    able = [entry.name for entry in KERNELS if entry.runs_on(device) and entry.refuses(asked) is None]
    able.remove("math")  # the slow reference, 5 TFLOP/s
    ours = {f"ours: {name}": partial(our_runs, name) for name in able}
    return ours if device != "cuda" else {**ours, "torch SDPA, flash": sdpa_runs, "torch flex_attention": flex_runs}


def measured(row: Row, side: str, device: str = "cuda") -> dict[str, Any]:
    """Return the times of a side, or what it fails at."""
    found: dict[str, Any] = {"row": row.name, "side": side, "cudnn": torch.backends.cudnn.version()}
    torch.manual_seed(0)
    try:
        forward, backward = sides(device)[side](row, inputs(row, device))
        with clocks.logged() as logged:
            times = {"forward_ms": milliseconds(forward, device), "backward_ms": milliseconds(backward, device)}
        return {**found, **times, "clocks": logged}
    except Exception as error:
        return {**found, "failure": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def markdown(record: dict[str, Any]) -> str:
    """Return the page."""
    parts = [
        "# Attention kernels on one GPU",
        f"{origin(record)} bf16, heads of {HEAD_SIZE}; medians over 3 to 50 runs, timed by events on the device. "
        "TFLOP/s count causal operations inside documents. Rows of `sp 1` have 32 query and 8 key-value heads, rows of "
        "`1 of sp 8` the share of one of eight ranks, 4 and 1. The error is that of output and gradients over "
        f"{sum(CHECKED):,} tokens, norm-wise, against the slow reference in bf16.",
    ]
    for row in record["rows"]:
        flops = Row(**{**row, "lengths": tuple(row["lengths"])}).flops()
        lines = []
        for found in (found for found in record["found"] if found["row"] == row["name"]):
            if "failure" in found:
                lines.append([found["side"], found["failure"], *[""] * 5])
                continue
            times = [statistics.median(found[phase]) for phase in ("forward_ms", "backward_ms")]
            speeds = [count / time / 1e9 for count, time in zip(flops, times, strict=True)]
            both = sum(flops) / sum(times) / 1e9
            cells = [f"{time:.2f} ms ({speed:.0f})" for time, speed in zip(times, speeds, strict=True)]
            error = f"{found['error']:.0e}" if "error" in found else ""
            shown = [error, clocks.in_words(found.get("clocks", {}))]
            lines.append([found["side"], *cells, f"{sum(times):.2f} ms", f"{both:.0f}", *shown])
        head = ["side", "forward (TFLOP/s)", "backward (TFLOP/s)", "both", "TFLOP/s", "error", "SM clock, MHz"]
        title = f"## {row['name']} ({len(row['lengths'])} document{'s' if len(row['lengths']) > 1 else ''})"
        parts += [title, table(head, lines)]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, show its page, store it and return its record."""
    parser = argparse.ArgumentParser(description="Attention kernels on one GPU, ours beside torch's.")
    parser.add_argument("--out", type=Path, help=f"folder for kernels_gpu.md and .json; default: {RESULTS}")
    parser.add_argument("--commit", help="the commit, where the tree came without its history")
    parser.add_argument("--add", action="store_true", help="keep what is stored of other sides, for a short lease")
    parser.add_argument("--only", default="", help="measure where this expression is found in 'row: side'")
    parser.add_argument("--cudnn", metavar="VERSION", help="the loaded cuDNN, added to the name of each side: 9.27")
    parser.add_argument("--tiny", action="store_true", help="tiny rows on a CPU, to test the script; stores nothing")
    options = parser.parse_args(arguments)
    label, loaded = "", torch.backends.cudnn.version() or 0
    if options.cudnn is not None:
        label = f", cuDNN {options.cudnn}"
        if (version := f"{loaded // 10_000}.{loaded // 100 % 100}") != options.cudnn:
            parser.error(f"cuDNN {version} is loaded, not {options.cudnn}")
    out = options.out or (None if options.tiny else RESULTS)
    device, chosen = ("cpu", tiny_rows()) if options.tiny else ("cuda", rows())
    record: dict[str, Any] = {
        **gpu_provenance(("torch",) if options.tiny else ("torch", "triton"), options.commit),
        "command": "python benchmarks/gpu/bench_kernels.py",
        "rows": [asdict(row) for row in chosen],
    }
    stored = None if out is None else out / "kernels_gpu.json"
    kept = json.loads(stored.read_text())["found"] if stored and options.add and stored.exists() else []
    results = {(one["row"], one["side"]): one for one in kept}
    record["found"] = kept
    checked = replace(chosen[-1], lengths=tuple(max(1, length >> 4) for length in CHECKED) if options.tiny else CHECKED)
    errors: dict[str, float] = {}
    for row, side in product(chosen, sides(device)):
        if not re.search(options.only, f"{row.name}: {side}"):
            continue
        found = measured(row, side, device)
        if side.startswith("ours: ") and "failure" not in found:
            name = side.removeprefix("ours: ")
            errors[name] = errors[name] if name in errors else error_of(name, checked, device)
            found["error"] = errors[name]
        found["side"] += label
        results[row.name, found["side"]] = found
        say(f"{row.name}: {found['side']} {found.get('failure', 'done')}")
        torch.cuda.empty_cache()
        record["found"] = list(results.values())
        if out is not None:
            store("kernels_gpu", markdown(record), record, out)
    say(markdown(record))
    return record


if __name__ == "__main__":
    main()
