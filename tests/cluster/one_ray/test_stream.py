from __future__ import annotations

import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from ray_ulysses.cluster.prepare_job import run_preparation
from ray_ulysses.cluster.stream import RayStreams
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.prepare.upload import CorpusUpload
from ray_ulysses.data.read.reader import RowReader, RowSlice
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.data.read.streamed_source import StreamedSource
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.errors import RunError
from ray_ulysses.run.secrets_file import SecretsFile
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import open_folder
from tests.breadth import fast_only
from tests.cluster.streams import WAIT_S, Reads, WatchedStreams, executions, streamed_source, take_streamed
from tests.local_preparation import preparing
from tests.polling import wait_until
from tests.s3_server import serve_s3
from tests.unit.data.corpora import text_corpus, varied_texts, write_texts
from tests.unit.data.plans import build_plan

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    # Documents from 1 to 3,000 tokens: rows, and so blocks, of very uneven size.
    return text_corpus(tmp_path_factory.mktemp("stream"), varied_texts(60, longest=3000), unit_bytes=20_000)


def plan_of(corpus: Corpus, rows_per_step: int = 5, context_tokens: int = 2048) -> Plan:
    settings = PlanSettings(seed=1, context_tokens=context_tokens, pad_multiple=8, rows_per_step=rows_per_step)
    return build_plan(corpus.lengths, corpus.fingerprint, settings)


def source_of(corpus: Corpus) -> PlannedSource:
    return PlannedSource(
        path=str(corpus.path), fingerprint=corpus.fingerprint, num_documents=corpus.num_documents,
        has_weights=corpus.has_weights,
    )  # fmt: skip


def place_of(rank: int, world_size: int, sp_size: int) -> dict[str, Any]:
    dp_rank, sp_rank = divmod(rank, sp_size)
    return {"dp_rank": dp_rank, "dp_size": world_size // sp_size, "sp_rank": sp_rank, "sp_size": sp_size}


def sources_of(
    corpus: Corpus, plan: Plan, world_size: int, sp_size: int, streams: RayStreams | None = None, **options: Any
) -> list[StreamedSource]:
    places = [place_of(rank, world_size, sp_size) for rank in range(world_size)]
    return [
        streamed_source(source_of(corpus), plan, streams or WatchedStreams(), **place, **options) for place in places
    ]


def take(sources: list[StreamedSource], steps: range) -> list[list[RowSlice]]:
    """Every rank's slices of the steps, each rank in a thread of its own; few of them are read directly."""
    with ThreadPoolExecutor(len(sources)) as pool:
        return list(pool.map(lambda source: take_streamed(source, steps), sources, timeout=2 * WAIT_S))


def direct(corpus: Corpus, plan: Plan, rank: int, world_size: int, sp_size: int, steps: range) -> list[RowSlice]:
    source = DirectSource(RowReader(corpus, plan), plan, **place_of(rank, world_size, sp_size))
    rows = [received for step in steps for received in source.step(step)]
    source.close()
    return rows


def assert_same(ours: list[RowSlice], theirs: list[RowSlice]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for name in RowSlice.__slots__:
            first, second = getattr(one, name), getattr(other, name)
            assert np.array_equal(first, second), name
            assert not isinstance(first, np.ndarray) or first.dtype == second.dtype


@pytest.mark.parametrize("world", fast_only([(4, 2), (3, 1)], (4, 2)), ids=str)
def test_the_stream_is_the_direct_reader_byte_for_byte(cluster: None, corpus: Corpus, world: tuple[int, int]) -> None:
    (world_size, sp_size), plan = world, plan_of(corpus)
    assert len({plan.row_tokens(row) for row in range(plan.num_rows)}) > 3, "rows must differ in size"
    sources = sources_of(corpus, plan, world_size, sp_size)
    steps = range(1, plan.num_steps + 1)
    for rank, received in enumerate(take(sources, steps)):
        assert_same(received, direct(corpus, plan, rank, world_size, sp_size, steps))
    for source in sources:
        source.close()


@pytest.mark.slow
def test_a_corpus_is_made_on_an_object_store_and_streamed_from_there(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster's processes know nothing of the store but the file of secrets."""
    with serve_s3() as s3:
        secrets = tmp_path / "secrets.env"
        cache = f"RAY_ULYSSES_CACHE_DIR={tmp_path / 'cache'}"
        secrets.write_text("\n".join([*(f"{name}={value}" for name, value in s3.environment().items()), cache]))
        secrets.chmod(0o600)
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        sources = SourceSpec(paths=(str(write_texts(tmp_path / "texts", varied_texts(60, longest=900))),))
        request = PrepareRequest(sources=sources, out=tmp_path / "corpus", unit_bytes=5000)
        with preparing(request) as preparation:
            corpus = run_preparation(preparation, node=ray.get_runtime_context().get_node_id())
        folder = open_folder("s3://bucket/corpora/one")
        assert isinstance(folder, ObjectStore)
        CorpusUpload(folder, str(folder), corpus.info.signature).run(corpus.path, print)
        plan = plan_of(corpus)
        source = replace(source_of(corpus), path="s3://bucket/corpora/one")
        steps = range(1, plan.num_steps + 1)
        file = SecretsFile(path=str(secrets), names=(*s3.environment(), "RAY_ULYSSES_CACHE_DIR"))
        ends = [
            streamed_source(source, plan, WatchedStreams(secrets=file), **place_of(rank, 2, 2)) for rank in range(2)
        ]
        for rank, received in enumerate(take(ends, steps)):
            assert_same(received, direct(corpus, plan, rank, 2, 2, steps))
        for one in ends:
            one.close()
        assert list((tmp_path / "cache" / "blocks").iterdir()), "the tasks keep what they read"


@ray.remote(num_cpus=0)
class Rank:
    """A worker process with its own source."""

    def __init__(
        self, source: PlannedSource, plan: Plan, rank: int, world: tuple[int, int], num_cpus: float = 0.25,
        before_read: Reads | None = None, **options: Any,
    ) -> None:  # fmt: skip
        streams = WatchedStreams(before_read, num_cpus=num_cpus)
        given = {"block_tokens": 2000, "max_blocks": 3, **place_of(rank, *world), **options}
        self._source = streamed_source(source, plan, streams, **given)

    def step(self, step: int, die_at: int | None) -> list[RowSlice]:
        """Receive a step; the process dies in the middle where it is told to."""
        received = []
        for number, one in enumerate(self._source.step(step)):
            if number == die_at:
                os._exit(1)
            received.append(one)
        return received

    def take(self, first: int, last: int) -> list[RowSlice]:
        return take_streamed(self._source, range(first, last))

    def close(self) -> None:
        self._source.close()


@pytest.mark.slow
def test_ranks_in_processes_of_their_own_receive_their_slices(cluster: None, tmp_path: Path) -> None:
    """The tasks of ten streams take turns at four CPUs."""
    world, num_cpus = (10, 2), 1.0
    corpus = text_corpus(tmp_path, varied_texts(90, longest=3000), unit_bytes=20_000)
    plan = plan_of(corpus)
    ranks = [Rank.remote(source_of(corpus), plan, rank, world, num_cpus) for rank in range(world[0])]
    steps = range(2, plan.num_steps + 1)
    received = ray.get([rank.take.remote(steps.start, steps.stop) for rank in ranks], timeout=4 * WAIT_S)
    for rank in range(world[0]):
        assert_same(received[rank], direct(corpus, plan, rank, *world, steps))
    assert len(steps) > 3, "several windows"
    ray.get([rank.close.remote() for rank in ranks], timeout=WAIT_S)
    for rank in ranks:
        ray.kill(rank)


@ray.remote(num_cpus=4)
class Taker:
    """Takes all CPUs."""

    def has_all(self) -> bool:
        return True


def test_a_cluster_without_free_cpus_is_an_error_and_no_hang(cluster: None, corpus: Corpus) -> None:
    plan, before = plan_of(corpus), executions()
    taker: Any = Taker.remote()  # type: ignore[attr-defined]
    ray.get(taker.has_all.remote(), timeout=WAIT_S)
    (source,) = sources_of(corpus, plan, 1, 1, streams=RayStreams(num_cpus=1.0), timeout_s=3.0)
    slowly = (time.sleep(0.4) for step in range(1, plan.num_steps + 1) for _ in source.step(step))
    with pytest.raises(RunError, match=r"stream did not start within 3 s.* no node has cluster\.data_cpus CPUs free"):
        list(slowly)
    # Its task still waits for CPUs. What is left of a stream when Ray is ended would start a Ray of its own.
    source.close()
    ends = {"ray-ulysses-read-ahead"}
    wait_until(
        lambda: executions() <= before and ends.isdisjoint(one.name for one in threading.enumerate()),
        "the end of what was started", timeout_s=10.0,
    )  # fmt: skip
    ray.kill(taker)


@pytest.mark.slow
def test_every_planned_piece_is_received_once_though_workers_are_killed_at_random_rows(
    cluster: None, corpus: Corpus
) -> None:
    """A step counts when every rank has received all of it, as a checkpoint after it would have it."""
    worlds = [(4, 2), (2, 1), (3, 1), (4, 4), (2, 2)]
    plan = plan_of(corpus)
    rng = np.random.default_rng(7)
    kept: dict[int, list[RowSlice]] = {}
    num_killed = 0
    for attempt in range(100):
        world_size, sp_size = worlds[attempt % len(worlds)]
        ranks = [Rank.remote(source_of(corpus), plan, rank, (world_size, sp_size)) for rank in range(world_size)]
        last = len(kept) + 1 + int(rng.integers(0, 3))
        victim = int(rng.integers(0, world_size))
        try:
            for step in range(len(kept) + 1, plan.num_steps + 1):
                micro_batches = len(plan.step_schedule(step, world_size // sp_size))
                die_at = int(rng.integers(0, micro_batches)) if step == last else None
                jobs = [rank.step.remote(step, die_at if at == victim else None) for at, rank in enumerate(ranks)]
                kept[step] = [one for received in ray.get(jobs, timeout=WAIT_S) for one in received]
        except ray.exceptions.RayActorError:
            num_killed += 1
        for rank in ranks:
            ray.kill(rank)
        if len(kept) == plan.num_steps:
            break
    assert num_killed >= 4
    received: Counter[tuple[int, int, int]] = Counter()
    for step, slices in kept.items():
        labels = sum(one.num_supervised for one in slices)
        assert labels == plan.step_tokens(step), "the denominator is the plan's"
        received += pieces_of(corpus, plan, slices)
    planned = Counter((p.document, p.start, p.length) for row in range(plan.num_rows) for p in plan.pieces(row))
    assert received == planned


def pieces_of(corpus: Corpus, plan: Plan, slices: list[RowSlice]) -> Counter[tuple[int, int, int]]:
    """The (document, start, length) of rows whose tokens are those of the documents; all slices of a row are there."""
    found: Counter[tuple[int, int, int]] = Counter()
    rows: dict[int, dict[int, RowSlice]] = {}
    for one in slices:
        if not one.is_filler:
            assert one.sp_rank not in rows.setdefault(one.row, {}), "a slice came twice"
            rows[one.row][one.sp_rank] = one
    for row, parts in rows.items():
        assert sorted(parts) == list(range(parts[0].sp_size)), "a slice is missing"
        tokens = np.concatenate([parts[rank].input_ids for rank in sorted(parts)])
        begin = 0
        for piece in plan.pieces(row):
            expected = corpus.read(piece.document, piece.start, piece.length)
            assert np.array_equal(tokens[begin : begin + piece.length], expected)
            begin += piece.length
            found[(piece.document, piece.start, piece.length)] += 1
    return found
