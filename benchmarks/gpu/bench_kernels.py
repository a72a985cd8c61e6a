"""Our attention kernels on one GPU, beside what torch offers for the same rows, forward and backward in bf16.

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.stored_result import RESULTS, gpu_provenance, origin, say, store, table
from ray_ulysses.attention.kernels import KERNELS, Demand, KernelCall, Spans

HEAD_SIZE = 128
FLEX_STEP = 128

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


def inputs(row: Row) -> list[torch.Tensor]:
    """Return Q, K, V and the output's gradient ``[T, heads, D]``; Q, K and V are views of one payload, as at work."""
    sizes = [row.heads * HEAD_SIZE, row.kv_heads * HEAD_SIZE, row.kv_heads * HEAD_SIZE]
    payload = torch.randn(row.tokens, sum(sizes), dtype=torch.bfloat16, device="cuda")
    parts = [part.unflatten(1, (-1, HEAD_SIZE)) for part in payload.split(sizes, dim=1)]
    return [*parts, torch.randn(row.tokens, row.heads, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")]


def our_runs(name: str, row: Row, tensors: Sequence[torch.Tensor]) -> tuple[Run, Run]:
    """Return forward and backward of a kernel of the table."""
    entry = next(entry for entry in KERNELS if entry.name == name)
    borders = (0, *accumulate(row.lengths))
    cu_seqlens = torch.tensor(borders, dtype=torch.int32, device="cuda")
    spans = Spans(cu_seqlens=cu_seqlens, borders=borders, max_seqlen=max(row.lengths))
    call = KernelCall(
        query_THD=tensors[0],
        key_UKD=tensors[1],
        value_UKE=tensors[2],
        spans=spans,
        scale=HEAD_SIZE**-0.5,
        causal=True,
    )
    out, lse = entry.kernel.forward(call)
    return partial(entry.kernel.forward, call), partial(entry.kernel.backward, call, tensors[3], out, lse)


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


def milliseconds(run: Run) -> list[float]:
    """Return the times of a run on the device; as many as fit half a second, three at least."""
    run()
    run()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 500 and len(times) < 50):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return times


def sides() -> dict[str, Callable[[Row, Sequence[torch.Tensor]], tuple[Run, Run]]]:
    """Return every kernel of ours that runs here, and the peers."""
    asked = Demand(device_type="cuda", dtype=torch.bfloat16, head_size=HEAD_SIZE, value_size=HEAD_SIZE)
    able = [entry.name for entry in KERNELS if entry.runs_on("cuda") and entry.refuses(asked) is None]
    able.remove("math")  # the slow reference, 5 TFLOP/s
    ours = {f"ours: {name}": partial(our_runs, name) for name in able}
    return {**ours, "torch SDPA, flash": sdpa_runs, "torch flex_attention": flex_runs}


def measured(row: Row, side: str) -> dict[str, Any]:
    """Return the times of a side, or what it fails at."""
    found: dict[str, Any] = {"row": row.name, "side": side}
    torch.manual_seed(0)
    try:
        forward, backward = sides()[side](row, inputs(row))
        return {**found, "forward_ms": milliseconds(forward), "backward_ms": milliseconds(backward)}
    except Exception as error:
        return {**found, "failure": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def markdown(record: dict[str, Any]) -> str:
    """Return the page."""
    parts = [
        "# Attention kernels on one GPU",
        f"{origin(record)} bf16, heads of {HEAD_SIZE}; medians over 3 to 50 runs, timed by events on the device. "
        "TFLOP/s count causal operations inside documents. Rows of `sp 1` have 32 query and 8 key-value heads, rows of "
        "`1 of sp 8` the share of one of eight ranks, 4 and 1.",
    ]
    for row in record["rows"]:
        flops = Row(**{**row, "lengths": tuple(row["lengths"])}).flops()
        lines = []
        for found in (found for found in record["found"] if found["row"] == row["name"]):
            if "failure" in found:
                lines.append([found["side"], found["failure"], "", "", ""])
                continue
            times = [statistics.median(found[phase]) for phase in ("forward_ms", "backward_ms")]
            speeds = [count / time / 1e9 for count, time in zip(flops, times, strict=True)]
            both = sum(flops) / sum(times) / 1e9
            cells = [f"{time:.2f} ms ({speed:.0f})" for time, speed in zip(times, speeds, strict=True)]
            lines.append([found["side"], *cells, f"{sum(times):.2f} ms", f"{both:.0f}"])
        head = ["side", "forward (TFLOP/s)", "backward (TFLOP/s)", "both", "TFLOP/s"]
        title = f"## {row['name']} ({len(row['lengths'])} document{'s' if len(row['lengths']) > 1 else ''})"
        parts += [title, table(head, lines)]
    return "\n\n".join(parts)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, show its page and store it."""
    parser = argparse.ArgumentParser(description="Attention kernels on one GPU, ours beside torch's.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for kernels_gpu.md and .json")
    parser.add_argument("--commit", help="the commit, where the tree came without its history")
    parser.add_argument("--add", action="store_true", help="keep what is stored of other sides, for a short lease")
    parser.add_argument("--only", default="", help="measure where this expression is found in 'row: side'")
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {
        **gpu_provenance(("torch", "triton"), options.commit),
        "command": "python benchmarks/gpu/bench_kernels.py",
        "rows": [asdict(row) for row in rows()],
    }
    stored = options.out / "kernels_gpu.json"
    kept = json.loads(stored.read_text())["found"] if options.add and stored.exists() else []
    results = {(one["row"], one["side"]): one for one in kept}
    record["found"] = kept
    for row in rows():
        for side in sides():
            if not re.search(options.only, f"{row.name}: {side}"):
                continue
            results[row.name, side] = found = measured(row, side)
            say(f"{row.name}: {side} {found.get('failure', 'done')}")
            torch.cuda.empty_cache()
            record["found"] = list(results.values())
            store("kernels_gpu", markdown(record), record, options.out)
    say(markdown(record))


if __name__ == "__main__":
    main()
