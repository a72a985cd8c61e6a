"""Plans of a million to a billion documents: time, memory, stored size, resume; stages, branches and mixtures."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import runner
from benchmarks.runner import MIB, Benchmark, Record, columns, fresh, header, measured, met, peak_rss_bytes, say
from benchmarks.scale.slope import slope

LONG, SHORT = 15_000_000, 131_072
ROWS_PER_STEP = {LONG: 4, SHORT: 64}
GOAL_MEMORY_BYTES, GOAL_RESUME_S = 8 * 2**30, 1.0
GIB = 2**30


def make_plan(folder: str, num_documents: int, context_tokens: int) -> dict[str, Any]:
    """Plan documents of log-normal lengths to disk, in this process."""
    from benchmarks.document_lengths import log_normal
    from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
    from ray_ulysses.data.plan.plan_files import write_segment
    from ray_ulysses.data.plan.segment import PlanSettings

    lengths = log_normal(num_documents)
    source = PlannedSource(path="synthetic", fingerprint="synthetic", num_documents=num_documents)
    settings = PlanSettings(
        seed=0, context_tokens=context_tokens, pad_multiple=256, rows_per_step=ROWS_PER_STEP[context_tokens],
        packing="best_fit", eval_fraction=0.001, eval_rows=8,
    )  # fmt: skip
    # Compiled code is loaded before.
    write_segment(Path(f"{folder}-small"), 0, PlanInput(sources=(_of(source, 5000),), lengths=lengths[:5000]), settings)
    shutil.rmtree(f"{folder}-small")
    with measured() as used:
        segment = write_segment(Path(folder), 0, PlanInput(sources=(source,), lengths=lengths), settings)
    return {
        **used,
        "documents": num_documents,
        "context_tokens": context_tokens,
        "num_rows": segment.train.num_rows,
        "num_steps": segment.end_step,
        "fill": segment.fill,
        "plan_bytes": _size(folder),
    }


def _of(source: Any, num_documents: int) -> Any:
    from dataclasses import replace

    return replace(source, num_documents=num_documents)


def _size(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def resume(folder: str, step: int) -> dict[str, Any]:
    """Time this process's way to the documents of a step's first row; it has imported nothing of ours before."""
    begin = time.perf_counter()
    from ray_ulysses.data.plan.plan_files import load_plan

    start, cpu_start = time.perf_counter(), time.process_time()
    plan = load_plan(Path(folder))
    row = plan.step_rows(step).start
    pieces = plan.pieces(row)
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    assert sum(piece.length for piece in pieces) <= plan.row_tokens(row)
    return {"import_s": start - begin, "seconds": seconds, "cpu_s": cpu_s, "peak_bytes": peak_rss_bytes()}


def make_stages(folder: str, num_documents: int) -> dict[str, Any]:
    """Plan two stages on a mixture of two corpora, store them, and branch the second half-way; all as a run does."""
    from benchmarks.synthetic_corpus import write_corpus
    from ray_ulysses.data.plan.corpus_set import plan_input
    from ray_ulysses.data.plan.plan_files import load_plan, write_segment
    from ray_ulysses.data.plan.segment import PlanSettings, StageLength
    from ray_ulysses.data.plan.stages import StagePlan, plan_stages

    paths = []
    for number in range(2):
        paths.append(f"{folder}/corpus-{number}")
        write_corpus(Path(paths[-1]), num_documents // 2, seed=number)

    def stage(number: int, context_tokens: int, steps: int, weights: Sequence[float]) -> StagePlan:
        settings = PlanSettings(
            seed=0, context_tokens=context_tokens, pad_multiple=256, rows_per_step=ROWS_PER_STEP[context_tokens]
        )
        shares = tuple(zip(paths, weights, strict=True))
        return StagePlan(
            name=str(number), settings=settings, shares=shares, length=StageLength(number=number, steps=steps)
        )

    # The first stage trains on about a third of the documents, the second on a third of the rest.
    tokens = num_documents * 6_000
    first = max(tokens // 3 // (SHORT * ROWS_PER_STEP[SHORT]), 1)
    second = max(tokens // 8 // (LONG * ROWS_PER_STEP[LONG]), 2)
    stages = [stage(0, SHORT, first, (3.0, 1.0)), stage(1, LONG, second, (1.0, 1.0))]
    with measured() as planning:
        plan, new = plan_stages(stages)
    place = Path(folder) / "run" / "plan"
    with measured() as storing:
        for number, one in enumerate(new):
            documents = plan_input(one.corpora, one.validation)
            write_segment(place, number, documents, one.segment.settings, one.remainder, one.part)
    del plan, new, documents, one
    stored = load_plan(place)
    step = first + second // 2
    branched = [stages[0], stage(1, LONG, second, (1.0, 3.0))]
    with measured() as branching:
        plan, new = plan_stages(branched, stored.at_step(step), step)
    assert plan.num_steps == first + second and len(new) == 1
    return {
        "documents": num_documents,
        "stages": planning,
        "storing": storing,
        "branch": branching,
        "fragments": int(new[0].segment.fragments.size),
        "plan_bytes": _size(str(place)),
        "peak_bytes": max(one["peak_bytes"] for one in (planning, storing, branching)),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each plan in a fresh process, then fresh processes that resume in its middle."""
    record: dict[str, Any] = {"plans": [], "stages": []}
    cases = [(LONG, int(size)) for size in options.documents] + [(SHORT, int(size)) for size in options.short]
    for context_tokens, size in cases:
        with tempfile.TemporaryDirectory(prefix="scale-plan-", dir=options.folder) as folder:
            found = fresh(make_plan, f"{folder}/run/plan", size, context_tokens, timeout_s=4 * 3600.0)
            runs = [fresh(resume, f"{folder}/run/plan", found["num_steps"] // 2 + 1 + more) for more in range(3)]
            record["plans"].append({**found, "resumes": runs, "load": os.getloadavg()})
            say(f"{size:,} documents, {context_tokens:,}: {found['cpu_s']:.1f} s, {found['peak_bytes'] / GIB:.2f} GiB")
    for size in options.stages:
        with tempfile.TemporaryDirectory(prefix="scale-plan-", dir=options.folder) as folder:
            record["stages"].append(fresh(make_stages, folder, int(size), timeout_s=4 * 3600.0))
            say(f"{size:,} documents in stages: {record['stages'][-1]['peak_bytes'] / GIB:.2f} GiB")
    return record


def _slopes(cases: Sequence[Record], names: Sequence[str]) -> str:
    if len(cases) < 2:
        return ""
    sizes = [one["documents"] for one in cases]
    return ", ".join(f"{name} {slope(sizes, [float(one[name]) for one in cases]):.2f}" for name in names)


def page(record: Record) -> str:
    """Return the page."""
    plans, stages = record["plans"], record["stages"]
    text = (
        "Documents of log-normal lengths (sigma 1.5, mean 6,500, clipped at 1M), one epoch, 0.1% held out. **Real**: "
        "drawing, packing, the plan's files with their checksums, and loading. **Not real**: the documents, of which "
        "only the lengths exist. Each plan is made by a fresh process that holds the lengths (4 bytes per document); "
        "memory is the process's peak, Python and libraries (about 0.2 GiB) included. Times are CPU seconds of one "
        "core. **resume**: from a fresh process to the documents of the first row of a step in the middle, without "
        "imports; median of three, wall time and CPU time."
    )
    largest = max(one["peak_bytes"] for one in plans)
    slowest = max(_middle(one["resumes"], "seconds") for one in plans)
    goals = (
        f"Goals: at most 8 GiB: {met(largest <= GOAL_MEMORY_BYTES)} up to {max(one['documents'] for one in plans):,} "
        f"documents. Resume within a second: {met(slowest <= GOAL_RESUME_S)}."
    )
    made = columns(
        plans,
        documents=lambda one: f"{one['documents']:,}",
        context=lambda one: f"{one['context_tokens']:,}",
        rows=lambda one: f"{one['num_rows']:,}",
        fill=lambda one: f"{one['fill']:.3%}",
        CPU=lambda one: f"{one['cpu_s']:,.1f} s",
        wall=lambda one: f"{one['seconds']:,.1f} s",
        M_documents_per_CPU_second=lambda one: f"{one['documents'] / one['cpu_s'] / 1e6:.2f}",
        peak_memory=lambda one: f"{one['peak_bytes'] / GIB:.2f} GiB",
        of_it_lengths=lambda one: f"{4 * one['documents'] / GIB:.2f} GiB",
        stored=lambda one: f"{one['plan_bytes'] / MIB:,.0f} MiB",
        resume=lambda one: f"{_middle(one['resumes'], 'seconds'):.3f} s",
        resume_CPU=lambda one: f"{_middle(one['resumes'], 'cpu_s'):.3f} s",
        resume_memory=lambda one: f"{max(run['peak_bytes'] for run in one['resumes']) / MIB:,.0f} MiB",
    )
    parts = [header("Plans of up to a billion documents", record, text), goals, made]
    names = ("cpu_s", "peak_bytes", "plan_bytes")
    for context in (LONG, SHORT):
        found = [one for one in plans if one["context_tokens"] == context]
        if len(found) > 1:
            parts.append(f"Slopes over the documents at {context:,} tokens: {_slopes(found, names)}.")
    if stages:
        staged = columns(
            stages,
            documents=lambda one: f"{one['documents']:,}",
            plan_two_stages=lambda one: f"{one['stages']['cpu_s']:,.1f} s, {one['stages']['peak_bytes'] / GIB:.2f} GiB",
            store_them=lambda one: f"{one['storing']['cpu_s']:,.1f} s, {one['storing']['peak_bytes'] / GIB:.2f} GiB",
            branch=lambda one: f"{one['branch']['cpu_s']:,.1f} s, {one['branch']['peak_bytes'] / GIB:.2f} GiB",
            parts_of_documents_left=lambda one: f"{one['fragments']:,}",
            stored=lambda one: f"{one['plan_bytes'] / MIB:,.0f} MiB",
        )
        about = (
            "Two corpora of half the documents each, opened from disk. A stage of 131,072 tokens with weights 3 to 1 "
            "over about a third of the tokens, then one of 15M tokens with weights 1 to 1; the branch in the middle "
            "of the second stage changes its weights to 1 to 3. Storing plans again, to disk. Peak memory of one "
            "process."
        )
        parts += ["## Stages, mixture and branch", about, staged]
        if len(stages) > 1:
            parts.append(f"Slopes over the documents: {_slopes(stages, ('peak_bytes', 'plan_bytes'))}.")
    return "\n\n".join(parts)


def _middle(runs: Sequence[Record], name: str) -> float:
    return float(sorted(run[name] for run in runs)[len(runs) // 2])


BENCHMARK = Benchmark(
    name="scale_plan",
    about="Plans of a million to a billion documents.",
    measure=measure,
    page=page,
    packages=("numpy", "numba", "pyarrow"),
    hardware="one of them used",
    options={
        "documents": ([10**6, 10**7, 10**8, 10**9], "documents of the plans of 15M tokens per row"),
        "short": ([10**6, 10**7, 10**8], "documents of the plans of 131,072 tokens per row"),
        "stages": ([10**6, 10**7, 10**8], "documents of the plans with stages"),
        "folder": (tempfile.gettempdir(), "folder for the plans: 18 GB for a billion documents"),
    },
    quick={"documents": [200_000, 400_000], "short": [200_000], "stages": [200_000]},
)

if __name__ == "__main__":
    runner.main(BENCHMARK)
