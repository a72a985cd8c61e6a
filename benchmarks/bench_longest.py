"""Longest context of a training step within a limit of memory: ours beside plain Transformers and DeepSpeed's tiles.

Each measurement is a forward and a backward pass in a process of its own; the search ends where a context that fits and
one that does not are close.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_memory import measure_step, our_step, transformers_step
from benchmarks.fresh_process import run_fresh
from benchmarks.stored_result import MIB, RESULTS, command, met, origin, provenance, say, store, table

MODEL: dict[str, int] = {
    "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 32_000, "max_position_embeddings": 65_536,
}  # fmt: skip
SIDES: dict[str, str] = {
    "transformers": "Transformers with gradient checkpointing",
    "deepspeed": "the same with DeepSpeed's TiledMLP and TiledFusedLogitsLoss, as large tiles as ours",
    "ours, none": "ours, `mlp_tile: 1024`, `attention_output: none`, which computes attention again as the peers do",
}
LIMIT_MIB, GOAL = 1024, 6.0
CLOSE = 1.04
STEP = 256
TIMEOUT_S = 3600.0

RULES = """\
How to read it: **longest** is the longest row, in tokens, whose step was measured and whose peak is at most the limit;
**too long** is the shortest that was measured and is over it. **Peak** is how much the resident memory of a process
grows from right before a step to its highest point in it: activations, logits and gradients, without weights and
optimizer. One row is one document; fp32, attention runs in SDPA's kernel for the CPU on all sides. A process is used
for one step only."""


def longest(peak_of: Callable[[int], int], limit: int, start: int = 2048) -> tuple[int, int]:
    """Return the longest length that fits and the shortest that does not, within 4% of each other.

    Args:
        peak_of: Measures the peak of a length, in bytes.
        limit: In bytes.
        start: A length that fits, in tokens.

    Raises:
        ValueError: The start does not fit.
    """
    points = {length: peak_of(length) for length in (start // 2, start)}
    while True:
        fitting = [length for length, peak in points.items() if peak <= limit]
        if start // 2 not in fitting:
            raise ValueError(f"{start // 2} tokens do not fit into {limit} bytes")
        low, high = max(fitting), min((one for one in points if one not in fitting), default=0)
        if high and high <= CLOSE * low:
            return low, high
        # On the line through the two longest lengths: a little before the limit, and beyond it once that is reached.
        (a, of_a), (b, of_b) = sorted(points.items())[-2:]
        reached = b + (limit - of_b) * (b - a) / max(1, of_b - of_a)
        aim = reached * (1.015 if low >= 0.97 * reached else 0.985)
        if not low < aim < (high or math.inf):
            aim = math.sqrt(low * high) if high else 2 * low
        length = max(low + STEP, math.floor(min(aim, 4 * low) / STEP) * STEP)
        if length in points or (high and length >= high):
            return low, high
        points[length] = peak_of(length)


def measure_side(side: str, tokens: int) -> dict[str, float]:
    """Take one step of a side in this process, and return what it took."""
    if side.startswith("ours"):
        return measure_step(our_step, MODEL, tokens, "auto", "1024", side.removeprefix("ours, "))
    return measure_step(transformers_step if side == "transformers" else _deepspeed_step, MODEL, tokens)


def _deepspeed_step(model: Any, ids: Any) -> Any:
    """Return a function that takes the step of Transformers' model with DeepSpeed's tiles."""
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP

    def product(self: Any, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def tiled(self: Any, x: Any) -> Any:
        weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
        return TiledMLP.apply(product, self, x, math.ceil(x.shape[1] / 1024), weights)

    def loss_of(self: Any, x: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(self.lm_head(x).float(), y)

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.model.layers:
        type(layer.mlp).forward = tiled

    def run() -> float:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
        shards = math.ceil(ids.shape[1] / 512)
        loss: Any = TiledFusedLogitsLoss.apply(
            loss_of, model, hidden, labels, None, shards, [model.lm_head.weight], "mean"
        )
        loss.backward()
        return float(loss.detach())

    return run


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Search on every side, and return the record."""
    record: dict[str, Any] = {
        **provenance(("torch", "transformers", "deepspeed"), "one thread per process, one process at a time"),
        "command": command("bench_longest.py"), "load_before": os.getloadavg(), "model": MODEL,
    }  # fmt: skip
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    found: dict[str, Any] = {}
    for side in SIDES:
        points: dict[int, int] = {}

        def peak_of(tokens: int, side: str = side, points: dict[int, int] = points) -> int:
            result = run_fresh([str(Path(__file__).resolve()), "--side", side, "--tokens", str(tokens)], TIMEOUT_S)
            points[tokens] = result["peak_bytes"]
            say(f"{side} {tokens}: {result['peak_bytes'] / MIB:.0f} MiB, {result['cpu_s']:.0f} CPU s")
            return int(result["peak_bytes"])

        low, high = longest(peak_of, options.limit_mib * MIB, 2048 if side == "transformers" else 8192)
        found[side] = {"longest": low, "too_long": high, "points": points}
    return record | {"limit_mib": options.limit_mib, "found": found, "load_average": os.getloadavg()}


def page(record: Mapping[str, Any]) -> str:
    """Return the page of a result (pure)."""
    found, rows = record["found"], []
    least = found["transformers"]["longest"]
    for side, what in SIDES.items():
        one = found[side]
        peak = one["points"][one["longest"]] / MIB
        rows.append(
            [what, f"{one['longest']:,}", f"{one['too_long']:,}", f"{peak:.0f}", f"{one['longest'] / least:.1f}"]
        )
    head = ["side", "longest, tokens", "too long", "its peak, MiB", "of Transformers'"]
    ours = found["ours, none"]["longest"]
    most = max(found[side]["longest"] for side in ("transformers", "deepspeed"))
    goals = (
        f"Goals within {record['limit_mib']} MiB: at least {GOAL:.0f} times Transformers' context: "
        f"{met(ours >= GOAL * least)}; more than every peer: {met(ours > most)}."
    )
    text = f"The model is {record['model']}."
    return "\n\n".join(
        ["# Longest context within a limit of memory", origin(record), RULES, text, table(head, rows), goals]
    )


def main() -> None:
    """Measure one step, or search on all sides and store the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=int, default=LIMIT_MIB, help="limit, in MiB")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        say(json.dumps(measure_side(options.side, options.tokens)))
        return
    record = measure(options)
    say(page(record))
    store("longest", page(record), record, options.out)


if __name__ == "__main__":
    main()
