"""Resume: from nothing to the first row of a step in the middle of a plan, beside skipping with ``datasets``."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import runner
from benchmarks.runner import MIB, NOT_MEASURED, Benchmark, Record, fresh, header, met, peak_rss_bytes, say, spread

CONTEXT_TOKENS = 131_072
ROWS_PER_STEP = 64
GOAL_S = 1.0


def first_row(plan_folder: str, step: int) -> dict[str, Any]:
    """Time this process's way to the first row of a step; it has imported nothing of ours before."""
    begin = time.perf_counter()
    from ray_ulysses.data.plan.corpus_set import CorpusSet
    from ray_ulysses.data.plan.plan_files import load_plan
    from ray_ulysses.data.read.reader import RowReader
    from ray_ulysses.data.read.row_source import DirectSource

    imported = time.perf_counter()
    plan = load_plan(Path(plan_folder))
    corpora = CorpusSet(plan.newest.sources)
    source = DirectSource(RowReader(corpora, plan), plan, 0, 1, 0, 1, timeout_s=60.0)
    row = next(source.step(step))
    received = time.perf_counter()
    source.close()
    assert row.row in plan.step_rows(step) and row.input_ids.size == plan.row_tokens(row.row)
    return {"import_s": imported - begin, "seconds": received - imported, "peak_rss_bytes": peak_rss_bytes()}


def plan_corpus(corpus_folder: str, plan_folder: str, num_documents: int) -> dict[str, Any]:
    """Write a corpus and plan it as a run does: lengths from its sidecar, the plan to disk."""
    from benchmarks.synthetic_corpus import write_corpus
    from ray_ulysses.data.plan.corpus_set import open_sources, plan_input
    from ray_ulysses.data.plan.plan_files import write_segment
    from ray_ulysses.data.plan.segment import PlanSettings

    write_corpus(Path(corpus_folder), num_documents)
    start = time.perf_counter()
    documents = plan_input(open_sources([(corpus_folder, None)]))
    settings = PlanSettings(
        seed=0, context_tokens=CONTEXT_TOKENS, pad_multiple=256, rows_per_step=ROWS_PER_STEP, eval_fraction=0.001
    )
    segment = write_segment(Path(plan_folder), 0, documents, settings)
    return {
        "plan_s": time.perf_counter() - start,
        "num_rows": segment.train.num_rows,
        "num_steps": segment.end_step,
        "plan_bytes": sum(path.stat().st_size for path in Path(plan_folder).rglob("*") if path.is_file()),
        "peak_rss_bytes": peak_rss_bytes(),
    }


def write_documents(folder: str, num_documents: int) -> None:
    """Write log-normal documents as Parquet with the writer of ``datasets``, for the peer."""
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars

    from benchmarks.document_lengths import log_normal

    disable_progress_bars()
    rng = np.random.default_rng(0)
    lengths = log_normal(num_documents).astype(np.int64)
    for file, numbers in enumerate(np.array_split(np.arange(num_documents), 4)):
        offsets = np.concatenate([[0], np.cumsum(lengths[numbers])])
        tokens = pa.array(rng.integers(0, 256, int(offsets[-1])).astype(np.uint16))
        ids = pa.LargeListArray.from_arrays(pa.array(offsets), tokens)
        Dataset(pa.table({"number": numbers, "input_ids": ids})).to_parquet(f"{folder}/part-{file}.parquet")


def skip(folder: str, way: str, count: int) -> None:
    """Time the peer's first document after ``count`` skipped ones, by ``skip`` or by a stored state.

    Prints the result itself and ends at once: datasets 5.2 with pyarrow 25 aborts when the interpreter ends while a
    stream is half-way.
    """
    begin = time.perf_counter()
    from datasets import load_dataset

    imported = time.perf_counter()
    files = sorted(str(path) for path in Path(folder).glob("*.parquet"))
    state = Path(folder) / f"state-{count}.json"
    if way == "state" and not state.exists():
        walked = load_dataset("parquet", data_files=files, split="train", streaming=True)
        iterator = iter(walked)
        for _ in range(count):
            next(iterator)
        state.write_text(json.dumps(walked.state_dict()))
    start = time.perf_counter()
    dataset = load_dataset("parquet", data_files=files, split="train", streaming=True)
    if way == "state":
        dataset.load_state_dict(json.loads(state.read_text()))
    next(iter(dataset.skip(count) if way == "skip" else dataset))
    say(json.dumps({"seconds": time.perf_counter() - start, "import_s": imported - begin}))
    os._exit(0)


def _forget_pages(folder: Path) -> None:
    """Ask the kernel to drop the files below a folder from its page cache, so that they are read from the disk."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure fresh processes of both sides in turn."""
    counts = [0, options.peer_documents // 2, options.peer_documents * 19 // 20]
    record: dict[str, Any] = {"documents": options.documents, "peer_documents": options.peer_documents}
    record |= {"cold": [], "warm": [], "skip": {str(count): [] for count in counts}, "state": []}
    with tempfile.TemporaryDirectory(prefix="bench-resume-") as temporary:
        root = Path(temporary)
        (root / "documents").mkdir()
        fresh(write_documents, root / "documents", options.peer_documents)
        record["plan"] = fresh(plan_corpus, root / "corpus", root / "plan", options.documents)
        fresh(skip, root / "documents", "state", counts[-1])
        for repetition in range(options.repetitions):
            _forget_pages(root)
            for kind in ("cold", "warm"):
                step = record["plan"]["num_steps"] // 2 + repetition
                record[kind].append(fresh(first_row, root / "plan", step))
            for count in counts:
                record["skip"][str(count)].append(fresh(skip, root / "documents", "skip", count))
            record["state"].append(fresh(skip, root / "documents", "state", counts[-1]))
            say(f"first row: {record['cold'][-1]['seconds']:.3f} s cold, {record['warm'][-1]['seconds']:.3f} s warm")
    return record


def page(record: Record) -> str:
    """Return the page."""
    plan, count = record["plan"], record["documents"]
    most = max(record["skip"], key=int)
    none, longest = (median(run["seconds"] for run in record["skip"][key]) for key in ("0", most))
    rate = f"{int(most) / (longest - none):,.0f} documents/s" if longest > none else NOT_MEASURED
    text = (
        "From a fresh process to the first row of a step half-way through a plan, on one rank that holds the whole "
        "row; imports stand apart. **Cold**: the files were dropped from the page cache. The peer streams a Parquet "
        "data set of its own with `datasets` and packs nothing: `skip(n)`, or the state that an iterator had after n "
        f"documents. Our plan: {count:,} log-normal documents, {plan['num_rows']:,} rows of {CONTEXT_TOKENS:,} tokens, "
        f"{plan['plan_bytes'] / MIB:,.0f} MiB, made in {plan['plan_s']:.1f} s with {plan['peak_rss_bytes'] / MIB:,.0f} "
        f"MiB. The peer has {record['peer_documents']:,} documents and skips at {rate}."
    )
    sides = [("ours, cold", record["cold"]), ("ours, warm", record["warm"])]
    sides += [(f"`skip({int(key):,})`", runs) for key, runs in record["skip"].items()]
    sides.append((f"state after {int(most):,}", record["state"]))
    rows = [
        [
            name,
            _seconds(runs, "seconds"),
            _seconds(runs, "import_s"),
            *([met(_middle(runs) < GOAL_S)] if at < 2 else [""]),
        ]
        for at, (name, runs) in enumerate(sides)
    ]
    head = ("side", "first row or document", "imports", f"under {GOAL_S:.0f} s")
    title = f"Resume in a plan of {count:,} documents, beside skipping with `datasets`"
    return "\n\n".join([header(title, record, text), runner.table(head, rows)])


def _middle(runs: Sequence[Record]) -> float:
    return median(run["seconds"] for run in runs)


def _seconds(runs: Sequence[Record], name: str) -> str:
    return spread([run[name] for run in runs], "{:.3f}") + " s"


BENCHMARK = Benchmark(
    name="resume",
    about="The first row of a step in the middle of a plan, beside skipping with datasets.",
    measure=measure,
    page=page,
    packages=("numpy", "numba", "pyarrow", "datasets"),
    hardware="local disk",
    options={
        "documents": (100_000_000, "documents of our plan"),
        "peer_documents": (120_000, "documents of the peer's data"),
        "repetitions": (7, "fresh processes of each kind"),
    },
    quick={"documents": 200_000, "peer_documents": 2_000, "repetitions": 2},
)

if __name__ == "__main__":
    runner.main(BENCHMARK)
