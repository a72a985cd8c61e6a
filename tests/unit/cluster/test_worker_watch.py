"""Workers that are missing are awaited for so long and no longer, and the user hears what for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_ulysses.cluster.capacity import ClusterView, Demand, Node, WorkersMissing, WorkerWatch
from ray_ulysses.cluster.failures import cause_of
from ray_ulysses.elastic.placement import WorkerRange
from ray_ulysses.errors import RunError

DEMAND = Demand(wanted=WorkerRange(least=2, most=2, sp_size=1), cpus=1.0, gpus=0, data_cpus=0.0)
NODE = Node(cpus=1.0, gpus=0.0)


class Cluster:
    """A cluster and a clock that a test sets."""

    def __init__(self, demand: Demand = DEMAND, limit_s: float = 60.0) -> None:
        self.is_training = True
        self.time_s, self.view, self.said = 0.0, ClusterView(nodes=(NODE, NODE), workers=0), list[str]()
        self.watch = WorkerWatch(
            demand,
            limit_s=limit_s,
            look=lambda: self.view,
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


def test_workers_that_start_in_time_are_not_spoken_of() -> None:
    cluster = Cluster()
    cluster.at(0, 2, 0)
    cluster.at(59, 2, 1)
    assert not cluster.watch.is_whole
    cluster.at(60, 2, 2)
    cluster.at(10_000, 2, 2)
    assert cluster.watch.is_whole and cluster.said == []


def test_a_lost_node_is_awaited_told_once_and_given_up_with_its_count() -> None:
    cluster = Cluster()
    cluster.at(30, 2, 2)
    cluster.at(100, 1, 1)
    assert not cluster.watch.is_whole and cluster.said == []
    for second in range(101, 160):
        cluster.at(second, 1, 0)
    lack = "cluster.workers=2 needs 1 CPU each (cluster.cpus_per_worker); the 1 node"
    assert cluster.said == [f"waiting up to 58 s for nodes: {lack} of the cluster holds 1: 1 of 1 CPU and 0 GPUs (1)"]
    with pytest.raises(RunError) as ended:
        cluster.at(160, 1, 0)
    text = str(ended.value)
    assert text.startswith(
        f"0 of cluster.workers=2 workers have started after 60 s (elastic.worker_start_timeout_s): {lack}"
    )
    assert text.endswith("set cluster.workers=1, which fits (a run resumes at any number), or add nodes")
    assert "RAY_TRAIN" not in text


def test_a_long_wait_is_told_again_every_minute() -> None:
    cluster = Cluster(limit_s=600.0)
    for second in range(300):
        cluster.at(second, 1, 0)
    assert [text.split(" for nodes")[0] for text in cluster.said] == [
        f"waiting up to {left} s" for left in (598, 538, 478, 418, 358)
    ]


def test_an_elastic_run_needs_no_more_than_its_fewest_workers() -> None:
    elastic = replace(DEMAND, wanted=WorkerRange(least=1, most=2, sp_size=1))
    cluster = Cluster(demand=elastic)
    cluster.at(1, 1, 0)
    assert not cluster.watch.is_whole
    cluster.at(2, 1, 1)
    assert cluster.watch.is_whole
    cluster.at(10_000, 1, 1)
    cluster.at(10_001, 0, 0)
    with pytest.raises(RunError, match=r"0 of cluster\.workers\.min=1 workers have started after 60 s"):
        cluster.at(10_061, 0, 0)


def test_an_elastic_run_whose_workers_come_up_in_part_is_not_waited_for_without_end() -> None:
    cluster = Cluster(demand=replace(DEMAND, wanted=WorkerRange(least=1, most=2, sp_size=1)))
    cluster.is_training = False
    cluster.at(1, 2, 1)
    assert not cluster.watch.is_whole
    with pytest.raises(RunError, match=r"1 of cluster\.workers\.min=1 workers have started after 60 s"):
        cluster.at(60, 2, 1)


def test_a_node_that_comes_back_begins_the_wait_anew() -> None:
    cluster = Cluster()
    cluster.at(1, 2, 2)
    cluster.at(50, 1, 1)
    cluster.at(100, 2, 2)
    cluster.at(110, 1, 1)
    cluster.at(169, 1, 1)
    with pytest.raises(RunError):
        cluster.at(171, 1, 1)


def test_workers_that_never_start_on_nodes_that_hold_them_end_the_wait_too() -> None:
    cluster = Cluster()
    with pytest.raises(RunError, match=r"0 of cluster\.workers=2 .* the nodes can hold them all, so other work"):
        cluster.at(60, 2, 0)


def test_a_head_that_does_not_answer_changes_nothing() -> None:
    cluster = Cluster()
    cluster.at(1, 2, 2)
    cluster.time_s, cluster.watch._look = 5_000.0, lambda: None
    cluster.watch.check()
    assert cluster.watch.is_whole


def test_the_cluster_is_asked_once_a_second() -> None:
    cluster = Cluster()
    asked: list[float] = []
    cluster.watch._look = lambda: asked.append(cluster.time_s)
    for tenth in range(1, 51):
        cluster.time_s = tenth / 10
        cluster.watch.check()
    assert len(asked) == 5


def test_workers_that_are_given_up_end_the_run_for_good_in_the_same_words() -> None:
    cluster = Cluster()
    with pytest.raises(WorkersMissing) as ended:
        cluster.at(60, 1, 0)
    cause = cause_of(ended.value)
    assert (cause.kind, cause.is_final, cause.rank) == ("start", True, None)
    assert f"{cause.reason}; {cause.hint}" == str(ended.value)


def test_workers_that_the_data_stream_displaces_are_told_once() -> None:
    cluster = Cluster(replace(DEMAND, wanted=WorkerRange(least=1, most=4, sp_size=1), data_cpus=0.25))
    for second in range(10):
        cluster.at(second, 2, 1)
    assert len(cluster.said) == 1 and cluster.said[0].startswith(
        "warning: the data stream takes the place of 1 worker,"
    )
    cluster.at(20, 3, 2)
    assert len(cluster.said) == 1


@pytest.mark.parametrize(
    ("least", "started", "words"),
    [
        (4, 0, "waiting for 4 workers (0 started)"),
        (4, 2, "waiting for 4 workers (2 started)"),
        (4, 4, "loading libraries on 4 workers"),
        (4, None, "waiting for 4 workers"),
        (1, 0, "waiting for 1 worker (0 started)"),
    ],
)
def test_it_says_how_many_workers_have_started_where_that_is_known(least: int, started: int | None, words: str) -> None:
    cluster = Cluster(replace(DEMAND, wanted=WorkerRange(least=least, most=least, sp_size=1)))
    if started is not None:
        cluster.at(0, least, started)
    assert cluster.watch.awaited == words
