"""Memory of a training step by allocation, beside the terms of the planner's estimate.

Each configuration has fresh processes, one per rank, which take a step at each of four lengths. torch's profiler
records every allocation; the peak is the largest sum of bytes that were allocated since the step began and not freed.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import linear_regression
from typing import Any

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.stored_result import MIB, RESULTS, command, met, origin, provenance, say, store, table

TOKENS = (512, 1024, 1536, 2048)
"""Tokens per rank."""
MODEL: dict[str, int] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 65_536,
}  # fmt: skip
USUAL: dict[str, Any] = {
    "sp": 1, "ring": 1, "dtype": "fp32", "checkpointing": True, "kept": "both", "head_groups": 1, "loss_tile": "auto",
    "mlp_tile": "off", "kv_heads": 2, "mlp_width": 1024, "head_norms": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "kept both": {},
    "kept kernel": {"kept": "kernel"},
    "kept none": {"kept": "none"},
    "bf16": {"dtype": "bf16"},
    "bf16, kept none": {"dtype": "bf16", "kept": "none"},
    "MHA": {"kv_heads": 8},
    "loss untiled": {"loss_tile": "off"},
    "loss untiled, bf16": {"loss_tile": "off", "dtype": "bf16"},
    "tiled": {"mlp_tile": 128},
    "tiled, bf16": {"mlp_tile": 128, "dtype": "bf16"},
    "tiled, bf16, sp 2, kept kernel": {"mlp_tile": 128, "dtype": "bf16", "sp": 2, "kept": "kernel"},
    "not checkpointed": {"checkpointing": False},
    "not checkpointed, bf16": {"checkpointing": False, "dtype": "bf16"},
    "sp 2": {"sp": 2},
    "sp 2, kept kernel": {"sp": 2, "kept": "kernel"},
    "sp 2, kept none": {"sp": 2, "kept": "none"},
    "sp 2, 2 head groups": {"sp": 2, "head_groups": 2, "kv_heads": 4},
    "sp 2, bf16": {"sp": 2, "dtype": "bf16"},
    "sp 2, not checkpointed": {"sp": 2, "checkpointing": False},
    "ring 2": {"sp": 2, "ring": 2},
    "attention decides": {"mlp_tile": 32, "mlp_width": 256, "kv_heads": 8},
    "attention decides, bf16": {"mlp_tile": 32, "mlp_width": 256, "kv_heads": 8, "dtype": "bf16"},
    "attention decides, sp 2, bf16": {"mlp_tile": 32, "mlp_width": 256, "kv_heads": 8, "dtype": "bf16", "sp": 2},
    "attention decides, ring 2, bf16": {
        "mlp_tile": 32,
        "mlp_width": 256,
        "kv_heads": 8,
        "dtype": "bf16",
        "sp": 2,
        "ring": 2,
    },
    "attention decides, sp 2": {"mlp_tile": 32, "mlp_width": 256, "kv_heads": 8, "sp": 2},
    "attention decides, sp 2, kept none": {"mlp_tile": 32, "mlp_width": 256, "kv_heads": 8, "sp": 2, "kept": "none"},
    "attention decides, ring 2": {"mlp_tile": 32, "mlp_width": 256, "kv_heads": 8, "sp": 2, "ring": 2},
    "norms of heads": {"head_norms": True},
    "norms of heads, bf16": {"head_norms": True, "dtype": "bf16"},
    "norms of heads, narrow MLP, bf16": {"head_norms": True, "dtype": "bf16", "mlp_width": 256},
    "norms of heads, tiled": {"head_norms": True, "mlp_tile": 32, "mlp_width": 256},
    "norms of heads, tiled, bf16": {"head_norms": True, "mlp_tile": 32, "mlp_width": 256, "dtype": "bf16"},
    "norms of heads, tiled, sp 2, bf16": {
        "head_norms": True,
        "mlp_tile": 32,
        "mlp_width": 256,
        "dtype": "bf16",
        "sp": 2,
    },
}
GOAL = 0.10
TIMEOUT_S = 300.0

RULES = """\
How to read it: **peak** is the largest sum of bytes that were allocated since right before a step and not freed, on
rank 0: activations, logits, buffers and gradients of one forward and one backward pass. Weights, their accumulated
gradients and the optimizer's state exist before. One row is one document; attention runs in SDPA's kernel for the CPU.
**Slope** is a least-squares line's through the four peaks, in bytes per token of a rank. **Estimate** is the sum of the
same terms of `plan`, all but the training state."""


def shape_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a case's model."""
    sizes = {"num_key_value_heads": case["kv_heads"], "intermediate_size": case["mlp_width"]}
    heads = {"model_type": "qwen3", "head_dim": MODEL["hidden_size"] // MODEL["num_attention_heads"]}
    return MODEL | sizes | (heads if case["head_norms"] else {"model_type": "llama"})


def measure_case(name: str, rank: int, port: int) -> list[int]:
    """Take a step at every length in this process, one rank of the case's world, and return the peaks in bytes."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, shard_batch
    from ray_ulysses.attention.recompute import checkpoint_contexts
    from ray_ulysses.engine.tiled_mlp import tile_mlps

    case = USUAL | CASES[name]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=case["sp"])
    mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=case["ring"])
    config = AutoConfig.for_model(**shape_of(case), use_cache=False)
    dtype = torch.bfloat16 if case["dtype"] == "bf16" else torch.float32
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).train()
    if case["checkpointing"]:
        contexts = checkpoint_contexts(case["kept"])
        options = {"use_reentrant": False} | ({} if contexts is None else {"context_fn": contexts})
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    apply_ulysses(model, mesh, head_groups=case["head_groups"])
    tile_mlps(model, case["mlp_tile"])
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    peaks = []
    # The first, short step only warms up.
    for tokens in (64, *TOKENS):
        ids = torch.randint(0, MODEL["vocab_size"], (1, tokens * case["sp"]))
        batch = shard_batch(ids, None, None, mesh)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            loss_sum, num_tokens = causal_lm_loss(model, batch, tile=case["loss_tile"])
            (loss_sum / num_tokens).backward()
        events = profile.profiler.kineto_results.events()
        peaks.append(max(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]")))
    dist.destroy_process_group()
    return peaks[1:]


def run_case(name: str) -> list[int]:
    """Measure a case in fresh processes, one per rank, and return the peaks of rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = (USUAL | CASES[name])["sp"]
    # They are forked from a process that has imported the libraries, and has done nothing else.
    with ProcessPoolExecutor(world, mp_context=multiprocessing.get_context("fork")) as ranks:
        started = [ranks.submit(measure_case, name, rank, port) for rank in range(world)]
        found = [one.result(TIMEOUT_S) for one in started]
    return found[0]


def estimated(name: str, tokens: int) -> dict[str, int]:
    """Return the terms of the same step by the planner's estimate, and their ``peak``."""
    from benchmarks.planned import estimate
    from ray_ulysses.model_shape import ModelShape
    from ray_ulysses.planner.memory import MemoryEstimate

    case = USUAL | CASES[name]
    shape = ModelShape.from_config_dict(shape_of(case))
    memory = estimate(
        shape, world_size=case["sp"], sp_size=case["sp"], ring_size=case["ring"], context_tokens=tokens * case["sp"],
        dtype=case["dtype"], gradient_checkpointing=case["checkpointing"], attention_output=case["kept"],
        attention_head_groups=case["head_groups"], loss_tile=case["loss_tile"],
        mlp_tile=case["mlp_tile"], accelerator=False,
    )  # fmt: skip
    state = {
        "weights, sharded", "weights, whole", "weights, gathered", "master weights, fp32", "AdamW moments, fp32",
        "gradients, fp32", "gradients, before reduction", "bucket of gradients", "temporaries of AdamW",
    }  # fmt: skip
    terms = [term for term in memory.device if term.name not in state and term.phase != "load"]
    peak = MemoryEstimate(device=tuple(terms), host=()).device_bytes
    return {**{f"{term.name} ({term.phase})": term.bytes for term in terms}, "peak": peak}


def measure() -> dict[str, Any]:
    """Measure every case, and return the record."""
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import ray_ulysses.engine.tiled_mlp  # noqa: F401

    record = {
        **provenance(("torch", "transformers"), "one thread per process"),
        "command": command("bench_memory_model.py"), "load_before": os.getloadavg(), "model": MODEL, "tokens": TOKENS,
    }  # fmt: skip
    found = []
    for name in CASES:
        peaks, terms = run_case(name), [estimated(name, tokens) for tokens in TOKENS]
        found.append({"case": name, **USUAL, **CASES[name], "peaks": peaks, "terms": terms})
        say(f"{name}: {[round(peak / MIB, 1) for peak in peaks]} MiB, {compared(found[-1])}")
    return {**record, "found": found, "load_average": os.getloadavg()}


def compared(one: Mapping[str, Any]) -> tuple[float, float]:
    """Return estimated over measured slope, and the ratio of peaks that is furthest from 1 (pure)."""
    peaks, planned = one["peaks"], [terms["peak"] for terms in one["terms"]]
    ratios = [plan / peak for plan, peak in zip(planned, peaks, strict=True)]
    slopes = [linear_regression(TOKENS, values).slope for values in (planned, peaks)]
    return slopes[0] / slopes[1], max(ratios, key=lambda ratio: abs(ratio - 1))


def page(record: Mapping[str, Any]) -> str:
    """Return the page of a result (pure)."""
    rows, missed = [], []
    for one in record["found"]:
        slope, total = compared(one)
        is_met = max(abs(slope - 1), abs(total - 1)) <= GOAL
        missed += [] if is_met else [one["case"]]
        measured = ", ".join(f"{peak / MIB:.1f}" for peak in one["peaks"])
        planned = ", ".join(f"{terms['peak'] / MIB:.1f}" for terms in one["terms"])
        largest = sorted(((size, name) for name, size in one["terms"][-1].items() if name != "peak"), reverse=True)
        said = "; ".join(f"{name} {size / MIB:.1f}" for size, name in largest[:3])
        rows.append([one["case"], measured, planned, f"{total:.3f}", f"{slope:.3f}", met(is_met), said])
    head = [
        "case",
        "measured, MiB",
        "estimated, MiB",
        "furthest ratio",
        "ratio of slopes",
        "within 10%",
        "largest terms",
    ]
    lengths = ", ".join(f"{tokens:,}" for tokens in record["tokens"])
    goal = (
        f"Goal: estimate over measurement within {GOAL:.0%} of 1 for slope and all four peaks. "
        f"{len(record['found']) - len(missed)} of {len(record['found'])} cases meet it"
        + (f"; outside: {', '.join(missed)}." if missed else ".")
    )
    text = f"Peaks are at {lengths} tokens per rank; the model is {record['model']}."
    return "\n\n".join(
        ["# The planner's memory beside measured memory", origin(record), RULES, text, goal, table(head, rows)]
    )


def main() -> None:
    """Measure all cases and store the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    record = measure()
    say(page(record))
    store("memory_model", page(record), record, options.out)


if __name__ == "__main__":
    main()
