"""Workers that are missing are awaited for so long and no longer, and the user hears what for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ray_ulysses.cluster.capacity import ClusterView, Demand, Node, WorkersMissing, WorkerWatch
from ray_ulysses.cluster.failures import cause_of
from ray_ulysses.elastic.placement import WorkerRange

DEMAND = Demand(wanted=WorkerRange(least=2, most=2, sp_size=1), cpus=1.0, gpus=0, data_cpus=0.0)
NODE = Node(cpus=1.0, gpus=0.0)


class Cluster:
    """A cluster and a clock that a test sets."""

    def __init__(self, demand: Demand = DEMAND, limit_s: float = 60.0) -> None:
        self.is_training = True
        self.time_s, self.view, self.said = 0.0, ClusterView(nodes=(NODE, NODE), workers=0), list[str]()
        self.answers: Callable[[], ClusterView | None] = lambda: self.view
        self.watch = WorkerWatch(
            demand,
            limit_s=limit_s,
            look=lambda: self.answers(),
            say=self.said.append,
            clock=self,
            is_training=lambda: self.is_training,
        )

    def now(self) -> float:
        raise AssertionError("a wait is measured by the clock that never goes back")

    def monotonic(self) -> float:
        return self.time_s

    def at(self, time_s: float, num_nodes: int, workers: int) -> None:
        self.time_s, self.view = time_s, ClusterView(nodes=(NODE,) * num_nodes, workers=workers)
        self.watch.check()


def test_workers_that_start_in_time_are_not_spoken_of_and_late_ones_end_the_wait() -> None:
    cluster = Cluster()
    cluster.at(0, 2, 0)
    cluster.at(59, 2, 1)
    assert not cluster.watch.is_whole
    cluster.at(60, 2, 2)
    cluster.at(10_000, 2, 2)
    assert cluster.watch.is_whole and cluster.said == []
    # A node that is lost, comes back and is lost again starts the wait again.
    for second, workers in ((10_040, 1), (10_090, 2), (10_100, 1), (10_159, 1)):
        cluster.at(second, workers, workers)
    with pytest.raises(WorkersMissing):
        cluster.at(10_161, 1, 1)
    with pytest.raises(WorkersMissing, match=r"0 of cluster\.workers=2 .* all workers fit on the nodes, so other jobs"):
        Cluster().at(60, 2, 0)


def test_a_lost_node_is_awaited_told_once_a_minute_and_given_up_with_its_count() -> None:
    cluster = Cluster(limit_s=100.0)
    cluster.at(30, 2, 2)
    cluster.at(100, 1, 1)
    assert not cluster.watch.is_whole and cluster.said == []
    for second in range(101, 200):
        cluster.at(second, 1, 0)
    assert [text.split(" for nodes")[0] for text in cluster.said] == ["waiting up to 98 s", "waiting up to 38 s"]
    with pytest.raises(WorkersMissing) as ended:
        cluster.at(200, 1, 0)
    text, cause = str(ended.value), cause_of(ended.value)
    assert "0 of cluster.workers=2 " in text and "elastic.worker_start_timeout_s" in text
    assert "set cluster.workers=1, which fits" in text and "RAY_TRAIN" not in text
    assert (cause.kind, cause.is_final, cause.rank) == ("start", True, None)
    assert f"{cause.reason}; {cause.hint}" == text


@pytest.mark.parametrize("is_training", [True, False])
def test_an_elastic_run_that_trains_needs_no_more_than_its_fewest_workers(is_training: bool) -> None:
    cluster = Cluster(demand=replace(DEMAND, wanted=WorkerRange(least=1, most=2, sp_size=1)))
    cluster.is_training = is_training
    cluster.at(1, 2, 0)
    assert not cluster.watch.is_whole
    cluster.at(2, 2, 1)
    assert cluster.watch.is_whole is is_training
    if is_training:
        cluster.at(10_000, 1, 1)
        cluster.at(10_001, 0, 0)
    with pytest.raises(WorkersMissing, match=r"cluster\.workers\.min=1"):
        cluster.at(10_061, 0, 0)


def test_the_cluster_is_asked_once_a_second_and_no_answer_changes_nothing() -> None:
    cluster = Cluster()
    cluster.at(1, 2, 2)
    asked: list[float] = []
    cluster.answers = lambda: asked.append(cluster.time_s)
    for tenth in range(50_001, 50_051):
        cluster.time_s = tenth / 10
        cluster.watch.check()
    assert len(asked) == 5 and cluster.watch.is_whole


def test_workers_that_the_data_stream_displaces_are_told_once() -> None:
    cluster = Cluster(replace(DEMAND, wanted=WorkerRange(least=1, most=4, sp_size=1), data_cpus=0.25))
    for second in range(10):
        cluster.at(second, 2, 1)
    cluster.at(20, 3, 2)
    assert len(cluster.said) == 1


def test_the_progress_says_how_many_workers_have_started() -> None:
    for least, started, words in (
        (4, 0, "waiting for 4 workers (0 started)"),
        (4, 4, "loading libraries on 4 workers"),
        (4, None, "waiting for 4 workers"),
        (1, 0, "waiting for 1 worker (0 started)"),
    ):
        cluster = Cluster(replace(DEMAND, wanted=WorkerRange(least=least, most=least, sp_size=1)))
        if started is not None:
            cluster.at(0, least, started)
        assert cluster.watch.awaited == words
