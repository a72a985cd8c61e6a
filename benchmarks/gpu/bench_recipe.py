"""A whole step of an 8B model as one of eight GPUs takes it, at up to a million tokens, beside `plan`.

Ours trains by the recipe: ZeRO-3, tiled loss and MLP, layers' inputs and attention's outputs in host memory. The peer
is DeepSpeed's Ulysses around torch's attention with DeepSpeed's tiled MLP and tiled loss, under Transformers'
checkpointing with its offload. The other seven ranks are emulated (see ``recipe_rank.py``), so times hold no wire.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.bench_step import case_name, run_cases
from benchmarks.stored_result import origin, table

LIMIT_S = 500.0
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


def markdown(record: dict[str, Any]) -> str:
    """Return the page."""
    lines = []
    for one in record["found"]:
        if "failure" in one:
            lines.append([case_name(one), one["failure"][:200], "", "", "", "", "", one["commit"]])
            continue
        middle, planned = statistics.median(one["seconds"]), one["planned"]
        peer = next((o for o in record["found"] if o["context"] == one["context"] and o["side"] != "ours"), None)
        is_measured = peer is not None and "seconds" in peer
        ratio = f"{statistics.median(peer['seconds']) / middle:.2f}" if is_measured else ""
        # The runtime's share is outside torch's allocator.
        device = planned["device_gib"] - planned.get("term runtime", 0.0)
        mfu = "" if one["mfu"] is None else f"{one['mfu']:.1%}"
        is_ours = one["side"] == "ours"
        lines.append(
            [
                case_name(one),
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
    about = "A whole step of an 8B model, as one of eight ranks takes it."
    run_cases(arguments, about, "recipe_gpu", cases(), markdown, script="recipe_rank.py", limit_s=LIMIT_S)


if __name__ == "__main__":
    main()
