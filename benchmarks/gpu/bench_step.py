"""A training step on one GPU: ours beside Transformers alone and beside DeepSpeed's Ulysses, and memory as planned.

Two kinds of cases. "One GPU": the whole step of a 1B model under DeepSpeed's ZeRO-3 engine, optimizer included. "One of
sp 8": four layers of an 8B model, forward and backward, as one of eight ranks computes them; the other ranks are
emulated (see ``one_step.py``), so its times hold no wire.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu import clocks
from benchmarks.gpu.bench_kernels import drawn
from benchmarks.gpu.case_runs import EMULATED, Benchmark, case_name, in_words, run, typical, wire_in_words
from benchmarks.gpu.one_step import config_of
from benchmarks.runner import origin, table

LLAMA_1B = {
    "model_type": "llama",
    "vocab_size": 32_768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 1 << 20,
    "tie_word_embeddings": True,
}
LAYERS_OF_8B = {
    **LLAMA_1B,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


def cases() -> list[dict[str, Any]]:
    """Return every case, in the order of the page."""
    found: list[dict[str, Any]] = []
    whole = {"model": LLAMA_1B, "sp": 1, "engine": True, "device": "cuda", "steps": 6}
    for title, context, lengths, sides in (
        ("32k, one document", 32_768, (32_768,), ("ours:kernel", "ours:none", "transformers")),
        ("32k, documents around 4,000", 32_768, drawn(32_768, 4000), ("ours:kernel", "ours:none", "transformers")),
        ("32k, documents around 500", 32_768, drawn(32_768, 500), ("ours:kernel", "transformers")),
        ("65k, one document", 65_536, (65_536,), ("ours:kernel", "transformers")),
    ):
        found += [{**whole, "title": title, "context": context, "documents": lengths, "side": side} for side in sides]
    rank = {"model": LAYERS_OF_8B, "sp": 8, "engine": False, "device": "cuda"}
    for title, context, steps in (("131k, one document", 131_072, 4), ("524k, one document", 524_288, 2)):
        for side in ("ours:both", "ours:kernel", "ours:none", "deepspeed"):
            one = {"title": title, "context": context, "documents": (context,), "steps": steps, "side": side}
            found.append({**rank, **one})
    return found


def page_table(found: list[dict[str, Any]]) -> str:
    """Return one table: a line for each side of each case."""
    lines = []
    for one in found:
        name = case_name(one)
        if "failure" in one:
            lines.append([name, one["failure"][:120], *[""] * 7, one["commit"]])
            continue
        peer = next((o for o in found if o["title"] == one["title"] and not o["side"].startswith("ours")), None)
        is_ours = one["side"].startswith("ours")
        lines.append(
            [
                name,
                in_words(one, 3),
                "" if peer is None or "seconds" not in peer else f"{typical(peer) / typical(one):.2f}",
                f"{one['tokens_per_s']:,.0f}",
                "" if one["mfu"] is None else f"{one['mfu']:.1%}",
                wire_in_words(config_of(one), one) if is_ours and one["sp"] > 1 else "",
                f"{one['peak_gib']:.1f}" if "peak_gib" in one else "",
                f"{one['predicted']['device_gib']:.1f}" if one["engine"] else "",
                clocks.in_words(one.get("clocks", {})),
                one["commit"],
            ]
        )
    head = [
        "case and side",
        "seconds per step",
        "peer/this",
        "tokens/s of this GPU",
        "MFU",
        "modelled wire",
        "peak GiB",
        "planned GiB",
        "SM clock, MHz",
        "commit",
    ]
    return table(head, lines)


def markdown(record: dict[str, Any]) -> str:
    """Return the page."""
    whole = [one for one in record["found"] if one["sp"] == 1]
    ranks = [one for one in record["found"] if one["sp"] > 1]
    shared = "While a step was timed, another process may have drawn the weights of the next case on the same GPU. "
    return "\n\n".join(
        [
            "# A training step on one GPU",
            f"{origin(record)} bf16, gradient checkpointing on every side; each side in a process of its own, medians "
            "(minimum to maximum) of the steps after the warm-up steps, timed by events on the device. "
            f"{'' if record.get('draws_alone') else shared}`ours:kernel` "
            "and `ours:both` keep attention's output (memory.attention_output), `ours:none` computes it again. MFU "
            "is that of the median, and counts causal operations and nothing twice. Peak GiB is torch's peak of "
            "allocated memory.",
            "## One GPU: a 1B Llama (16 layers, vocabulary 32,768) under ZeRO-3, AdamW included",
            page_table(whole),
            "## One of sp 8, the others emulated: four layers of an 8B Llama, vocabulary 32,768, no optimizer",
            EMULATED,
            page_table(ranks),
        ]
    )


STEP = Benchmark(
    name="step_gpu",
    about="A training step on one GPU, ours beside its peers.",
    cases=cases(),
    markdown=markdown,
    script="one_step.py",
    limit_s=300.0,
    at_once=3,
)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, show its page and store it."""
    run(STEP, arguments)


if __name__ == "__main__":
    main()
