"""What `plan` predicts for 8B, 32B and 70B models on 8 to 1,024 GPUs: layout, step time, memory and price.

Nothing is run. Each row is the fastest layout of ``plan --layouts``; the longest context is that of ``plan --longest``.
"""

from __future__ import annotations

import argparse
from typing import Any

import yaml

from benchmarks.runner import REPOSITORY, Benchmark, Record, columns, header, main, say
from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.config.schema import with_settings
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.layouts import LayoutChoice, compare_layouts
from ray_ulysses.planner.memory_terms import GIB
from ray_ulysses.planner.search import choices, longest_contexts

BASE = REPOSITORY / "configs" / "llama3-8b_16xh100_sp8-dp2_128k.yaml"
LLAMA = {
    "model_type": "llama", "vocab_size": 128_256, "max_position_embeddings": 8192, "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        **LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    },
    "Qwen3-32B": {
        "model_type": "qwen3", "vocab_size": 151_936, "max_position_embeddings": 40_960, "num_key_value_heads": 8,
        "tie_word_embeddings": False, "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64,
        "num_attention_heads": 64, "head_dim": 128,
    },
    "Llama-3-70B": {
        **LLAMA, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
}  # fmt: skip
CONTEXTS = (131_072, 1_048_576)
WITHOUT = {"elastic.peer_memory": False}
STEP_TOKENS = 2**25
"""Tokens per step, at every number of GPUs."""


NETWORKS, NETWORK_GPUS, NETWORK_CONTEXT = (25.0, 50.0, 100.0, 200.0, 400.0), 64, 16_384
NETWORK_MODELS = ("Llama-3-8B", "Llama-3-70B")


def run_config(model: str, gpus: int, context_tokens: int, gbps: float = 400.0) -> Config:
    """Return the configuration of a run, whose memory settings are the planner's."""
    tree = yaml.safe_load(BASE.read_text())
    tree["model"] = {"path": model, "config": MODELS[model], "rope": {"rope_type": "yarn", "factor": 128.0}}
    tree["data"] |= {"context_tokens": context_tokens, "rows_per_step": STEP_TOKENS // context_tokens}
    tree["memory"] |= {"plan": "auto", "host_gib": 240}
    tree["checkpoint"] |= {"host_buffers": 1}
    tree["optimizer"] |= {"lr": 2e-5}
    tree["cluster"] |= {"workers": gpus, "network_gbps": gbps}
    return parse_config(tree)


def row_of(model: str, gpus: int, context_tokens: int, price: float) -> dict[str, Any]:
    """Return the fastest layout's figures, or only the sizes if no layout fits."""
    config = run_config(model, gpus, context_tokens)
    row: dict[str, Any] = {"model": model, "gpus": gpus, "context_tokens": context_tokens}
    shape = ModelShape.from_config_dict(MODELS[model])
    found = compare_layouts(config, shape) or compare_layouts(with_settings(config, WITHOUT), shape)
    if not found:
        return row
    best = found[0]
    hours = best.time.seconds * gpus / 3600
    return row | {
        "dp": best.layout.dp_size, "ulysses": best.layout.ulysses_size, "ring": best.layout.ring_size,
        "secondary": best.config.memory.zero_secondary, "seconds": best.time.seconds, "mfu": best.time.mfu,
        "traffic_s": best.time.traffic_s, "device_gib": best.memory.device_bytes / GIB,
        "host_gib": best.memory.host_bytes / GIB, "offload": _offload(best),
        "price": hours * price / STEP_TOKENS * 1e9,
    }  # fmt: skip


def _offload(choice: LayoutChoice) -> str:
    memory = choice.config.memory
    moved = [*memory.offload_activations]
    moved += ["optimizer"] if memory.offload_optimizer != "none" else []
    moved += ["weights"] if memory.offload_param != "none" else []
    text = ", ".join(name.replace("_", " ") for name in moved)
    return text if choice.config.elastic.peer_memory else f"{text}; no peer memory"


def network_row(model: str, gbps: float) -> dict[str, Any]:
    """Return the fastest layouts with and without secondary shards on a network."""
    config = run_config(model, NETWORK_GPUS, NETWORK_CONTEXT, gbps)
    found = compare_layouts(config, ModelShape.from_config_dict(MODELS[model]))
    of_secondary = {
        kind: [one for one in found if one.config.memory.zero_secondary == kind] for kind in ("none", "node")
    }
    return {
        "model": model, "gbps": gbps,
        **{kind: _layout_figures(choices[0]) for kind, choices in of_secondary.items()},
    }  # fmt: skip


def _layout_figures(choice: LayoutChoice) -> dict[str, Any]:
    layout = choice.layout
    return {
        "layout": f"dp {layout.dp_size}, sp {layout.ulysses_size} x {layout.ring_size}",
        "seconds": choice.time.seconds, "traffic_s": choice.time.traffic_s,
        "device_gib": choice.memory.device_bytes / GIB,
    }  # fmt: skip


def longest(model: str, gpus: int) -> int:
    """Return the longest context that fits with any settings, or 0."""
    config, shape = run_config(model, gpus, CONTEXTS[0]), ModelShape.from_config_dict(MODELS[model])
    found = longest_contexts(config, shape, choices(config, shape)).changed
    return 0 if found is None else found.config.data.context_tokens


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Plan each model on each number of GPUs."""
    rows, contexts = [], []
    for model in MODELS:
        for gpus in options.gpus:
            contexts.append(
                {"model": model, "gpus": gpus, "longest": longest(model, gpus) if options.longest else None}
            )
            rows += [row_of(model, gpus, context, options.price) for context in CONTEXTS]
            say(f"{model} on {gpus} GPUs")
    networks = [network_row(model, gbps) for model in NETWORK_MODELS for gbps in options.networks]
    return {"rows": rows, "networks": networks, "longest": contexts, "price": options.price}


def capacity_table(record: Record) -> str:
    """Return the table of the fastest layouts."""
    return columns(
        record["rows"],
        model=lambda row: row["model"],
        GPUs=lambda row: f"{row['gpus']:,}",
        context=lambda row: f"{row['context_tokens']:,}",
        dp=lambda row: _or_none(row, "{dp}"),
        sp=lambda row: _or_none(row, "{ulysses} x {ring}"),
        secondary=lambda row: _or_none(row, "{secondary}"),
        s_per_step=lambda row: _or_none(row, "{seconds:.1f}"),
        traffic_s=lambda row: _or_none(row, "{traffic_s:.1f}"),
        MFU=lambda row: _or_none(row, "{mfu:.0%}"),
        GiB=lambda row: _or_none(row, "{device_gib:.0f}"),
        host_GiB=lambda row: _or_none(row, "{host_gib:.0f}"),
        USD_per_billion_tokens=lambda row: _or_none(row, "{price:,.0f}"),
        in_host_memory=lambda row: _or_none(row, "{offload}"),
    )


def _or_none(row: Record, form: str) -> str:
    return form.format(**row) if "seconds" in row else "does not fit" if form == "{dp}" else ""


def network_table(record: Record) -> str:
    """Return the table of the fastest layouts by network."""
    return columns(
        record["networks"],
        model=lambda row: row["model"],
        Gbit_per_s=lambda row: f"{row['gbps']:g}",
        without_secondary=lambda row: row["none"]["layout"],
        s_per_step_without=lambda row: f"{row['none']['seconds']:.1f}",
        traffic_s_without=lambda row: f"{row['none']['traffic_s']:.1f}",
        with_secondary=lambda row: row["node"]["layout"],
        s_per_step_with=lambda row: f"{row['node']['seconds']:.1f}",
        traffic_s_with=lambda row: f"{row['node']['traffic_s']:.1f}",
        GiB_with=lambda row: f"{row['node']['device_gib']:.0f}",
        gain=lambda row: f"{row['none']['seconds'] / row['node']['seconds']:.2f}",
    )


def longest_table(record: Record) -> str:
    """Return the table of the longest contexts."""
    models = list(dict.fromkeys(row["model"] for row in record["longest"]))
    by_size = {gpus: {} for gpus in dict.fromkeys(row["gpus"] for row in record["longest"])}
    for row in record["longest"]:
        by_size[row["gpus"]][row["model"]] = row["longest"]
    cells = {model: (lambda item, model=model: _tokens(item[1][model])) for model in models}
    return columns(list(by_size.items()), GPUs=lambda item: f"{item[0]:,}", **cells)


def _tokens(number: int | None) -> str:
    return "" if number is None else f"{number:,}" if number else "none"


def page(record: Record) -> str:
    """Return the page."""
    text = (
        "Predicted, not measured: the fastest layout of `plan --layouts` for each case, if each row is one document, "
        "on H100s of 80 GB with 240 GiB of host memory each, 8 per node, and 400 Gbit/s per GPU between nodes. The "
        "planner chooses the memory settings (`memory.plan: auto`); `checkpoint.host_buffers` is 1, and peer memory is "
        f"off where it does not fit. Each step has {STEP_TOKENS:,} tokens: 256 rows of 131,072 tokens or 32 rows of "
        "1,048,576. traffic s: time of the traffic between ranks that does not overlap with compute. Price: "
        f"{record['price']:g} USD per GPU-hour. Not yet measured: any run on more than one GPU."
    )
    parts = [header("Capacity: 8B, 32B and 70B on 8 to 1,024 GPUs", record, text), capacity_table(record)]
    about = (
        f"The fastest layouts without and with secondary shards on {NETWORK_GPUS} GPUs at {NETWORK_CONTEXT:,} tokens, "
        "by the network's bandwidth per GPU. Gradients cross the network in fp32 either way. At 131,072 tokens and "
        "more, layouts with few ranks per row overlap the traffic of the weights with compute on most of these "
        "networks. gain: the step time without divided by the step time with secondary shards."
    )
    parts += ["## By network", about, network_table(record)]
    if all(row["longest"] is not None for row in record["longest"]):
        about = (
            "In tokens, with any settings. By default, `parallel.allowed_sp` limits a row to as many ranks as the "
            "model has attention heads, so beyond 64 GPUs the context grows little or not at all."
        )
        parts += ["## Longest context that fits (`plan --longest`)", about, longest_table(record)]
    return "\n\n".join(parts)


BENCHMARK = Benchmark(
    name="scale_capacity",
    about="What plan predicts for 8B, 32B and 70B on 8 to 1,024 GPUs.",
    measure=measure,
    page=page,
    packages=("numpy",),
    hardware="nothing is timed",
    options={
        "gpus": ([8, 64, 256, 1024], "numbers of GPUs"),
        "price": (2.5, "USD per GPU and hour"),
        "networks": (list(NETWORKS), "bandwidths in Gbit/s"),
        "longest": (True, "whether to search the longest contexts"),
    },
    quick={"gpus": [8], "networks": [100.0], "longest": False},
)

if __name__ == "__main__":
    main(BENCHMARK)
