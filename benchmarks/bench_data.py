"""Rows through both data engines: speed, CPU, memory, the first row, and what a rank waits behind its steps.

The corpus is real (the standard library's sources, a byte per token), the rows have 131,072 tokens. The direct reader
reads in the rank's own process; Ray Data reads in tasks and streams to four consumers in one Ray on this machine.
``python -m benchmarks.bench_data store`` measures the waits for rows from a slow object store.
"""

from __future__ import annotations

import argparse
import json
import os
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
from unittest import mock

import numpy as np
import psutil
import ray

from benchmarks.runner import MIB, Benchmark, Record, columns, fresh, header, main, peak_rss_bytes, say, spread
from ray_ulysses.cluster.ray_access import private_session
from ray_ulysses.cluster.stream import RayStreams
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet, open_sources, plan_input
from ray_ulysses.data.plan.plan_files import load_plan, write_segment
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.prepare.upload import CorpusUpload
from ray_ulysses.data.read.reader import RowReader
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.data.read.streamed_source import StreamedSource
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.storage.block_cache import SIZE_VARIABLE
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import open_folder
from tests.local_preparation import prepare_local

Engine = Literal["direct", "ray"]
ENGINES: dict[Engine, str] = {"direct": "direct", "ray": "Ray Data"}
CONTEXT_TOKENS, ROWS_PER_STEP, WORLD_SIZE = 131_072, 8, 4
STEP_S, WAIT_S = 1.0, 120.0
MEAN_LENGTHS = {300: 4 << 10, 20_000: 128 << 10}
"""Documents in the store, and the bytes of text of a shard, so that a row's documents lie in about as many shards."""
DELAYS_S = (0.02, 0.05)


def library_corpus(folder: Path, copies: int) -> Corpus:
    """Prepare copies of the standard library's sources, a document per file and a token per byte."""
    root = Path(sysconfig.get_path("stdlib"))
    for copy in range(copies):
        shutil.copytree(root, folder / "sources" / str(copy), ignore=shutil.ignore_patterns("site-packages", "*.so"))
    spec = SourceSpec(paths=(str(folder / "sources"),), pattern="*.py")
    return prepare_local(PrepareRequest(sources=spec, out=folder / "corpus", duplicates="keep", unit_bytes=4 << 20))


def random_documents(folder: Path, mean_length: int, num_tokens: int) -> Path:
    """Write documents of random letters whose lengths lie evenly between half and one and a half of the mean."""
    rng = np.random.default_rng(mean_length)
    folder.mkdir(parents=True)
    path = folder / "documents.jsonl"
    with path.open("w") as file:
        for length in rng.integers(mean_length // 2, mean_length * 3 // 2, num_tokens // mean_length).tolist():
            text = rng.integers(ord("a"), ord("z") + 1, length, dtype=np.uint8).tobytes().decode()
            file.write(json.dumps({"text": text}) + "\n")
    return path


def plan_rows(location: str, folder: Path, rows_per_step: int = ROWS_PER_STEP) -> Path:
    """Plan a corpus to disk."""
    settings = PlanSettings(
        seed=0, context_tokens=CONTEXT_TOKENS, pad_multiple=256, rows_per_step=rows_per_step, balance_steps=1
    )
    write_segment(folder, 0, plan_input(open_sources([(location, None)])), settings)
    return folder


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


def read_alone(folder: str, num_rows: int) -> dict[str, Any]:
    """Receive rows in this process through the direct reader."""
    consumption = Consumption("direct", folder, 0, 1)
    start = time.process_time()
    taken = consumption.take(range(1, num_rows // ROWS_PER_STEP + 1))
    cpu_s = time.process_time() - start
    consumption.close()
    return {
        "num_rows": len(taken["waits_s"]),
        "seconds": taken["seconds"],
        "cpu_s": cpu_s,
        "peak_bytes": peak_rss_bytes(),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both engines in turn."""
    record: dict[str, Any] = {"alone": [], "runs": [], "hidden": []}
    with tempfile.TemporaryDirectory(prefix="bench-data-") as temporary:
        corpus = library_corpus(Path(temporary), options.copies)
        plan = plan_rows(str(corpus.path), Path(temporary) / "plan")
        record["corpus"] = {"num_documents": corpus.num_documents, "num_tokens": corpus.info.num_tokens}
        with own_ray(num_cpus=WORLD_SIZE):
            for _ in range(options.repetitions):
                record["alone"].append(fresh(read_alone, plan, options.rows))
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
    groups = {"one process, direct": record["alone"]}
    groups |= {
        f"{WORLD_SIZE} consumers, {name}": [run for run in record["runs"] if run["engine"] == engine]
        for engine, name in ENGINES.items()
    }

    def waits(name: str) -> Callable[[Any], str]:
        return lambda line: f"{median(run[name] for run in line[1]):.3f} s" if name in line[1][0] else ""

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


def measure_store(options: argparse.Namespace) -> dict[str, Any]:
    """Receive rows from a store that answers late, one rank that works on each; no node keeps a copy."""
    from tests.s3_server import faulty_proxy, serve_s3

    found = []
    with tempfile.TemporaryDirectory(prefix="bench-data-") as temporary, serve_s3() as s3, faulty_proxy(s3) as proxy:
        environment = {**s3.environment(), "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", SIZE_VARIABLE: "0"}
        with mock.patch.dict(os.environ, environment), own_ray(num_cpus=2):
            for length, unit_bytes in MEAN_LENGTHS.items():
                proxy.delay_s, location = 0.0, s3.uri(f"corpora/{length}", proxy.port)
                folder = Path(temporary) / str(length)
                texts = random_documents(folder, length, (2 * options.steps + 1) * CONTEXT_TOKENS)
                spec = SourceSpec(paths=(str(texts),))
                corpus = prepare_local(
                    PrepareRequest(sources=spec, out=folder / "corpus", duplicates="keep", unit_bytes=unit_bytes)
                )
                store = open_folder(location)
                assert isinstance(store, ObjectStore)
                CorpusUpload(store, str(store), corpus.info.signature).run(corpus.path, say)
                plan = plan_rows(location, folder / "plan", 2)
                for proxy.delay_s in DELAYS_S:
                    for engine in ENGINES:
                        rank = Consumption(engine, str(plan), 0, 1)
                        # The first step is read directly by both; Ray Data starts after it.
                        first = rank.take(range(1, 2), options.work_s)
                        later = rank.take(range(2, options.steps + 1), options.work_s)
                        rank.close()
                        case = {"length": length, "delay_s": proxy.delay_s, "engine": engine}
                        found.append({**case, "first_s": first["waits_s"][0], "waits_s": later["waits_s"]})
                        say(str(found[-1]))
    return {"cases": found, "work_s": options.work_s}


def store_page(record: Record) -> str:
    """Return the page on the object store."""
    text = (
        f"One rank receives rows of {CONTEXT_TOKENS:,} tokens from an S3 server of this machine behind a proxy that "
        f"delays each request, and works {record['work_s']:g} s on each row. Nothing is kept on the node between rows."
    )
    cases = columns(
        record["cases"],
        mean_document=lambda one: f"{one['length']:,}",
        delay=lambda one: f"{1e3 * one['delay_s']:.0f} ms",
        engine=lambda one: ENGINES[one["engine"]],
        first_row=lambda one: f"{one['first_s']:.2f} s",
        later_rows=lambda one: spread(one["waits_s"]) + " s",
    )
    return "\n\n".join([header("Rows from an object store that answers late", record, text), cases])


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
STORE = Benchmark(
    name="data_object_store",
    about="Waits for rows from an object store that answers late.",
    measure=measure_store,
    page=store_page,
    packages=("numpy", "ray", "obstore", "moto"),
    hardware="one machine",
    options={"steps": (4, "steps of two rows"), "work_s": (2.0, "seconds of work on a row")},
    quick={"steps": 3, "work_s": 0.2},
)

if __name__ == "__main__":
    main(BENCHMARK, other={"store": STORE})
