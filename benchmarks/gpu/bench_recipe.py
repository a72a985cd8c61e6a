"""A whole step of an 8B model as one of eight GPUs takes it, at up to a million tokens, beside `plan`.

Ours trains by the recipe: ZeRO-3, tiled loss and MLP, layers' inputs and attention's outputs in host memory. The peer
is DeepSpeed's Ulysses around torch's attention with DeepSpeed's tiled MLP and tiled loss, under Transformers'
checkpointing with its offload. The other seven ranks are emulated (see ``recipe_rank.py``), so times hold no wire.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.bench_step import measured
from benchmarks.stored_result import RESULTS, gpu_provenance, origin, say, store, table

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


def cases() -> list[dict[str, Any]]:
    """Return every case, in the order of the page."""
    found = []
    for title, context, steps, sides in (
        ("131k", 1 << 17, 3, (("ours", OFFLOADED), ("ours", KEPT), ("deepspeed", OFFLOADED))),
        ("524k", 1 << 19, 1, (("ours", OFFLOADED), ("deepspeed", OFFLOADED))),
        ("1M", 1 << 20, 1, (("ours", OFFLOADED),)),
    ):
        for side, memory in sides:
            place = "in host memory" if memory is OFFLOADED else "on the device"
            found.append(
                {
                    "title": f"{title}, kept {place}",
                    "side": side,
                    "context": context,
                    "documents": (context,),
                    "steps": steps,
                    "warm_up": 1 << 14,
                    "memory": memory,
                    "model": QWEN3_8B,
                    "device": "cuda",
                    "sp": 8,
                }
            )
    return found


def _name(case: dict[str, Any]) -> str:
    return f"{case['title']}: {case['side']}"


def markdown(record: dict[str, Any]) -> str:
    """Return the page."""
    lines = []
    for one in record["found"]:
        if "failure" in one:
            lines.append([_name(one), one["failure"][:200], "", "", "", "", "", one["commit"]])
            continue
        middle, planned = statistics.median(one["seconds"]), one["planned"]
        peer = next((o for o in record["found"] if o["title"] == one["title"] and o["side"] != "ours"), one)
        ratio = "" if "failure" in peer else f"{statistics.median(peer['seconds']) / middle:.2f}"
        # The runtime's share is outside torch's allocator.
        device = planned["device_gib"] - planned.get("term runtime", 0.0)
        mfu = "" if one["mfu"] is None else f"{one['mfu']:.1%}"
        is_ours = one["side"] == "ours"
        lines.append(
            [
                _name(one),
                f"{middle:.1f} ({min(one['seconds']):.1f} to {max(one['seconds']):.1f})",
                ratio,
                f"{one['context'] / one['sp'] / middle:,.0f}",
                mfu,
                f"{one['peak_gib']:.1f}",
                f"{device:.1f}" if is_ours else "",
                one["commit"],
            ]
        )
    head = [
        "context and side",
        "seconds per step",
        "peer/this",
        "tokens/s of this GPU",
        "MFU",
        "peak GiB",
        "planned GiB",
        "commit",
    ]
    text = (
        "One row that is one document, forward, backward and AdamW, bf16 under ZeRO-3; medians (minimum to maximum). "
        "What the other ranks would send is copied on the device: no wire in these times. MFU counts causal operations "
        "and nothing twice. Peak GiB is torch's peak of allocated memory; planned is `plan`'s estimate without the "
        "CUDA context."
    )
    return "\n\n".join(
        [
            "# A step of Qwen3-8B as one of eight GPUs takes it",
            f"{origin(record)} {text}",
            table(head, lines),
            PUBLISHED,
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, show its page and store it."""
    parser = argparse.ArgumentParser(description="A whole step of an 8B model, as one of eight ranks takes it.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for recipe_gpu.md and .json")
    parser.add_argument("--commit", help="the commit, where the tree came without its history")
    parser.add_argument("--add", action="store_true", help="keep what is stored of other cases, for a short lease")
    parser.add_argument("--only", default="", help="run the cases in whose title and side this expression is found")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds that one case may take")
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {
        **gpu_provenance(("torch", "transformers", "deepspeed"), options.commit),
        "command": "python benchmarks/gpu/bench_recipe.py",
    }
    stored = options.out / "recipe_gpu.json"
    kept = json.loads(stored.read_text())["found"] if options.add and stored.exists() else []
    results = {_name(one): one for one in kept}
    for case in [case for case in cases() if re.search(options.only, _name(case))]:
        found = measured(case, "recipe_rank.py", options.limit)
        results[_name(case)] = {**found, "commit": record["commit"]}
        record["found"] = [results[_name(one)] for one in cases() if _name(one) in results]
        store("recipe_gpu", markdown(record), record, options.out)
    say(markdown(record))


if __name__ == "__main__":
    main()
