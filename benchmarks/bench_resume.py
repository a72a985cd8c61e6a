"""Resume: from nothing to the first row of a step in the middle of a plan, beside skipping with ``datasets``.

Every figure is of a Python process of its own. Our plan is of a hundred million documents; the peer's data set is a
small one, and only its measured seconds and the rate at which it skips are given.
"""

from __future__ import annotations

import time

_STARTED = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fresh_process import forget_pages, peak_rss_bytes, run_fresh  # noqa: E402

CONTEXT_TOKENS = 131_072
ROWS_PER_STEP = 64
TIMEOUT_S = 1800.0


def first_row(plan_folder: Path, step: int) -> dict[str, Any]:
    """Time this process's way to the first row of a step; it has imported nothing of ours before."""
    begin = time.perf_counter()
    from ray_ulysses.data.plan.corpus_set import CorpusSet
    from ray_ulysses.data.plan.plan_files import load_plan
    from ray_ulysses.data.read.reader import RowReader
    from ray_ulysses.data.read.row_source import DirectSource

    imported = time.perf_counter()
    plan = load_plan(plan_folder)
    loaded = time.perf_counter()
    corpora = CorpusSet(plan.newest.sources)
    num_documents = sum(corpus.num_documents for corpus in corpora.corpora)
    opened = time.perf_counter()
    source = DirectSource(RowReader(corpora, plan), plan, 0, 1, 0, 1, timeout_s=60.0)
    row = next(source.step(step))
    received = time.perf_counter()
    source.close()
    assert row.row in plan.step_rows(step) and row.input_ids.size == plan.row_tokens(row.row)
    return {
        "step": step,
        "num_documents": num_documents,
        "num_pieces": len(row.document_lengths),
        "import_s": imported - begin + (begin - _STARTED),
        "plan_s": loaded - imported,
        "corpus_s": opened - loaded,
        "row_s": received - opened,
        "seconds": received - imported,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def plan_corpus(corpus_folder: Path, plan_folder: Path) -> dict[str, Any]:
    """Plan a corpus as a run does: lengths from its sidecar, the plan to disk."""
    from ray_ulysses.data.plan.corpus_set import open_sources, plan_input
    from ray_ulysses.data.plan.plan_files import write_segment
    from ray_ulysses.data.plan.segment import PlanSettings

    start = time.perf_counter()
    documents = plan_input(open_sources([(str(corpus_folder), None)]))
    read = time.perf_counter()
    settings = PlanSettings(
        seed=0, context_tokens=CONTEXT_TOKENS, pad_multiple=256, rows_per_step=ROWS_PER_STEP, eval_fraction=0.001
    )
    segment = write_segment(plan_folder, 0, documents, settings)
    planned = time.perf_counter()
    files = [path.stat() for path in corpus_folder.rglob("*") if path.is_file()]
    return {
        "lengths_s": read - start,
        "plan_s": planned - read,
        "num_rows": segment.train.num_rows,
        "num_steps": segment.end_step,
        "plan_bytes": sum(path.stat().st_size for path in plan_folder.rglob("*") if path.is_file()),
        # Linked shards are on the disk once.
        "corpus_bytes": sum({file.st_ino: file.st_size for file in files}.values()),
        "peak_rss_bytes": peak_rss_bytes(),
    }


def write_documents(folder: Path, num_documents: int) -> dict[str, Any]:
    """Write log-normal documents as Parquet with the writer of ``datasets``, for the peer."""
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars

    from benchmarks.document_lengths import log_normal

    disable_progress_bars()
    rng = np.random.default_rng(0)
    lengths = log_normal(num_documents).astype(np.int64)
    num_files = 4
    for file in range(num_files):
        numbers = np.arange(num_documents)[file * num_documents // num_files : (file + 1) * num_documents // num_files]
        offsets = np.concatenate([[0], np.cumsum(lengths[numbers])])
        tokens = pa.array(rng.integers(0, 256, int(offsets[-1])).astype(np.uint16))
        ids = pa.LargeListArray.from_arrays(pa.array(offsets), tokens)
        Dataset(pa.table({"number": numbers, "input_ids": ids})).to_parquet(str(folder / f"part-{file}.parquet"))
    return {"num_documents": num_documents, "tokens": int(lengths.sum())}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of everything that the options ask for."""
    from benchmarks.stored_result import command, provenance, say

    record: dict[str, Any] = {
        **provenance(("numpy", "numba", "pyarrow", "datasets"), "local disk"),
        "command": command("bench_resume.py"),
        "load_before": os.getloadavg(),
        "repetitions": options.repetitions,
    }
    skips = script_of("skip_resume.py")
    with tempfile.TemporaryDirectory(prefix="bench-resume-") as temporary:
        root = Path(temporary)
        documents = root / "documents"
        documents.mkdir()
        record["peer"] = write_documents(documents, options.peer_documents)
        run_fresh([__file__, "--write-corpus", str(root / "corpus"), str(options.documents)], TIMEOUT_S)
        record["plan"] = run_fresh([__file__, "--plan", str(root / "corpus"), str(root / "plan")], TIMEOUT_S)
        say(json.dumps(record["plan"]))
        half = record["plan"]["num_steps"] // 2
        counts = [0, options.peer_documents // 2, options.peer_documents * 19 // 20]
        run_fresh([skips, str(documents), "state", str(counts[-1])], TIMEOUT_S)
        record |= {"cold": [], "warm": [], "skip": {str(count): [] for count in counts}, "state": []}
        for repetition in range(options.repetitions):
            forget_pages(root)
            for kind in ("cold", "warm"):
                arguments = [__file__, "--first-row", str(root / "plan"), str(half + repetition)]
                record[kind].append(run_fresh(arguments, TIMEOUT_S))
            for count in counts:
                record["skip"][str(count)].append(run_fresh([skips, str(documents), "skip", str(count)], TIMEOUT_S))
            record["state"].append(run_fresh([skips, str(documents), "state", str(counts[-1])], TIMEOUT_S))
            say(f"first row: {record['cold'][-1]['seconds']:.3f} s cold, {record['warm'][-1]['seconds']:.3f} s warm")
    return record | {"load_average": os.getloadavg()}


def script_of(name: str) -> str:
    """Return the path of a script beside this one."""
    return str(Path(__file__).with_name(name))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description="First row of a step in the middle, beside skipping with datasets.")
    parser.add_argument("--documents", type=int, default=100_000_000, help="documents of our plan (100,000,000)")
    parser.add_argument("--peer-documents", type=int, default=120_000, help="documents of the peer's data (120,000)")
    parser.add_argument("--repetitions", type=int, default=7, help="fresh processes of each kind (default: 7)")
    parser.add_argument("--quick", action="store_true", help="200,000 and 2,000 documents, 2 repetitions")
    for name in ("write-corpus", "plan", "first-row"):
        parser.add_argument(f"--{name}", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder for resume.md and .json (default: results; --quick: none)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.documents, options.peer_documents, options.repetitions = 200_000, 2_000, 2
    elif options.out is None:
        options.out = Path(__file__).parent / "results"
    return options


def part(options: argparse.Namespace) -> dict[str, Any] | None:
    """Do what a fresh process was started for; None in the first process."""
    if options.first_row:
        return first_row(Path(options.first_row[0]), int(options.first_row[1]))
    if options.plan:
        return plan_corpus(Path(options.plan[0]), Path(options.plan[1]))
    if options.write_corpus:
        from benchmarks.synthetic_corpus import write_corpus

        corpus = write_corpus(Path(options.write_corpus[0]), int(options.write_corpus[1]))
        return {"num_tokens": corpus.info.num_tokens}
    return None


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, show its page and store it."""
    options = parse(arguments)
    result = part(options)
    if result is not None:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    from benchmarks.resume_report import markdown
    from benchmarks.stored_result import say, store

    record = measure(options)
    say(markdown(record))
    if options.out is not None:
        say("\n".join(f"written: {path.name}" for path in store("resume", markdown(record), record, options.out)))


if __name__ == "__main__":
    main()
