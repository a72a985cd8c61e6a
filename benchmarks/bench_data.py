"""Rows through both engines: speed, CPU, memory, the first batch, random reads, and what hides behind a step.

The corpus is real (the standard library's sources, a byte a token), the rows are 131,072 tokens long. The direct reader
reads in the rank's own process; Ray Data reads in tasks and streams to four consumers in one Ray on this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import json

import ray

from benchmarks import document_length_cost, length_peers, object_store_rows, random_reads
from benchmarks.data_report import markdown
from benchmarks.data_sides import WAIT_S, Consumer, Consumption, Engine, ProcessUsage, library_corpus, own_ray
from benchmarks.fresh_process import peak_rss_bytes, run_fresh
from benchmarks.stored_result import RESULTS, command, provenance, say, store
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import open_sources, plan_input
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan, write_segment
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.read.streamed_source import MAX_BLOCKS

CONTEXT_TOKENS = 131_072
ROWS_PER_STEP = 8
WORLD_SIZE = 4
STEP_S = 1.0
HIDDEN_STEPS = 20
SHORT_WINDOW = 3
"""Blocks of a short window, which has 7 rows of a rank, so that several borders of windows lie in the hidden run."""


def plan_rows(corpus: Corpus, folder: Path) -> Plan:
    """Plan the corpus to disk."""
    settings = PlanSettings(
        seed=0, context_tokens=CONTEXT_TOKENS, pad_multiple=256, rows_per_step=ROWS_PER_STEP, balance_steps=1
    )
    write_segment(folder, 0, plan_input(open_sources([(str(corpus.path), None)])), settings)
    return load_plan(folder)


def direct_rank(folder: Path, num_rows: int) -> dict[str, Any]:
    """Receive rows in this process alone, through the direct reader."""
    before = peak_rss_bytes()
    consumption = Consumption("direct", str(folder), 0, 1)
    taken = consumption.take(range(1, num_rows // ROWS_PER_STEP + 1))
    consumption.close()
    return {**taken, "rss_before_bytes": before, "peak_rss_bytes": peak_rss_bytes()}


def through_consumers(
    engine: Engine, folder: Path, steps: range, row_work_s: float = 0.0, max_blocks: int = MAX_BLOCKS
) -> dict[str, Any]:
    """Receive steps in four processes, the first two each by itself, and look at all processes the while."""
    ranks = [Consumer.remote(engine, str(folder), rank, WORLD_SIZE, max_blocks) for rank in range(WORLD_SIZE)]
    # Every process is up before the clock starts.
    ray.get([rank.take.remote([]) for rank in ranks], timeout=WAIT_S)
    usage, ended = ProcessUsage(), threading.Event()
    looks = [usage.look()[0]]
    peak: dict[str, float] = {}

    def watch() -> None:
        while not ended.wait(0.25):
            for name, value in usage.look()[1].items():
                peak[name] = max(peak.get(name, 0.0), value)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    parts = []
    for part in (steps[:1], steps[1:2], steps[2:]):
        limit = WAIT_S + len(part) * ROWS_PER_STEP * (row_work_s + 1.0)
        parts.append(ray.get([rank.take.remote(part, row_work_s) for rank in ranks], timeout=limit))
        looks.append(usage.look()[0])
    ended.set()
    watcher.join(WAIT_S)
    ray.get([rank.close.remote() for rank in ranks], timeout=WAIT_S)
    for rank in ranks:
        ray.kill(rank)
    return {
        "engine": engine,
        "num_rows": sum(len(one["waits_s"]) for one in parts[2]),
        "tokens": sum(one["tokens"] for one in parts[2]),
        "seconds": max(one["seconds"] for one in parts[2]),
        "start_cpu_s": sum(looks[2].values()) - sum(looks[0].values()),
        "cpu_s": sum(looks[3].values()) - sum(looks[2].values()),
        "cpu_of_s": {kind: used - looks[2].get(kind, 0.0) for kind, used in looks[3].items()},
        "first_s": max(one["waits_s"][0] for one in parts[0]),
        "second_s": max(max(one["waits_s"]) for one in parts[1]),
        "waits_s": [one["waits_s"] for one in parts[2]],
        "max_blocks": max_blocks,
        "rss": peak,
    }


def engines(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run both engines in turn."""
    steps = range(1, options.rows // ROWS_PER_STEP + 3)
    found: dict[str, Any] = {"alone": [], "runs": [], "hidden": []}
    with own_ray(num_cpus=WORLD_SIZE):
        for _ in range(options.repetitions):
            found["alone"].append(run_fresh([__file__, "--direct", str(folder), str(options.rows)], 600.0))
            for engine in ("direct", "ray"):
                run = through_consumers(engine, folder, steps)
                found["runs"].append(run)
                say(f"{engine}: {run['num_rows'] / run['seconds']:.1f} rows/s, {run['cpu_s']:.1f} CPU seconds")
        work = STEP_S / (ROWS_PER_STEP // WORLD_SIZE)
        for engine, blocks in (("direct", MAX_BLOCKS), ("ray", MAX_BLOCKS), ("ray", SHORT_WINDOW)):
            run = through_consumers(engine, folder, range(1, options.hidden_steps + 3), work, blocks)
            found["hidden"].append(run)
            say(f"{engine} behind steps of {STEP_S:.0f} s: longest wait {max(run['waits_s'][0]) * 1e3:.0f} ms")
    return found


def reads(corpus: Corpus, plan: Plan, folder: Path, count: int) -> dict[str, Any]:
    """Read documents at random, and the pieces of rows."""
    documents = np.random.default_rng(0).integers(0, corpus.num_documents, count)
    return {
        "documents": random_reads.ours(corpus, random_reads.whole_documents(corpus, documents)),
        "pieces": random_reads.ours(corpus, random_reads.row_pieces(plan, range(min(100, plan.num_rows)))),
        "default": random_reads.default_parquet(corpus, folder / "default.parquet", documents[:20]),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of everything that the options ask for."""
    record: dict[str, Any] = {
        **provenance(("numpy", "pyarrow", "ray"), "one machine, files in its page cache"),
        "command": command("bench_data.py"),
        "load_before": os.getloadavg(),
        "world_size": WORLD_SIZE,
        "step_s": STEP_S,
        "rows_per_step": ROWS_PER_STEP,
    }
    with tempfile.TemporaryDirectory(prefix="bench-data-") as temporary:
        root = Path(temporary)
        corpus = library_corpus(root, options.copies)
        plan = plan_rows(corpus, root / "plan")
        assert plan.num_rows >= options.rows + 2 * ROWS_PER_STEP, (plan.num_rows, options.rows)
        record["corpus"] = {
            "num_documents": corpus.num_documents,
            "num_tokens": corpus.info.num_tokens,
            "num_shards": len(corpus.info.shards),
            "num_bytes": sum(shard.tokens.num_bytes(np.dtype(corpus.info.dtype)) for shard in corpus.info.shards),
            "dtype": corpus.info.dtype,
            "num_rows": plan.num_rows,
        }
        record["reads"] = reads(corpus, plan, root, options.reads)
        record |= engines(root / "plan", options)
    return record | {"load_average": os.getloadavg()}


def measure_lengths(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of the cost of a row by document length."""
    record: dict[str, Any] = {
        **provenance(("numpy", "pyarrow", "datasets"), "one machine, files in its page cache"),
        "command": command("bench_data.py"),
        "load_before": os.getloadavg(),
        "lengths": {},
    }
    num_rows, rounds = (2, 1) if options.quick else (8, 3)
    with tempfile.TemporaryDirectory(prefix="bench-data-") as temporary:
        for length in document_length_cost.MEAN_LENGTHS:
            folder = Path(temporary) / str(length)
            corpus = document_length_cost.random_corpus(folder, length, 3 * num_rows * CONTEXT_TOKENS)
            plan = plan_rows(corpus, folder / "plan")
            cost = document_length_cost.row_cost(corpus, plan, folder / "flat.bin", num_rows, rounds)
            cost["peers"] = peers(corpus, folder / "peers", num_rows, rounds, options.mosaic_python)
            record["lengths"][str(length)] = cost
            say(f"documents of {length:,} tokens: {min(cost['first']) / min(cost['flat']):.1f} times the flat file")
    return record | {"load_average": os.getloadavg()}


def measure_object_store(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of what a rank waits for rows from an object store."""
    record: dict[str, Any] = {
        **provenance(("numpy", "ray", "obstore", "moto"), "one machine"),
        "command": command("bench_data.py"),
        "load_before": os.getloadavg(),
    }
    num_steps, work_s = (3, 0.2) if options.quick else (4, 2.0)
    with tempfile.TemporaryDirectory(prefix="bench-data-") as temporary:
        record["cases"] = object_store_rows.measure(Path(temporary), num_steps, work_s)
    return record | {"load_average": os.getloadavg()}


def peers(corpus: Corpus, folder: Path, num_rows: int, rounds: int, mosaic_python: str | None) -> dict[str, Any]:
    """Return the CPU seconds per row of other projects' readers of the same documents."""
    tokens = [corpus.read(number, 0, int(length)) for number, length in enumerate(corpus.lengths.tolist())]
    length_peers.store(folder, tokens, num_rows)
    found = {}
    for name, make in (("datasets", length_peers.hugging_face), ("Megatron", length_peers.megatron)):
        read = make(folder)
        assert all(np.array_equal(read(number), tokens[number]) for number in (0, len(tokens) - 1))
        found[name] = length_peers.row_seconds(folder, read, rounds)
    if mosaic_python is not None:
        ran = run_fresh([length_peers.__file__, str(folder), str(rounds)], 600.0, mosaic_python)
        found["Mosaic"] = ran["seconds"]
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description="Rows of 131,072 tokens through both engines.")
    parser.add_argument("--rows", type=int, default=400, help="rows of a run (default: 400)")
    parser.add_argument("--copies", type=int, default=2, help="copies of the standard library (default: 2)")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each engine, in turn (default: 3)")
    parser.add_argument("--hidden-steps", type=int, default=HIDDEN_STEPS, help="steps of 1 s (default: 20)")
    parser.add_argument("--reads", type=int, default=2000, help="random reads (default: 2,000)")
    parser.add_argument("--quick", action="store_true", help="40 rows, one run each, 4 steps of 1 s, 100 reads")
    parser.add_argument("--lengths", action="store_true", help="only the CPU per row by document length")
    parser.add_argument("--object-store", action="store_true", help="only the waits for rows from an object store")
    parser.add_argument("--mosaic-python", help="with --lengths: a Python that has mosaicml-streaming")
    parser.add_argument("--direct", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder for data.md and .json (default: results; --quick: none)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rows, options.copies, options.repetitions = 40, 1, 1
        options.hidden_steps, options.reads = 6, 100
    elif options.out is None:
        options.out = RESULTS
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, show its page and store it."""
    options = parse(arguments)
    if options.direct:
        say(json.dumps(direct_rank(Path(options.direct[0]), int(options.direct[1]))))
        return
    if options.lengths:
        name, record = "data_lengths", measure_lengths(options)
        page = document_length_cost.markdown(record)
    elif options.object_store:
        name, record = "data_object_store", measure_object_store(options)
        page = object_store_rows.markdown(record)
    else:
        name, record = "data", measure(options)
        page = markdown(record)
    say(page)
    if options.out is not None:
        say("\n".join(f"written: {path.name}" for path in store(name, page, record, options.out)))


if __name__ == "__main__":
    main()
