"""Memory of a training step by allocation, beside the terms of the planner's estimate.

Each case has fresh processes, one per rank, which take a step at each of four lengths. torch's profiler records every
allocation; the peak is the largest sum of bytes that were allocated since the step began and not freed.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import socket
from concurrent.futures import ProcessPoolExecutor
from statistics import linear_regression
from typing import Any

from benchmarks.runner import MIB, Benchmark, Record, columns, header, main, met, say

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
NARROW: dict[str, Any] = {"mlp_tile": 32, "mlp_width": 256, "kv_heads": 8}
"""With such an MLP attention decides the peak."""
BF16: dict[str, Any] = {"dtype": "bf16"}
CASES: dict[str, dict[str, Any]] = {
    "kept both": {},
    "kept kernel": {"kept": "kernel"},
    "kept none": {"kept": "none"},
    "MHA": {"kv_heads": 8},
    "loss untiled": {"loss_tile": "off"},
    "tiled": {"mlp_tile": 128},
    "tiled, sp 2, kept kernel": {"mlp_tile": 128, "sp": 2, "kept": "kernel"},
    "not checkpointed": {"checkpointing": False},
    "sp 2": {"sp": 2},
    "sp 2, kept none": {"sp": 2, "kept": "none"},
    "sp 2, 2 head groups": {"sp": 2, "head_groups": 2, "kv_heads": 4},
    "sp 2, not checkpointed": {"sp": 2, "checkpointing": False},
    "ring 2": {"sp": 2, "ring": 2},
    "narrow MLP": NARROW,
    "narrow MLP, sp 2": {**NARROW, "sp": 2},
    "narrow MLP, sp 2, kept none": {**NARROW, "sp": 2, "kept": "none"},
    "narrow MLP, ring 2": {**NARROW, "sp": 2, "ring": 2},
    "norms of heads": {"head_norms": True},
    "norms of heads, narrow MLP": {**NARROW, "head_norms": True, "kv_heads": 2},
}
CASES |= {f"{name}, bf16": {**case, **BF16} for name, case in CASES.items()}
GOAL = 0.10
TIMEOUT_S = 300.0


def shape_of(case: Record) -> dict[str, Any]:
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


def planned(case: Record, tokens: int) -> dict[str, int]:
    """Return the planner's terms of a case's step, by its settings as they are recorded, and their ``peak``."""
    from ray_ulysses.model_shape import ModelShape
    from tests.planned import step_terms

    terms = step_terms(
        ModelShape.from_config_dict(shape_of(case)), world_size=case["sp"], sp_size=case["sp"], ring_size=case["ring"],
        context_tokens=tokens * case["sp"], dtype=case["dtype"], gradient_checkpointing=case["checkpointing"],
        attention_output=case["kept"], attention_head_groups=case["head_groups"], loss_tile=case["loss_tile"],
        mlp_tile=case["mlp_tile"], accelerator=False,
    )  # fmt: skip
    return {**{f"{term.name} ({term.phase})": term.bytes for term in terms.device}, "peak": terms.device_bytes}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every case."""
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import ray_ulysses.engine.tiled_mlp  # noqa: F401

    found = []
    for name in list(CASES)[: options.cases]:
        case = {"case": name, **USUAL, **CASES[name]}
        found.append({**case, "peaks": run_case(name), "terms": [planned(case, tokens) for tokens in TOKENS]})
        say(f"{name}: {compared(found[-1])}")
    return {"found": found}


def compared(one: Record) -> tuple[float, float]:
    """Return planned over measured slope, and the ratio of peaks that is furthest from 1."""
    peaks, estimates = one["peaks"], [terms["peak"] for terms in one["terms"]]
    furthest = max((plan / peak for plan, peak in zip(estimates, peaks, strict=True)), key=lambda one: abs(one - 1))
    slopes = [linear_regression(TOKENS, values).slope for values in (estimates, peaks)]
    return slopes[0] / slopes[1], furthest


def page(record: Record) -> str:
    """Return the page."""
    text = (
        "**Peak** is the largest sum of bytes that were allocated since right before a step and not freed, on rank 0: "
        "activations, logits, buffers and gradients of one forward and one backward pass. One row is one document; "
        f"SDPA's kernel for the CPU. Peaks are at {', '.join(map(str, TOKENS))} tokens per rank, the slope is a "
        f"least-squares line's. Goal: planned over measured within {GOAL:.0%} of 1, for slope and peaks. The model: "
        f"{MODEL}."
    )

    def largest(one: Record) -> str:
        terms = sorted(((size, name) for name, size in one["terms"][-1].items() if name != "peak"), reverse=True)
        return "; ".join(f"{name} {size / MIB:.1f}" for size, name in terms[:3])

    cases = columns(
        record["found"],
        case=lambda one: one["case"],
        measured_MiB=lambda one: ", ".join(f"{peak / MIB:.1f}" for peak in one["peaks"]),
        planned_MiB=lambda one: ", ".join(f"{terms['peak'] / MIB:.1f}" for terms in one["terms"]),
        furthest_ratio=lambda one: f"{compared(one)[1]:.3f}",
        ratio_of_slopes=lambda one: f"{compared(one)[0]:.3f}",
        goal=lambda one: met(max(abs(ratio - 1) for ratio in compared(one)) <= GOAL),
        largest_terms=largest,
    )
    return "\n\n".join([header("The planner's memory beside measured memory", record, text), cases])


BENCHMARK = Benchmark(
    name="memory_model",
    about="Every allocation of a step, beside the planner's terms.",
    measure=measure,
    page=page,
    packages=("torch", "transformers"),
    hardware="one thread per process",
    options={"cases": (len(CASES), "how many of the cases, from the first on")},
    quick={"cases": 2},
)

if __name__ == "__main__":
    main(BENCHMARK)
