"""Planning beside offline best-fit-decreasing and TRL's ``bfd``: fill and documents per second, on one core.

Ours is ``write_segment``: every document drawn in a seeded order, cut, packed, its pieces and rows written to disk and
read back. Best-fit-decreasing packs the pieces of that very plan. TRL runs in an interpreter of its own.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.document_lengths import log_normal, mixed, near_context
from benchmarks.runner import NOT_MEASURED, Benchmark, Record, columns, fresh, header, main, met, say, spread

CONTEXTS = (131_072, 1_048_576)
ROWS_PER_STEP, PAD_MULTIPLE = 64, 256
TRL_TOKENS, TRL_BATCH = 1_300_000_000, 1000
"""Bytes of tokens that TRL's side may hold, since it moves them; and the default batch of ``datasets.map``."""
GOAL_RATE, GOAL_POINTS, GOAL_HALF = 4e6, 0.1, 0.995

Lengths = NDArray[np.uint32]


def make_lengths(corpus: str, num_documents: int, context_tokens: int) -> Lengths:
    """Return the lengths of a corpus of the page."""
    if corpus == "log-normal":
        return log_normal(num_documents)
    if corpus == "0.34 to 0.66 × context":
        return near_context(num_documents, context_tokens, shares=(0.34, 0.66))
    make = near_context if corpus == "0.55 to 0.9 × context" else mixed
    return make(num_documents, context_tokens)


def plan(lengths: Lengths, context_tokens: int, seed: int, folder: str, packing: Any = "best_fit") -> Any:
    """Plan a corpus to disk and return the segment."""
    from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
    from ray_ulysses.data.plan.plan_files import write_segment
    from ray_ulysses.data.plan.segment import PlanSettings

    source = PlannedSource(path="benchmark", fingerprint="benchmark", num_documents=int(lengths.size))
    settings = PlanSettings(
        seed=seed, context_tokens=context_tokens, pad_multiple=PAD_MULTIPLE, rows_per_step=ROWS_PER_STEP,
        packing=packing,
    )  # fmt: skip
    return write_segment(Path(folder), 0, PlanInput(sources=(source,), lengths=lengths), settings)


def ours_and_offline(
    corpus: str, num_documents: int, context_tokens: int, repetitions: int, packing: str
) -> dict[str, Any]:
    """Plan a corpus several times on one core, each with its own seed, and its pieces by best-fit-decreasing."""
    from benchmarks import best_fit_decreasing

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    lengths = make_lengths(corpus, num_documents, context_tokens)
    found: dict[str, Any] = {"wall_s": [], "cpu_s": [], "fill": [], "offline_fill": [], "offline_s": []}
    # The first plan loads compiled code and is not counted.
    for seed in range(repetitions + 1):
        with tempfile.TemporaryDirectory(prefix="bench-packing-") as folder:
            start, cpu_start = time.perf_counter(), time.process_time()
            segment = plan(lengths, context_tokens, seed, folder, packing)
            wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
            num_pieces = int(segment.train.stats(0, segment.train.num_rows).num_pieces.sum())
            pieces = np.array(segment.train.closed_pieces(0, num_pieces).length)
        if seed == 0:
            continue
        start = time.perf_counter()
        num_rows = best_fit_decreasing.num_rows(pieces, segment.settings.capacity)
        found["offline_s"].append(time.perf_counter() - start)
        found["wall_s"].append(wall_s)
        found["cpu_s"].append(cpu_s)
        found["fill"].append(segment.fill)
        found["offline_fill"].append(segment.totals.tokens / (num_rows * segment.settings.capacity))
    return {**found, "num_documents": int(lengths.size), "num_rows": segment.train.num_rows}


def trl(corpus: str, num_documents: int, context_tokens: int, python: str) -> dict[str, Any]:
    """Run TRL on the first documents of a corpus, whole batches whose tokens it may hold."""
    lengths = make_lengths(corpus, num_documents, context_tokens)
    fitting = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), TRL_TOKENS))
    with tempfile.TemporaryDirectory(prefix="bench-packing-") as folder:
        path = Path(folder) / "lengths.npy"
        np.save(path, lengths[: max(TRL_BATCH, fitting // TRL_BATCH * TRL_BATCH)])
        found: dict[str, Any] = fresh(pack_with_trl, path, context_tokens, python=python)
    return found


def pack_with_trl(path: str, context_tokens: int) -> dict[str, Any]:
    """Pack a file of lengths by ``pack_dataset(..., "bfd")`` as ``SFTTrainer`` calls it, in TRL's interpreter.

    A document is a list of zero bytes: an eighth of the 64-bit ids that TRL moves, and no labels beside them.
    """
    import importlib.metadata

    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()
    lengths = np.load(path).astype(np.int64)

    def pack(part: NDArray[np.int64]) -> Any:
        chunks = []
        for first in range(0, part.size, TRL_BATCH):
            offsets = np.concatenate([[0], np.cumsum(part[first : first + TRL_BATCH])]).astype(np.int32)
            tokens = pa.array(np.zeros(int(offsets[-1]), dtype=np.uint8))
            chunks.append(pa.ListArray.from_arrays(pa.array(offsets), tokens))
        return pack_dataset(Dataset(pa.table({"input_ids": pa.chunked_array(chunks)})), context_tokens, "bfd")

    # Compiled code, imports and the writer's start-up are not part of the rate.
    pack(lengths[:TRL_BATCH])
    start = time.perf_counter()
    packed = pack(lengths)
    seconds = time.perf_counter() - start
    batches = packed.select_columns(["seq_lengths"]).with_format("arrow").iter(10_000)
    kept = sum(int(batch["seq_lengths"].combine_chunks().flatten().to_numpy().sum()) for batch in batches)
    return {
        "rate": lengths.size / seconds,
        "fill": kept / (len(packed) * context_tokens),
        "lost": 1 - kept / int(lengths.sum()),
        "versions": {name: importlib.metadata.version(name) for name in ("trl", "datasets", "pyarrow")},
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Plan each corpus with each packing that the page compares."""
    cases = []
    for context in CONTEXTS:
        for corpus in ("log-normal", "0.55 to 0.9 × context", "both, as many tokens each"):
            cases.append((corpus, context, "best_fit"))
    cases += [("0.34 to 0.66 × context", CONTEXTS[0], packing) for packing in ("best_fit", "wide_fit")]
    record: dict[str, Any] = {"cases": []}
    for corpus, context, packing in cases:
        ours = fresh(ours_and_offline, corpus, options.documents, context, options.repetitions, packing)
        case = {"corpus": corpus, "context_tokens": context, "packing": packing, **ours, "trl": None}
        if options.trl_python and packing == "best_fit":
            case["trl"] = trl(corpus, options.documents, context, options.trl_python)
        record["cases"].append(case)
        say(f"{corpus}, {context:,}, {packing}: fill {ours['fill'][0]:.4%}, {min(ours['wall_s']):.2f} s")
    return record


def points_behind(case: Record) -> float:
    """Return by how many percentage points the worst of our plans fills less than best-fit-decreasing."""
    return 100 * max(theirs - mine for mine, theirs in zip(case["fill"], case["offline_fill"], strict=True))


def page(record: Record) -> str:
    """Return the page."""
    versions = next((case["trl"]["versions"] for case in record["cases"] if case["trl"]), {})
    text = (
        "Every process runs on one core. **Ours** is all of planning: drawing in a seeded order, cutting, packing, and "
        "writing to disk; medians over plans with their own seeds. **BFD** is best-fit-decreasing on the same pieces, "
        "all known beforehand, in memory: what packing alone could fill and cost. **TRL** is `pack_dataset` with `bfd` "
        "in batches of 1,000 documents on the first documents of the corpus (1.3e9 tokens); it moves the tokens, and "
        f"cuts off what exceeds the context: **lost** ({versions or NOT_MEASURED}). Goals: {GOAL_RATE / 1e6:.0f}M "
        f"documents/s; within {GOAL_POINTS} points of BFD; `wide_fit` at least {GOAL_HALF:.1%} full on documents of "
        "about half a row."
    )

    def rate(case: Record, name: str) -> list[float]:
        return [case["num_documents"] / one / 1e6 for one in case[name]]

    def goal(case: Record) -> str:
        if case["packing"] == "wide_fit":
            return met(min(case["fill"]) >= GOAL_HALF)
        if case["corpus"].startswith("0.34"):
            return ""
        return met(median(rate(case, "wall_s")) * 1e6 >= GOAL_RATE and points_behind(case) <= GOAL_POINTS)

    cases = columns(
        record["cases"],
        corpus=lambda case: f"{case['corpus']}, {case['packing']}",
        context=lambda case: f"{case['context_tokens']:,}",
        documents=lambda case: f"{case['num_documents']:,}",
        rows=lambda case: f"{case['num_rows']:,}",
        M_documents_per_second=lambda case: spread(rate(case, "wall_s")),
        per_CPU_second=lambda case: spread(rate(case, "cpu_s")),
        BFD=lambda case: f"{median(rate(case, 'offline_s')):.1f}",
        TRL=lambda case: f"{case['trl']['rate'] / 1e6:.4f}" if case["trl"] else "",
        fill=lambda case: f"{median(case['fill']):.3%}",
        BFD_fill=lambda case: f"{median(case['offline_fill']):.3%}",
        TRL_fill=lambda case: f"{case['trl']['fill']:.3%}, lost {case['trl']['lost']:.1%}" if case["trl"] else "",
        goal=goal,
    )
    title = "Planning and packing: ours beside offline best-fit-decreasing and TRL's bfd"
    return "\n\n".join([header(title, record, text), cases])


BENCHMARK = Benchmark(
    name="packing",
    about="Planning beside offline best-fit-decreasing and TRL's bfd, on one core.",
    measure=measure,
    page=page,
    packages=("numpy", "numba", "pyarrow"),
    hardware="each process on one of them",
    options={
        "documents": (1_000_000, "documents of a corpus"),
        "repetitions": (7, "plans of a case, after one to warm up"),
        "trl_python": (None, "interpreter of an environment that has trl"),
    },
    quick={"documents": 20_000, "repetitions": 2},
)

if __name__ == "__main__":
    main(BENCHMARK)
