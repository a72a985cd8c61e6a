"""A training step on one GPU: ours beside Transformers alone and beside DeepSpeed's Ulysses, and memory as planned.

Two kinds of cases. "One GPU": the whole step of a 1B model under DeepSpeed's ZeRO-3 engine, optimizer included. "One of
sp 8": four layers of an 8B model, forward and backward, as one of eight ranks computes them; the other ranks are
emulated (see ``one_step.py``), so its times hold no wire.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.bench_kernels import drawn
from benchmarks.stored_result import RESULTS, gpu_provenance, origin, say, store, table

LIMIT_S = 300.0
AT_ONCE = 3
"""Processes that import and build their models while one of them has the GPU."""
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


def measured(case: dict[str, Any], script: str = "one_step.py", limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Return what a fresh process measured."""
    command = [sys.executable, str(Path(__file__).with_name(script)), json.dumps(case)]
    done = None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        said = "" if done is None else done.stderr[-1500:]
        found = {**case, "failure": f"{type(error).__name__}: no result", "said": said}
    say(f"{case['title']}, {case['side']}: {found.get('failure') or statistics.median(found['seconds'])}")
    return found


def case_name(case: dict[str, Any]) -> str:
    """Return what identifies a case."""
    return f"{case['title']}: {case['side']}"


def page_table(found: list[dict[str, Any]]) -> str:
    """Return one table: a line for each side of each case."""
    lines = []
    for one in found:
        name = case_name(one)
        if "failure" in one:
            lines.append([name, one["failure"][:120], "", "", "", "", "", one["commit"]])
            continue
        peer = next((o for o in found if o["title"] == one["title"] and not o["side"].startswith("ours")), None)
        middle = statistics.median(one["seconds"])
        ratio = "" if peer is None or "seconds" not in peer else f"{statistics.median(peer['seconds']) / middle:.2f}"
        spread = f"{middle:.3f} ({min(one['seconds']):.3f} to {max(one['seconds']):.3f})"
        mfu = "" if one["mfu"] is None else f"{one['mfu']:.1%}"
        planned = f"{one['predicted']['device_gib']:.1f}" if one["engine"] else ""
        lines.append(
            [name, spread, ratio, f"{one['tokens_per_s']:,.0f}", mfu, f"{one['peak_gib']:.1f}", planned, one["commit"]]
        )
    head = [
        "case and side",
        "seconds per step",
        "peer/this",
        "tokens/s of this GPU",
        "MFU",
        "peak GiB",
        "planned GiB",
        "commit",
    ]
    return table(head, lines)


def markdown(record: dict[str, Any]) -> str:
    """Return the page."""
    whole = [one for one in record["found"] if one["sp"] == 1]
    ranks = [one for one in record["found"] if one["sp"] > 1]
    return "\n\n".join(
        [
            "# A training step on one GPU",
            f"{origin(record)} bf16, gradient checkpointing on every side; each side in a process of its own, medians "
            "(minimum to maximum) of the steps after the warm-up steps, timed by events on the device. `ours:kernel` "
            "and `ours:both` keep attention's output (memory.attention_output), `ours:none` computes it again. MFU "
            "counts causal operations and nothing twice. Peak GiB is torch's peak of allocated memory.",
            "## One GPU: a 1B Llama (16 layers, vocabulary 32,768) under ZeRO-3, AdamW included",
            page_table(whole),
            "## One of sp 8, the others emulated: four layers of an 8B Llama, vocabulary 32,768, no optimizer",
            "No wire: each all-to-all is a copy of the same bytes on the device.",
            page_table(ranks),
        ]
    )


def run_cases(
    arguments: list[str] | None,
    about: str,
    name: str,
    cases: Sequence[dict[str, Any]],
    markdown: Callable[[dict[str, Any]], str],
    *,
    script: str = "one_step.py",
    limit_s: float = LIMIT_S,
    at_once: int = 1,
) -> None:
    """Run a benchmark's cases as a command asks, show its page and store it after each case.

    Args:
        arguments: The command's arguments; None for those of this process.
        about: What the command says of itself.
        name: Of the page and its figures; the script is ``bench_<name without _gpu>.py``.
        cases: Every case, in the order of the page.
        markdown: Makes the page of a record.
        script: Measures one case in a process of its own.
        limit_s: Seconds that one case may take.
        at_once: Processes at once, of which one has the GPU.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder for {name}.md and .json")
    parser.add_argument("--commit", help="the commit, where the tree came without its history")
    parser.add_argument("--add", action="store_true", help="keep what is stored of other cases, for a short lease")
    parser.add_argument("--only", default="", help="run the cases in whose title and side this expression is found")
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {
        **gpu_provenance(("torch", "transformers", "deepspeed"), options.commit),
        "command": f"python benchmarks/gpu/bench_{name.removesuffix('_gpu')}.py",
    }
    stored = options.out / f"{name}.json"
    kept = json.loads(stored.read_text())["found"] if options.add and stored.exists() else []
    results = {case_name(one): one for one in kept}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        chosen = [{**case, "turn": f"{folder}/turn"} for case in cases if re.search(options.only, case_name(case))]
        for found in pool.map(lambda case: measured(case, script, limit_s), chosen):
            results[case_name(found)] = {**found, "commit": record["commit"]}
            record["found"] = [results[case_name(case)] for case in cases if case_name(case) in results]
            store(name, markdown(record), record, options.out)
    say(markdown(record))


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, show its page and store it."""
    run_cases(
        arguments, "A training step on one GPU, ours beside its peers.", "step_gpu", cases(), markdown, at_once=AT_ONCE
    )


if __name__ == "__main__":
    main()
