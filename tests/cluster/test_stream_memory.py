"""Readers that Ray's memory monitor kills."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from ray_ulysses.cluster.local_cluster import LocalCluster
from ray_ulysses.errors import RunError
from tests.cluster.one_ray.test_stream import place_of, plan_of, source_of
from tests.cluster.streams import Reads, WatchedStreams, streamed_source
from tests.unit.data.corpora import text_corpus, varied_texts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture
def small_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A node that has always too little memory, and looks every few seconds."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "15000")
    cluster = LocalCluster(cpus_per_node=2, head_cpus=2)
    try:
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_a_block_whose_readers_the_memory_monitor_kills_is_an_error_in_time(small_node: None, tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path, varied_texts(60, longest=3000), unit_bytes=20_000)
    plan, reads = plan_of(corpus), Reads(tmp_path / "reads", held=0)
    source = streamed_source(
        source_of(corpus), plan, WatchedStreams(reads), block_tokens=1, timeout_s=50.0, **place_of(0, 1, 1)
    )
    with pytest.raises(RunError, match=r"no row arrived for 50 s.*set data\.engine=local"):
        list(source.step(1))
    assert any(not psutil.pid_exists(process) for _, process in reads.of(0)), "a reader was killed"
    source.close()
