"""Planning beside offline best-fit-decreasing and TRL's ``bfd``: fill and documents/s, on one core.

Ours is ``write_segment``: every document drawn in a seeded order, cut, packed, its pieces and rows written to disk and
read back. Best-fit-decreasing packs the pieces of that very plan. TRL runs in an interpreter of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import best_fit_decreasing
from benchmarks.document_lengths import log_normal, mixed, near_context, write_log_normal
from benchmarks.fresh_process import peak_rss_bytes, pin_to_one_core, run_fresh
from benchmarks.packing_report import markdown
from benchmarks.stored_result import RESULTS, command, provenance, say, store
from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
from ray_ulysses.data.plan.plan_files import write_segment
from ray_ulysses.data.plan.segment import Packing, PlanSettings, Segment

CONTEXTS = (131_072, 1_048_576)
HALF = (0.34, 0.66)
HALF_PACKINGS: tuple[Packing, ...] = ("best_fit", "wide_fit")
LARGE = (10_000_000, 100_000_000)
PAD_MULTIPLE = 256
ROWS_PER_STEP = 64
TRL_TOKENS = 1_300_000_000
"""Bytes of tokens that TRL's side may hold; it moves them, so a whole corpus would not fit."""
TRL_BATCH = 1000
TIMEOUT_S = 1800.0

Lengths = NDArray[np.uint32]


def corpora(num_documents: int, context_tokens: int) -> dict[str, Callable[[], Lengths]]:
    """Return the corpora by name; each is made when it is asked for."""
    return {
        "log-normal": lambda: log_normal(num_documents),
        "0.55 to 0.9 × context": lambda: near_context(num_documents, context_tokens),
        "both, as many tokens each": lambda: mixed(num_documents, context_tokens),
    }


def plan_once(
    lengths: Lengths, context_tokens: int, seed: int, folder: Path, packing: Packing = "best_fit"
) -> tuple[Segment, float, float]:
    """Plan a corpus to disk; return the segment, wall and CPU seconds."""
    source = PlannedSource(path="benchmark", fingerprint="benchmark", num_documents=int(lengths.size))
    documents = PlanInput(sources=(source,), lengths=lengths)
    settings = PlanSettings(
        seed=seed,
        context_tokens=context_tokens,
        pad_multiple=PAD_MULTIPLE,
        rows_per_step=ROWS_PER_STEP,
        packing=packing,
    )
    start, cpu_start = time.perf_counter(), time.process_time()
    segment = write_segment(folder, 0, documents, settings)
    return segment, time.perf_counter() - start, time.process_time() - cpu_start


def ours_and_offline(
    lengths: Lengths, context_tokens: int, repetitions: int, packing: Packing = "best_fit"
) -> dict[str, Any]:
    """Plan a corpus several times, each with a seed of its own, and its pieces by best-fit-decreasing."""
    found: dict[str, Any] = {"wall_s": [], "cpu_s": [], "fill": [], "offline_fill": [], "offline_wall_s": []}
    for seed in range(repetitions + 1):
        folder = Path(tempfile.mkdtemp(prefix="bench-packing-"))
        try:
            segment, seconds, cpu_seconds = plan_once(lengths, context_tokens, seed, folder, packing)
            if seed == 0:
                # The first one loads compiled code.
                continue
            num_pieces = int(segment.train.stats(0, segment.train.num_rows).num_pieces.sum())
            pieces = segment.train.closed_pieces(0, num_pieces).length
        finally:
            shutil.rmtree(folder)
        start = time.perf_counter()
        num_rows = best_fit_decreasing.num_rows(pieces, segment.settings.capacity)
        found["offline_wall_s"].append(time.perf_counter() - start)
        found["wall_s"].append(seconds)
        found["cpu_s"].append(cpu_seconds)
        found["fill"].append(segment.fill)
        found["offline_fill"].append(segment.totals.tokens / (num_rows * segment.settings.capacity))
    found |= {"num_pieces": int(pieces.size), "num_rows": segment.train.num_rows, "tokens": segment.totals.tokens}
    # No packing of these pieces takes fewer rows than their tokens fill.
    least = -(-segment.totals.tokens // segment.settings.capacity)
    return found | {"fill_bound": segment.totals.tokens / (least * segment.settings.capacity)}


def trl_documents(lengths: Lengths) -> Lengths:
    """Return the first documents, whole batches of them, whose tokens TRL's side may hold; one batch at least."""
    fitting = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), TRL_TOKENS))
    return lengths[: max(TRL_BATCH, fitting // TRL_BATCH * TRL_BATCH)]


def theirs(python: str | None, lengths: Lengths, context_tokens: int) -> dict[str, Any]:
    """Run TRL on the first documents of the corpus; says why where it was not run."""
    if python is None:
        return {"failure": "no interpreter with TRL was given (--trl-python)"}
    with tempfile.TemporaryDirectory(prefix="bench-packing-") as folder:
        path = Path(folder) / "lengths.npy"
        np.save(path, trl_documents(lengths))
        script = str(Path(__file__).with_name("trl_packing.py"))
        try:
            return run_fresh([script, str(path), str(context_tokens)], TIMEOUT_S, python)
        except RuntimeError as error:
            return {"failure": str(error).splitlines()[-1]}


def plan_file(path: Path, context_tokens: int) -> dict[str, Any]:
    """Plan the lengths of a file in this process, which does nothing else."""
    before = peak_rss_bytes()
    start = time.perf_counter()
    lengths = np.load(path)
    loaded = time.perf_counter() - start
    folder = Path(tempfile.mkdtemp(prefix="bench-packing-"))
    try:
        segment, seconds, cpu_seconds = plan_once(lengths, context_tokens, 1, folder)
        stored = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    finally:
        shutil.rmtree(folder)
    return {
        "num_documents": int(lengths.size),
        "num_rows": segment.train.num_rows,
        "fill": segment.fill,
        "load_s": loaded,
        "wall_s": seconds,
        "cpu_s": cpu_seconds,
        "plan_bytes": stored,
        "lengths_bytes": int(lengths.nbytes),
        "rss_before_bytes": before,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def large_plan(num_documents: int) -> dict[str, Any]:
    """Plan so many log-normal documents in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="bench-packing-") as folder:
        path = Path(folder) / "lengths.npy"
        write_log_normal(path, num_documents)
        return run_fresh([__file__, "--plan-file", str(path)], TIMEOUT_S)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of everything that the options ask for."""
    record: dict[str, Any] = {
        **provenance(("numpy", "numba", "pyarrow"), "each process on one of them"),
        "command": command("bench_packing.py"),
        "load_before": os.getloadavg(),
        "options": {"documents": options.documents, "repetitions": options.repetitions, "large": options.large},
        "cases": [],
    }
    for context_tokens in options.contexts:
        for name, make in corpora(options.documents, context_tokens).items():
            lengths = make()
            case = {
                "corpus": name,
                "context_tokens": context_tokens,
                "num_documents": int(lengths.size),
                "mean_tokens": float(lengths.mean(dtype=np.float64)),
                "ours": ours_and_offline(lengths, context_tokens, options.repetitions),
                "trl": theirs(options.trl_python, lengths, context_tokens),
            }
            record["cases"].append(case)
            say(f"{name}, {context_tokens:,}: fill {case['ours']['fill'][0]:.4%}, {min(case['ours']['wall_s']):.2f} s")
    half = near_context(options.documents, CONTEXTS[0], shares=HALF)
    record["half"] = {
        packing: ours_and_offline(half, CONTEXTS[0], options.repetitions, packing) for packing in HALF_PACKINGS
    }
    record["large"] = [large_plan(count) for count in options.large]
    return record | {"load_average": os.getloadavg()}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description="Planning beside offline best-fit-decreasing and TRL's bfd, on one core.",
        epilog="TRL: python -m venv /tmp/trl && /tmp/trl/bin/pip install trl, then --trl-python /tmp/trl/bin/python",
    )
    parser.add_argument("--documents", type=int, default=1_000_000, help="documents of a corpus (default: 1,000,000)")
    parser.add_argument("--contexts", type=int, nargs="*", default=list(CONTEXTS), help="context lengths; may be none")
    parser.add_argument("--repetitions", type=int, default=7, help="plans a case, after one to warm up (default: 7)")
    parser.add_argument("--large", type=int, nargs="*", default=LARGE, help="documents of the large plans")
    parser.add_argument("--trl-python", help="interpreter of an environment that has TRL")
    parser.add_argument("--quick", action="store_true", help="20,000 documents, 2 plans a case, no large plan")
    parser.add_argument("--plan-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder for packing.md and .json (default: results; --quick: none)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.documents, options.repetitions, options.large = 20_000, 2, ()
    elif options.out is None:
        options.out = RESULTS
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, show its page and store it."""
    options = parse(arguments)
    pin_to_one_core()
    if options.plan_file is not None:
        import json

        say(json.dumps(plan_file(options.plan_file, CONTEXTS[0])))
        return
    record = measure(options)
    name = "packing" if options.contexts else "packing_large"
    say(markdown(record))
    if options.out is not None:
        say("\n".join(f"written: {path.name}" for path in store(name, markdown(record), record, options.out)))


if __name__ == "__main__":
    main()
