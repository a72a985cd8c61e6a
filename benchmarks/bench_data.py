"""Rows through both data engines: speed, CPU, memory, the first row, and what a rank waits behind its steps.

The corpus is real (the standard library's sources, a byte per token), the rows have 131,072 tokens. The direct reader
reads in the rank's own process; Ray Data reads in tasks and streams to four consumers in one Ray on this machine.
"""

from __future__ import annotations

import argparse
import shutil
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal

import psutil
import ray

from benchmarks.runner import MIB, Benchmark, Record, columns, header, main, say, spread
from ray_ulysses.cluster.ray_access import private_session
from ray_ulysses.cluster.stream import RayStreams
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet, open_sources, plan_input
from ray_ulysses.data.plan.plan_files import load_plan, write_segment
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.read.reader import RowReader
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.data.read.streamed_source import StreamedSource
from ray_ulysses.data.sources.units import SourceSpec
from tests.local_preparation import prepare_local

Engine = Literal["direct", "ray"]
ENGINES: dict[Engine, str] = {"direct": "direct", "ray": "Ray Data"}
CONTEXT_TOKENS, ROWS_PER_STEP, WORLD_SIZE = 131_072, 8, 4
STEP_S, WAIT_S = 1.0, 120.0


def library_corpus(folder: Path, copies: int) -> Corpus:
    """Prepare copies of the standard library's sources, a document per file and a token per byte."""
    root = Path(sysconfig.get_path("stdlib"))
    for copy in range(copies):
        shutil.copytree(root, folder / "sources" / str(copy), ignore=shutil.ignore_patterns("site-packages", "*.so"))
    spec = SourceSpec(paths=(str(folder / "sources"),), pattern="*.py")
    return prepare_local(PrepareRequest(sources=spec, out=folder / "corpus", duplicates="keep", unit_bytes=4 << 20))


@contextmanager
def own_ray(num_cpus: int) -> Iterator[None]:
    """Start a Ray of this process's own and end it again."""
    with private_session():
        ray.init(
            address="local", num_cpus=num_cpus, include_dashboard=False, object_store_memory=256 << 20,
            log_to_driver=False, configure_logging=False,
        )  # fmt: skip
        try:
            yield
        finally:
            ray.shutdown()


class Consumption:
    """A rank's source, and how long it waits for its rows."""

    def __init__(self, engine: Engine, plan_folder: str, rank: int, world_size: int) -> None:
        plan = load_plan(Path(plan_folder))
        reader = RowReader(CorpusSet(plan.newest.sources), plan)
        place = {"dp_rank": rank, "dp_size": world_size, "sp_rank": 0, "sp_size": 1, "timeout_s": WAIT_S}
        self._source: DirectSource
        if engine == "direct":
            self._source = DirectSource(reader, plan, **place)  # type: ignore[arg-type]
        else:
            self._source = StreamedSource(reader, plan, streams=RayStreams(), **place)  # type: ignore[arg-type]

    def take(self, steps: Sequence[int], row_work_s: float = 0.0) -> dict[str, Any]:
        """Receive steps, sleep so long after each row, and return the seconds waited for each row, in order."""
        waits, tokens = [], 0
        start = time.perf_counter()
        for step in steps:
            before = time.perf_counter()
            for row in self._source.step(step):
                waits.append(time.perf_counter() - before)
                tokens += row.input_ids.size
                time.sleep(row_work_s)
                before = time.perf_counter()
        return {"waits_s": waits, "tokens": tokens, "seconds": time.perf_counter() - start}

    def close(self) -> None:
        """Close the source."""
        self._source.close()


@ray.remote(num_cpus=0)
class Consumer(Consumption):
    """A rank in a process of its own."""


class Family:
    """CPU time and memory of all processes below this one, those that have ended since included."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, float], float] = {}
        self.peak_bytes = 0

    def look(self) -> float:
        """Return the CPU seconds so far of all processes seen."""
        held = 0
        for process in psutil.Process().children(recursive=True):
            try:
                times, memory = process.cpu_times(), process.memory_info()
                self._seconds[process.pid, process.create_time()] = times.user + times.system
            except psutil.Error:
                continue
            held += memory.rss - getattr(memory, "shared", 0)
        self.peak_bytes = max(self.peak_bytes, held)
        return sum(self._seconds.values())


def through_consumers(engine: Engine, folder: Path, steps: range, row_work_s: float = 0.0) -> dict[str, Any]:
    """Receive steps in four processes, the first two each by itself, and look at all processes meanwhile."""
    ranks = [Consumer.remote(engine, str(folder), rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
    # Every process is up before the clock starts.
    ray.get([rank.take.remote([]) for rank in ranks], timeout=WAIT_S)
    family, ended = Family(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.25):
            family.look()

    looks = [family.look()]
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    parts = []
    for part in (steps[:1], steps[1:2], steps[2:]):
        limit = WAIT_S + len(part) * ROWS_PER_STEP * (row_work_s + 1.0)
        parts.append(ray.get([rank.take.remote(part, row_work_s) for rank in ranks], timeout=limit))
        looks.append(family.look())
    ended.set()
    watcher.join(WAIT_S)
    ray.get([rank.close.remote() for rank in ranks], timeout=WAIT_S)
    for rank in ranks:
        ray.kill(rank)
    return {
        "engine": engine,
        "num_rows": sum(len(one["waits_s"]) for one in parts[2]),
        "seconds": max(one["seconds"] for one in parts[2]),
        "cpu_s": looks[3] - looks[2],
        "start_cpu_s": looks[2] - looks[0],
        "first_s": max(one["waits_s"][0] for one in parts[0]),
        "second_s": max(max(one["waits_s"]) for one in parts[1]),
        "waits_s": [one["waits_s"] for one in parts[2]],
        "peak_bytes": family.peak_bytes,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both engines in turn."""
    record: dict[str, Any] = {"runs": [], "hidden": []}
    with tempfile.TemporaryDirectory(prefix="bench-data-") as temporary:
        corpus = library_corpus(Path(temporary), options.copies)
        plan = Path(temporary) / "plan"
        settings = PlanSettings(
            seed=0, context_tokens=CONTEXT_TOKENS, pad_multiple=256, rows_per_step=ROWS_PER_STEP, balance_steps=1
        )
        write_segment(plan, 0, plan_input(open_sources([(str(corpus.path), None)])), settings)
        record["corpus"] = {"num_documents": corpus.num_documents, "num_tokens": corpus.info.num_tokens}
        with own_ray(num_cpus=WORLD_SIZE):
            for _ in range(options.repetitions):
                for engine in ENGINES:
                    run = through_consumers(engine, plan, range(1, options.rows // ROWS_PER_STEP + 3))
                    record["runs"].append(run)
                    say(f"{engine}: {run['num_rows'] / run['seconds']:.1f} rows/s, {run['cpu_s']:.1f} CPU seconds")
            work = STEP_S / (ROWS_PER_STEP // WORLD_SIZE)
            for engine in ENGINES:
                record["hidden"].append(through_consumers(engine, plan, range(1, options.steps + 3), work))
    return record


def page(record: Record) -> str:
    """Return the page."""
    corpus = record["corpus"]
    text = (
        f"The standard library's sources: {corpus['num_documents']:,} documents, {corpus['num_tokens']:,} tokens. A "
        f"row is {CONTEXT_TOKENS:,} tokens; its ids, labels and positions arrive as int64. The first step is read "
        "directly, and Ray Data starts its readers after it: **first row** and **second step** are the longest waits "
        "of any rank for them, and are not in the other figures. CPU and memory (resident, not shared) are of all "
        "processes, Ray's included; ranks, readers and the benchmark share the cores. Both engines give the same "
        "rows, byte for byte."
    )
    groups = {
        f"{WORLD_SIZE} consumers, {name}": [run for run in record["runs"] if run["engine"] == engine]
        for engine, name in ENGINES.items()
    }

    def waits(name: str) -> Callable[[Any], str]:
        return lambda line: f"{median(run[name] for run in line[1]):.3f} s"

    speed = columns(
        list(groups.items()),
        engine=lambda line: line[0],
        rows_per_second=lambda line: spread([run["num_rows"] / run["seconds"] for run in line[1]], "{:.1f}"),
        CPU_per_row=lambda line: spread([1e3 * run["cpu_s"] / run["num_rows"] for run in line[1]], "{:.1f}") + " ms",
        start_CPU=waits("start_cpu_s"),
        first_row=waits("first_s"),
        second_step=waits("second_s"),
        peak_memory=lambda line: f"{max(run['peak_bytes'] for run in line[1]) / MIB:,.0f} MiB",
    )
    hidden = columns(
        record["hidden"],
        engine=lambda run: ENGINES[run["engine"]],
        wait_for_a_row=lambda run: f"{1e3 * median(wait for rank in run['waits_s'] for wait in rank):.2f} ms",
        longest=lambda run: f"{1e3 * max(map(max, run['waits_s'])):.1f} ms",
        worst_ranks_share=lambda run: (
            f"{max(map(sum, run['waits_s'])) / (run['num_rows'] * STEP_S / ROWS_PER_STEP):.3%}"
        ),
    )
    behind = f"## Waits behind steps of {STEP_S:.0f} s, {WORLD_SIZE} ranks; the bound is 0"
    return "\n\n".join([header("Rows through both engines", record, text), speed, behind, hidden])


BENCHMARK = Benchmark(
    name="data",
    about="Rows of 131,072 tokens through both engines.",
    measure=measure,
    page=page,
    packages=("numpy", "pyarrow", "ray"),
    hardware="one machine, files in its page cache",
    options={
        "rows": (400, "rows of a run"),
        "copies": (2, "copies of the standard library"),
        "repetitions": (3, "runs of each engine, in turn"),
        "steps": (20, "steps of 1 s"),
    },
    quick={"rows": 40, "copies": 1, "repetitions": 1, "steps": 6},
)

if __name__ == "__main__":
    main(BENCHMARK)
