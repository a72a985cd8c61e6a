"""A whole step of an 8B model as one of eight GPUs takes it, at up to a million tokens, beside `plan`.

Ours trains by the recipe: ZeRO-3, tiled loss and MLP, layers' inputs and attention's outputs in host memory. The peer
is DeepSpeed's Ulysses around torch's attention with DeepSpeed's tiled MLP and tiled loss, under Transformers'
checkpointing with its offload. The other seven ranks are emulated (see ``recipe_rank.py``), so times hold no wire.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu import clocks, floor
from benchmarks.gpu.case_runs import EMULATED, Benchmark, case_name, in_words, run, typical, wire_in_words
from benchmarks.gpu.recipe_rank import make_config
from benchmarks.runner import origin, table
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.flops import step_flops

QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1 << 21,
    "tie_word_embeddings": False,
}
KEPT = {"attention_output": "kernel", "offload_activations": []}
OFFLOADED = {"attention_output": "kernel", "offload_activations": ["layer_inputs", "attention_outputs"]}
PUBLISHED = (
    "Published, on eight 80 GB GPUs at 1,048,576 tokens, wire included: 373 to 380 s per step and 56 GB per GPU "
    "(TRL 1.13, Qwen3-8B)."
)


SHORT = 1 << 14
"""Tokens of the documents of a warm-up row where one of a single document would take minutes: as many bytes of
everything, and little attention."""


def case(title: str, side: str, context: int, steps: int, memory: dict[str, Any], layers: int = 36) -> dict[str, Any]:
    """Return a case; its warm-up step is over a row of the same length.

    Args:
        title: The context, as the page shows it.
        side: ``ours`` or ``deepspeed``.
        context: Tokens of the row.
        steps: Timed steps.
        memory: Settings of memory.
        layers: Layers of the model; of fewer than 36 the page scales the seconds.
    """
    # DeepSpeed's attention has no way to keep documents apart that would fit such a row.
    is_slow = side == "ours" and context >= 1 << 20 and (layers == 36 or context > 1 << 20)
    fewer = "" if layers == 36 else f", {layers} of 36 layers"
    place = "in host memory" if memory is OFFLOADED else "on the device"
    return {
        "title": f"{title}{fewer}, kept {place}",
        "side": side,
        "context": context,
        "documents": (context,),
        "steps": steps,
        "warm_up": (SHORT,) * (context // SHORT) if is_slow else (context,),
        "memory": memory,
        "model": {**QWEN3_8B, "num_hidden_layers": layers},
        "device": "cuda",
        "sp": 8,
    }


def cases() -> list[dict[str, Any]]:
    """Return every case, in the order of the page."""
    return [
        case("131k", "ours", 1 << 17, 3, OFFLOADED),
        case("131k", "ours", 1 << 17, 3, KEPT),
        case("131k", "deepspeed", 1 << 17, 3, OFFLOADED),
        case("524k", "ours", 1 << 19, 2, OFFLOADED),
        case("524k", "deepspeed", 1 << 19, 2, OFFLOADED),
        case("1M", "ours", 1 << 20, 2, OFFLOADED, layers=12),
        case("1M", "ours", 1 << 20, 1, OFFLOADED),
        # Six minutes a step: two runs with --add --more give two steps.
        case("2M", "ours", 1 << 21, 1, OFFLOADED, layers=12),
    ]


def whole_model(one: dict[str, Any]) -> str:
    """Return the seconds of all 36 layers where fewer were measured, by the operations of both (pure)."""
    layers = one["model"]["num_hidden_layers"]
    if f"{layers} of 36 layers" not in one["title"]:
        return ""
    work = {"tokens": one["context"], "sum_squared_lengths": sum(length**2 for length in one["documents"])}
    shapes = (ModelShape.from_config_dict({**one["model"], "num_hidden_layers": n}) for n in (36, layers))
    whole, part = (step_flops(shape, **work) for shape in shapes)
    return f"{typical(one) * whole / part:.0f}"


def markdown(record: dict[str, Any]) -> str:
    """Return the page."""
    lines = []
    for one in record["found"]:
        if "failure" in one:
            lines.append([case_name(one), one["failure"][:200], *[""] * 9, one["commit"]])
            continue
        planned = one["planned"]
        peer = next((o for o in record["found"] if o["context"] == one["context"] and o["side"] != "ours"), None)
        # The runtime's share is outside torch's allocator.
        device = planned["device_gib"] - planned.get("term runtime", 0.0)
        is_ours = one["side"] == "ours"
        lines.append(
            [
                case_name(one),
                in_words(one, 1),
                whole_model(one),
                "" if peer is None or "failure" in peer else f"{typical(peer) / typical(one):.2f}",
                f"{one['context'] / one['sp'] / typical(one):,.0f}",
                "" if one["mfu"] is None else f"{one['mfu']:.1%}",
                floor.in_words(one, typical(one)),
                wire_in_words(make_config(one), one) if is_ours else "",
                f"{one['peak_gib']:.1f}" if "peak_gib" in one else "",
                f"{device:.1f}" if is_ours else "",
                clocks.in_words(one.get("clocks", {})),
                one["commit"],
            ]
        )
    head = [
        "context and side",
        "seconds per step",
        "scaled to 36 layers",
        "peer/this",
        "tokens/s of this GPU",
        "MFU",
        "step by floor",
        "modelled wire",
        "peak GiB",
        "planned GiB",
        "SM clock, MHz",
        "commit",
    ]
    text = (
        "One row that is one document, forward, backward and AdamW, bf16 under ZeRO-3; medians (minimum to maximum) of "
        "the steps after a warm-up step. A single first step holds what only a first step does, such as pinning "
        "memory: 2 to 4 seconds at 131k where activations are in host memory, not known at longer rows. "
        f"{EMULATED} MFU is that of the median, and counts causal operations and nothing twice. Steps of 12 layers are "
        "scaled by the model's operations. The floor is attention by its fastest kernel, measured in the same process, "
        "and matrix products at 790 TFLOP/s, with one recomputation of the layers. Peak GiB is torch's peak of "
        "allocated memory; planned is `plan`'s estimate without the CUDA context."
    )
    return "\n\n".join(
        [
            "# A step of Qwen3-8B as one of eight GPUs takes it",
            f"{origin(record)} {text}",
            table(head, lines),
            PUBLISHED,
        ]
    )


RECIPE = Benchmark(
    name="recipe_gpu",
    about="A whole step of an 8B model, as one of eight ranks takes it.",
    cases=cases(),
    markdown=markdown,
    script="recipe_rank.py",
    limit_s=470.0,
)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, show its page and store it."""
    run(RECIPE, arguments)


if __name__ == "__main__":
    main()
