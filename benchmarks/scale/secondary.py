"""Secondary shards of the weights within nodes (hpZ): measured memory and traffic beside the plan's, and both at size.

Steps run on gloo ranks that stand for two nodes, with a model several times as large as what DeepSpeed keeps gathered.
At 16 to 1,024 GPUs, the planner computes them.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.runner import MIB, Benchmark, Record, columns, header, main, met, say
from benchmarks.scale.slope import slope

CASES: tuple[dict[str, Any], ...] = tuple(
    {"world_size": world, "node": node, "is_adapted": is_adapted, "accumulation": accumulation, "has_secondary": has}
    for world, node, is_adapted, accumulation in (
        (4, 2, True, 1), (4, 2, False, 1), (4, 2, False, 2), (6, 3, False, 1), (8, 4, False, 1), (8, 2, False, 1)
    )
    for has in (False, True)
)  # fmt: skip
SIZES = (16, 64, 256, 1024)
GOAL = 0.10
LLAMA_3_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8, "num_hidden_layers": 80, "vocab_size": 128256, "max_position_embeddings": 131_072,
}  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every case, and plan every size."""
    from tests.distributed.secondary_case import Case, measured, planned, save_base

    found = []
    with tempfile.TemporaryDirectory() as folder:
        base = save_base(Path(folder))
        for fields in CASES[: options.cases]:
            case = Case(**fields)
            one, estimate = measured(case, base), planned(case, base)
            terms = {term.name: term.bytes for term in estimate.device}
            found.append({
                **fields, "measured": one.peak_bytes, "planned": estimate.device_bytes,
                "secondary": terms.get("weights, secondary", 0), "across": one.across, "inside": one.inside,
                "weights": 2 * case.num_parameters,
            })  # fmt: skip
            say(f"{fields}: {found[-1]}")
    return {"found": found, "sizes": [planned_at(size) for size in SIZES]}


def planned_at(workers: int) -> dict[str, Any]:
    """Return the planner's figures for a 70B model on nodes of eight GPUs, with and without secondary shards."""
    from ray_ulysses.config.loading import parse_config
    from ray_ulysses.model_shape import ModelShape
    from ray_ulysses.planner.memory import configured_memory
    from ray_ulysses.planner.throughput import configured_time, full_rows

    shape, figures = ModelShape.from_config_dict(LLAMA_3_70B), {}
    for kind in ("none", "node"):
        config = parse_config({
            "run": {"name": "planned", "storage": "/runs"},
            "model": {"config": LLAMA_3_70B, "path": "/model"},
            "data": {"path": "/corpus", "context_tokens": 65_536, "rows_per_step": workers // 8 * 4},
            "parallel": {"sp_size": 8},
            "optimizer": {"lr": 1e-5},
            "memory": {"zero_secondary": kind},
            "cluster": {"workers": workers, "gpus_per_worker": 1, "device": "H100", "network_gbps": 100.0},
            "tracking": {"enabled": False},
        })  # fmt: skip
        time = configured_time(config, shape, full_rows(config))
        assert time is not None
        (term,) = (one for one in time.terms if one.name == "weights and gradients")
        gb = [float(one.replace(",", "")) for one in re.findall(r"([\d.,]+) GB", term.source)]
        memory = {one.name: one.bytes for one in configured_memory(config, shape).device}
        figures[kind] = {
            "across_gb": gb[0], "inside_gb": gb[1] if len(gb) > 1 else 0.0, "step_s": time.seconds,
            "weights_gib": memory["weights, sharded"] / 2**30,
            "secondary_gib": memory.get("weights, secondary", 0) / 2**30,
        }  # fmt: skip
    return {"workers": workers, **figures}


def page(record: Record) -> str:
    """Return the page."""
    found, sizes = record["found"], record["sizes"]
    text = (
        "`memory.zero_secondary: node` on gloo ranks of one machine, in groups that stand for nodes; no GPU was used. "
        "**Measured** is the most bytes of tensors in a pass or an update of three steps, the median over the ranks. "
        "The model has 33M parameters in bf16, of which a quarter stays gathered: DeepSpeed's and the planner's limits "
        "are made smaller together. **Across** and **within nodes** are the weights that a rank received in the third "
        "step, in multiples of all weights; small parameters, which are gathered with the update, are not counted. "
        f"Goal: planned over measured within {GOAL:.0%} of 1 with secondary shards. Every figure of memory and traffic "
        "was measured on real ranks; nodes and their network are simulated. Frozen weights (LoRA) are gathered once "
        "more per micro-batch than the planner's time model counts: DeepSpeed releases them between a layer's "
        "recomputation and its backward pass."
    )
    table = columns(
        found,
        ranks=lambda one: f"{one['world_size']} = {one['world_size'] // one['node']} nodes x {one['node']}",
        trained=lambda one: "LoRA" if one["is_adapted"] else "all",
        micro_batches=lambda one: str(one["accumulation"]),
        secondary=lambda one: "node" if one["has_secondary"] else "none",
        measured_MiB=lambda one: f"{one['measured'] / MIB:.1f}",
        planned_MiB=lambda one: f"{one['planned'] / MIB:.1f}",
        of_it_secondary_MiB=lambda one: f"{one['secondary'] / MIB:.1f}",
        ratio=lambda one: f"{one['planned'] / one['measured']:.3f}",
        goal=lambda one: met(abs(one["planned"] / one["measured"] - 1) <= GOAL) if one["has_secondary"] else "-",
        across_nodes=lambda one: f"{one['across'] / one['weights']:.2f}",
        within_nodes=lambda one: f"{one['inside'] / one['weights']:.2f}",
    )
    computed = columns(
        sizes,
        GPUs=lambda one: f"{one['workers']:,}",
        sharded_GiB=lambda one: f"{one['none']['weights_gib']:.2f}",
        secondary_GiB=lambda one: f"{one['node']['secondary_gib']:.2f}",
        across_GB_none=lambda one: f"{one['none']['across_gb']:,.0f}",
        across_GB_node=lambda one: f"{one['node']['across_gb']:,.0f}",
        within_GB_node=lambda one: f"{one['node']['inside_gb']:,.0f}",
        step_s_none=lambda one: f"{one['none']['step_s']:.1f}",
        step_s_node=lambda one: f"{one['node']['step_s']:.1f}",
    )
    workers = [one["workers"] for one in sizes]
    slopes = ", ".join(
        f"{words} {slope(workers, [one[kind][name] for one in sizes]):+.2f}"
        for words, kind, name in (
            ("sharded weights", "none", "weights_gib"), ("secondary shards", "node", "secondary_gib"),
            ("bytes across nodes without", "none", "across_gb"), ("and with secondary shards", "node", "across_gb"),
            ("seconds without", "none", "step_s"), ("and with", "node", "step_s"),
        )
    )  # fmt: skip
    at_size = (
        "## Computed by the planner\n\nA 70B model, fully fine-tuned, at 65,536 tokens and 4 micro-batches a step, on "
        "nodes of 8 H100 with a network of 100 Gb/s per GPU: bytes per rank and step, of weights in bf16 and gradients "
        f"in fp32. Computed, not measured. Slopes over the number of GPUs: {slopes}."
    )
    return "\n\n".join([header("Secondary shards of the weights within nodes", record, text), table, at_size, computed])


BENCHMARK = Benchmark(
    name="scale_secondary",
    about="Memory and traffic of secondary shards of the weights, beside the planner's.",
    measure=measure,
    page=page,
    packages=("torch", "deepspeed"),
    hardware="one thread per rank",
    options={"cases": (len(CASES), "how many of the cases, from the first on")},
    # A case takes half a minute, and tests/distributed/test_secondary.py measures two.
    quick={"cases": 0},
)

if __name__ == "__main__":
    main(BENCHMARK)
