"""Memory of a training step: peak and slope of ours, with and without tiles, beside plain Transformers.

Each measurement is a forward and a backward pass in a process of its own; sides follow one another in turn, in one run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fresh_process import peak_rss_bytes, run_fresh
from benchmarks.stored_result import MIB, RESULTS, command, met, origin, provenance, say, spread, store, table

TOKENS = (4096, 8192)
SIDES: dict[str, tuple[str, str, str]] = {
    # loss_tile, mlp_tile and attention_output of each of ours.
    "transformers": ("", "", ""),
    "untiled": ("off", "off", "both"),
    "tiled": ("auto", "auto", "both"),
    "tiled, MLP too": ("auto", "1024", "both"),
}
MODEL: dict[str, int] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 32_000, "max_position_embeddings": 65_536,
}  # fmt: skip
GOAL_PEAK, GOAL_SLOPE_KB = 0.2, 15.0
TIMEOUT_S = 600.0

RULES = """\
How to read it: **peak** is how much the resident memory of a process grows from right before a step to its highest
point in it: activations, logits and gradients, without weights and optimizer. One row is one document; fp32, layers are
checkpointed on every side, attention runs in SDPA's kernel for the CPU on all of them. **Slope** is the growth of the
peak per token between the two lengths, in units of 1,000 bytes. Freed tensors go back to the system at once
(`MALLOC_MMAP_THRESHOLD_=65536`). A process is used for one step only. Ours keeps the
outputs of attention in addition (`memory.attention_output: both`), which Transformers computes again. **Estimate** is
the sum of the terms of `plan` for the same step, without weights, optimizer and an engine's buffers."""


def measure_side(side: str, tokens: int) -> dict[str, float]:
    """Take one step of a side in this process, and return what it took."""
    return measure_step(transformers_step if side == "transformers" else our_step, MODEL, tokens, *SIDES[side])


def measure_step(step: Callable[..., Any], sizes: Mapping[str, int], tokens: int, *settings: str) -> dict[str, float]:
    """Take one step in this process, and return what it took.

    Args:
        step: Returns a function that takes the step, of a model, token ids and the settings.
        sizes: Sizes of the model.
        tokens: Tokens of the row.
        settings: Of the step.
    """
    import time

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: Any = LlamaForCausalLM._from_config(
        LlamaConfig(**sizes, use_cache=False), attn_implementation="sdpa"
    ).train()
    ids = torch.randint(0, sizes["vocab_size"], (1, tokens))
    run = step(model, ids, *settings)
    before = _resident_bytes()
    # From now on VmHWM is the peak of the step alone.
    Path("/proc/self/clear_refs").write_text("5")
    start = time.process_time()
    loss = run()
    seconds = time.process_time() - start
    return {"peak_bytes": peak_rss_bytes() - before, "cpu_s": seconds, "loss": loss}


def transformers_step(model: Any, ids: Any, *_: str) -> Any:
    """Return a function that takes Transformers' own step with gradient checkpointing."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def run() -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    return run


def our_step(model: Any, ids: Any, loss_tile: str, mlp_tile: str, kept: Any) -> Any:
    """Return a function that takes our step, with the tiles and what is kept of attention."""
    from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, shard_batch
    from ray_ulysses.attention.recompute import checkpoint_contexts
    from ray_ulysses.engine.tiled_mlp import tile_mlps

    mesh = SequenceMesh.from_group(None)
    contexts = checkpoint_contexts(kept)
    options = {"use_reentrant": False} | ({} if contexts is None else {"context_fn": contexts})
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    apply_ulysses(model, mesh)
    tile_mlps(model, _tile(mlp_tile))
    batch = shard_batch(ids, None, None, mesh)

    def run() -> float:
        loss_sum, num_tokens = causal_lm_loss(model, batch, tile=_tile(loss_tile))
        (loss_sum / num_tokens).backward()
        return float(loss_sum.detach() / num_tokens)

    return run


def _tile(text: str) -> Any:
    return int(text) if text.isdigit() else text


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def estimated_bytes(side: str, tokens: int) -> int | None:
    """Return what the estimate of ``plan`` says of the same step; None for a peer's."""
    from benchmarks.planned import estimate
    from ray_ulysses.model_shape import ModelShape
    from ray_ulysses.planner.memory import MemoryEstimate

    if side == "transformers":
        return None
    shape = ModelShape.from_config_dict({"model_type": "llama", **MODEL})
    loss_tile, mlp_tile, kept = (_tile(text) for text in SIDES[side])
    memory = estimate(
        shape, world_size=1, sp_size=1, context_tokens=tokens, dtype="fp32", accelerator=False, loss_tile=loss_tile,
        mlp_tile=mlp_tile, attention_output=kept,
    )  # fmt: skip
    of_engine = (
        "weights, sharded",
        "weights, whole",
        "weights, gathered",
        "master weights, fp32",
        "AdamW moments, fp32",
    )
    left_out = {*of_engine, "gradients, before reduction", "bucket of gradients", "temporaries of AdamW"}
    terms = tuple(term for term in memory.device if term.name not in left_out and term.phase != "load")
    return MemoryEstimate(device=terms, host=()).device_bytes


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every side at every length in turn, and return the record."""
    record: dict[str, Any] = {
        **provenance(("torch", "transformers"), "one thread per process, one process at a time"),
        "command": command("bench_memory.py"), "load_before": os.getloadavg(), "model": MODEL,
    }  # fmt: skip
    # glibc returns every freed tensor to the system at once: what stays resident is what is allocated, on all sides.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    found = []
    for repeat in range(options.repeats):
        for tokens in TOKENS:
            for side in SIDES:
                result = run_fresh([str(Path(__file__).resolve()), "--side", side, "--tokens", str(tokens)], TIMEOUT_S)
                found.append({"side": side, "tokens": tokens, **result})
                say(f"{repeat} {side} {tokens}: {result['peak_bytes'] / MIB:.0f} MiB, {result['cpu_s']:.1f} CPU s")
    estimates = [
        {"side": side, "tokens": tokens, "bytes": estimated_bytes(side, tokens)} for side in SIDES for tokens in TOKENS
    ]
    return record | {"found": found, "estimates": estimates, "load_average": os.getloadavg()}


def peaks(found: Sequence[Mapping[str, Any]], side: str, tokens: int) -> list[float]:
    """Return the peaks of a side at a length, in MiB (pure)."""
    return [one["peak_bytes"] / MIB for one in found if (one["side"], one["tokens"]) == (side, tokens)]


def slope_kb(found: Sequence[Mapping[str, Any]], side: str) -> float:
    """Return how many thousand bytes a token more takes (pure)."""
    short, long = (median(peaks(found, side, tokens)) for tokens in TOKENS)
    return (long - short) * MIB / (TOKENS[1] - TOKENS[0]) / 1000


def page(record: Mapping[str, Any]) -> str:
    """Return the page of a result (pure)."""
    found, rows = record["found"], []
    peer = median(peaks(found, "transformers", TOKENS[1]))
    estimates = {(one["side"], one["tokens"]): one["bytes"] for one in record["estimates"]}
    for side in SIDES:
        measured = [peaks(found, side, tokens) for tokens in TOKENS]
        estimate = estimates[side, TOKENS[1]]
        seconds = [one["cpu_s"] for one in found if (one["side"], one["tokens"]) == (side, TOKENS[1])]
        rows.append(
            [
                side,
                *(spread(one, "{:.0f}") for one in measured),
                f"{median(measured[1]) / peer:.3f}",
                f"{slope_kb(found, side):.1f}",
                "" if estimate is None else f"{estimate / MIB:.0f} ({estimate / MIB / median(measured[1]):.2f})",
                spread(seconds, "{:.1f}"),
            ]
        )
    head = [
        "side",
        *(f"peak at {tokens:,} tokens, MiB" for tokens in TOKENS),
        "of Transformers'",
        "slope, KB per token",
    ]
    head += ["estimate, MiB (over measured)", f"CPU s of a step of {TOKENS[1]:,}"]
    ratio, slope = median(peaks(found, "tiled", TOKENS[1])) / peer, slope_kb(found, "tiled")
    goals = (
        f"Goals: at {TOKENS[1]:,} tokens x a vocabulary of {MODEL['vocab_size']:,}, the peak is at most {GOAL_PEAK} of "
        f"Transformers': {met(ratio <= GOAL_PEAK)}; the slope is at most {GOAL_SLOPE_KB:.0f} KB per token: "
        f"{met(slope <= GOAL_SLOPE_KB)}."
    )
    return "\n\n".join(["# Memory of a step", origin(record), RULES, table(head, rows), goals])


def main() -> None:
    """Measure one side, or all and store the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="processes per side and length")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        say(json.dumps(measure_side(options.side, options.tokens)))
        return
    record = measure(options)
    say(page(record))
    store("memory", page(record), record, options.out)


if __name__ == "__main__":
    main()
