"""Streams of ranks on several nodes: where their blocks are read, and what becomes of them when that node is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._raylet import RAY_NODE_ID_KEY  # type: ignore[attr-defined]  # compiled

from ray_ulysses.cluster.local_cluster import LocalCluster
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.read.reader import RowSlice
from tests.cluster.one_ray.test_stream import Rank, Taker, assert_same, direct, plan_of, source_of
from tests.cluster.streams import WAIT_S, Reads
from tests.polling import wait_until
from tests.unit.data.corpora import text_corpus, varied_texts

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    """Three raylets, of which the head, which the test is on, has no CPUs."""
    cluster = LocalCluster(cpus_per_node=2)
    try:
        for _ in range(2):
            cluster.add_node()
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return text_corpus(tmp_path_factory.mktemp("nodes"), varied_texts(60, longest=3000), unit_bytes=20_000)


def rank_on(node: str, corpus: Corpus, plan: Plan, reads: Reads, rank: int = 0, world_size: int = 1) -> Any:
    """Start a rank with a block per row."""
    actor = Rank.options(label_selector={RAY_NODE_ID_KEY: node})  # type: ignore[attr-defined]
    return actor.remote(
        source_of(corpus), plan, rank, (world_size, 1), before_read=reads, block_tokens=1, max_blocks=64
    )


def take(rank: Any, steps: range) -> list[RowSlice]:
    return ray.get(rank.take.remote(steps.start, steps.stop), timeout=2 * WAIT_S)


def close(rank: Any) -> None:
    ray.get(rank.close.remote(), timeout=WAIT_S)
    ray.kill(rank)


def take_all_cpus(node: str) -> Any:
    taker = Taker.options(num_cpus=2, label_selector={RAY_NODE_ID_KEY: node}).remote()  # type: ignore[attr-defined]
    assert ray.get(taker.has_all.remote(), timeout=WAIT_S)
    return taker


def test_blocks_are_read_on_the_node_of_their_rank(nodes: LocalCluster, corpus: Corpus, tmp_path: Path) -> None:
    plan, places = plan_of(corpus), list(nodes.nodes)
    all_reads = [Reads(tmp_path / str(rank)) for rank in range(2)]
    ranks = [rank_on(places[rank], corpus, plan, all_reads[rank], rank, 2) for rank in range(2)]
    steps = range(1, plan.num_steps + 1)
    received = ray.get([one.take.remote(steps.start, steps.stop) for one in ranks], timeout=2 * WAIT_S)
    for rank, reads in enumerate(all_reads):
        assert_same(received[rank], direct(corpus, plan, rank, 2, 1, steps))
        noted = reads.noted()
        assert len(noted) >= 20
        assert sum(node == places[rank] for _, node, _ in noted) >= 0.95 * len(noted)
        close(ranks[rank])


@pytest.mark.parametrize("loss", ["while it reads", "with blocks that were not taken"])
def test_a_node_goes_that_reads_for_a_rank_of_another(
    nodes: LocalCluster, corpus: Corpus, tmp_path: Path, loss: str
) -> None:
    (own, other), third, plan = list(nodes.nodes), nodes.add_node(), plan_of(corpus)
    reads = Reads(tmp_path / "reads", held=12 if loss == "while it reads" else None)
    takers = [take_all_cpus(own), take_all_cpus(third)]
    rank = rank_on(own, corpus, plan, reads)
    received = take(rank, range(1, 2))
    if reads.held is not None:
        ahead = rank.take.remote(2, 3)
        wait_until(lambda: reads.of(12), "the block is being read")
        assert reads.of(12)[0][0] == other
    ray.kill(takers[1])
    nodes.kill_node(other)
    reads.go()
    if reads.held is not None:
        received += ray.get(ahead, timeout=2 * WAIT_S)
    steps = range(len(received) // 5 + 1, plan.num_steps + 1)
    received += take(rank, steps)
    assert_same(received, direct(corpus, plan, 0, 1, 1, range(1, plan.num_steps + 1)))
    if reads.held is not None:
        assert [node for node, _ in reads.of(12)].count(other) == 1 < len(reads.of(12))
    close(rank)
    ray.kill(takers[0])
