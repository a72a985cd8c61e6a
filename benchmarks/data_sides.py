"""Both engines as a rank has them, and a corpus of real sources for them: what ``bench_data.py`` times."""

from __future__ import annotations

import shutil
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import psutil
import ray

from ray_ulysses.cluster.ray_access import private_session
from ray_ulysses.cluster.stream import RayStreams
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.read.reader import RowReader
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.data.read.streamed_source import MAX_BLOCKS, StreamedSource
from ray_ulysses.data.sources.units import SourceSpec
from tests.local_preparation import prepare_local

Engine = Literal["direct", "ray"]
WAIT_S = 120.0
UNIT_BYTES = 4 << 20


def library_corpus(directory: Path, copies: int) -> Corpus:
    """Prepare copies of the standard library's sources, a document a file and a token a byte."""
    sources = directory / "sources"
    root = Path(sysconfig.get_path("stdlib"))
    for copy in range(copies):
        for path in root.rglob("*.py"):
            if "site-packages" not in path.parts:
                target = sources / f"copy-{copy}" / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    spec = SourceSpec(paths=(str(sources),), pattern="*.py")
    return prepare_local(
        PrepareRequest(sources=spec, out=directory / "corpus", duplicates="keep", unit_bytes=UNIT_BYTES)
    )


@contextmanager
def own_ray(num_cpus: int) -> Iterator[None]:
    """Start a Ray of this process's own and end it again."""
    with private_session():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=256 << 20,
            log_to_driver=False,
            configure_logging=False,
        )
        try:
            yield
        finally:
            ray.shutdown()


class ProcessUsage:
    """CPU time and memory of all processes below this one, those that end in between included where seen."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, float], tuple[str, float]] = {}

    def look(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return CPU seconds so far of all processes seen, and resident bytes now, both by kind of process."""
        resident: dict[str, float] = {}
        for process in psutil.Process().children(recursive=True):
            try:
                times, memory = process.cpu_times(), process.memory_info()
                key = (process.pid, process.create_time())
                kind = _kind(process)
            except psutil.Error:
                continue
            self._seconds[key] = (kind, times.user + times.system)
            resident[kind] = resident.get(kind, 0.0) + memory.rss - getattr(memory, "shared", 0)
        seconds: dict[str, float] = {}
        for kind, used in self._seconds.values():
            seconds[kind] = seconds.get(kind, 0.0) + used
        return seconds, resident


def _kind(process: psutil.Process) -> str:
    """Return what a process is to Ray: a consumer, a reader, the stream's own, or Ray's system."""
    title = (process.cmdline() or [process.name()])[0]
    if title.startswith("ray::Consumer"):
        return "consumers"
    return "readers and idle workers" if title.startswith("ray::") else "Ray's system"


class Consumption:
    """A rank's source, and how long it waits for its rows."""

    def __init__(self, engine: Engine, plan_folder: str, rank: int, world_size: int, max_blocks: int = 0) -> None:
        plan = load_plan(Path(plan_folder))
        reader = RowReader(CorpusSet(plan.newest.sources), plan)
        place: dict[str, Any] = {
            "dp_rank": rank, "dp_size": world_size, "sp_rank": 0, "sp_size": 1, "timeout_s": WAIT_S
        }  # fmt: skip
        self._source: DirectSource
        if engine == "direct":
            self._source = DirectSource(reader, plan, **place)
        else:
            blocks = max_blocks or MAX_BLOCKS
            self._source = StreamedSource(reader, plan, streams=RayStreams(), max_blocks=blocks, **place)

    def take(self, steps: Sequence[int], row_work_s: float = 0.0) -> dict[str, Any]:
        """Receive steps, work so long on each row, and return the seconds waited for each row, in order."""
        waits, tokens = [], 0
        start, cpu_start = time.perf_counter(), time.process_time()
        for step in steps:
            before = time.perf_counter()
            for row in self._source.step(step):
                waits.append(time.perf_counter() - before)
                tokens += row.input_ids.size
                time.sleep(row_work_s)
                before = time.perf_counter()
        seconds = time.perf_counter() - start
        return {"waits_s": waits, "tokens": tokens, "seconds": seconds, "cpu_s": time.process_time() - cpu_start}

    def close(self) -> None:
        """Close the source."""
        self._source.close()


@ray.remote(num_cpus=0)
class Consumer(Consumption):
    """A rank in a process of its own."""
