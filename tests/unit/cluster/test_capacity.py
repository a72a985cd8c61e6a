"""The workers that a run needs are compared with the nodes, and missing ones are waited for within a limit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ray_ulysses.cluster.capacity import (
    ClusterView,
    Demand,
    Node,
    WorkersMissing,
    WorkerWatch,
    displaced,
    hint,
    places,
    room_for_workers,
    shortfall,
)
from ray_ulysses.cluster.failures import cause_of
from ray_ulysses.elastic.placement import WorkerRange
from ray_ulysses.run.settings import resolve_run
from tests.distributed.run_case import make_config

ONE = Demand(wanted=WorkerRange(least=4, most=4, sp_size=2), cpus=1.0, gpus=0, data_cpus=0.25)


def nodes(*sizes: tuple[float, float]) -> list[Node]:
    return [Node(cpus=cpus, gpus=gpus) for cpus, gpus in sizes]


def test_the_demand_is_the_configurations(tmp_path: Path) -> None:
    cpus = {"cluster__cpus_per_worker": 0.5, "cluster__data_cpus": 0.75}
    demand = Demand.of(resolve_run(make_config(tmp_path, tmp_path, cluster__workers=4, data__engine="ray", **cpus)))
    assert demand == Demand(wanted=WorkerRange(least=4, most=4, sp_size=2), cpus=0.5, gpus=0, data_cpus=0.75)
    assert demand.total_cpus == 4 * 0.5 + 2 * 0.75
    # The local engine reads in the workers themselves.
    assert Demand.of(resolve_run(make_config(tmp_path, tmp_path, data__engine="local"))).data_cpus == 0.0


def test_the_shortfall_compares_what_is_needed_with_what_fits_and_the_hint_fits() -> None:
    there = nodes((1, 0), (1, 0), (0, 0))
    assert shortfall(ONE, there) == (
        "cluster.workers=4 needs 1 CPU per worker (cluster.cpus_per_worker); the cluster's 3 nodes "
        "fit 2 workers: 2 with 1 CPU and 0 GPUs (2), 1 with 0 CPUs and 0 GPUs (0)"
    )
    assert hint(ONE, there).startswith("set cluster.workers=2, which fits")
    assert "the cluster's 0 nodes fit 0 workers" in str(shortfall(ONE, []))
    demand = replace(ONE, wanted=WorkerRange(least=16, most=16, sp_size=4))
    assert "cluster.workers=4" in hint(demand, nodes((7, 0)))
    assert "parallel.sp_size=4" in hint(demand, nodes((3, 0)))
    assert "cluster.gpus_per_worker=0" in hint(replace(ONE, gpus=1), nodes((64, 0)))


@pytest.mark.parametrize("data_cpus", [0.25, 1.0, 3.0])
def test_places_beyond_the_workers_make_room_for_the_data_stream(data_cpus: float) -> None:
    demand = replace(ONE, cpus=0.5, data_cpus=data_cpus)
    # Four workers take two CPUs, wherever they are.
    assert shortfall(demand, nodes((2 + data_cpus, 0))) is None
    assert shortfall(demand, nodes((data_cpus, 0), (2, 0))) is None
    lack = str(shortfall(demand, nodes((1.9 + data_cpus, 0))))
    assert lack.startswith(f"cluster.data_cpus={data_cpus:g}: ") and lack.endswith("or set data.engine=local")


def test_what_is_recommended_fits_and_what_fits_is_not_refused() -> None:
    """Random clusters and demands: placed one by one, as Ray would place them."""
    draw = random.Random(0)
    for _ in range(1000):
        demand = Demand(
            wanted=_fixed(draw.randint(1, 24)), cpus=draw.choice([0.1, 0.25, 0.5, 0.9, 1.0, 3.0]),
            gpus=draw.randint(0, 1), data_cpus=draw.choice([0.0, 0.25]),
        )  # fmt: skip
        there = nodes(*((draw.choice([0, 1, 2, 2.5, 8]), draw.randint(0, 4)) for _ in range(draw.randint(0, 5))))
        placed = sum(_place(demand, node) for node in there)
        assert places(demand, there) == placed
        lack = shortfall(demand, there)
        if placed < demand.wanted.least:
            assert lack is not None and f"fit{'s' * (len(there) == 1)} {placed} worker" in lack
            if placed:
                assert shortfall(replace(demand, wanted=_fixed(placed), data_cpus=0.0), there) is None
                assert f"cluster.workers={placed}, which fits" in hint(demand, there)
        else:
            assert lack is None or lack.startswith("cluster.data_cpus")


def _fixed(workers: int) -> WorkerRange:
    return WorkerRange(least=workers, most=workers, sp_size=1)


def _place(demand: Demand, node: Node) -> int:
    """Take a worker's ten-thousandths off a node until they don't suffice."""
    cpus, gpus, number = round(node.cpus * 10_000), node.gpus, 0
    while cpus >= round(demand.cpus * 10_000) and gpus >= demand.gpus:
        cpus, gpus, number = cpus - round(demand.cpus * 10_000), gpus - demand.gpus, number + 1
    return number


def test_an_elastic_run_leaves_cpus_to_the_data_stream_and_says_how_many_workers_that_costs() -> None:
    elastic = replace(ONE, wanted=WorkerRange(least=2, most=8, sp_size=2))
    # Four workers and a fifth CPU; eight workers and no spare CPU: one worker makes way for the stream.
    assert shortfall(elastic, nodes((5, 0))) is None
    assert shortfall(elastic, nodes((4, 0), (4, 0))) is None
    assert room_for_workers(elastic, {"a": Node(cpus=3, gpus=0)}) == {"a": 2}
    assert room_for_workers(elastic, {"a": Node(cpus=4, gpus=0), "b": Node(cpus=4, gpus=0)}) == {"a": 4, "b": 3}
    assert room_for_workers(elastic, {"a": Node(cpus=9, gpus=0)}) == {"a": 9}, "a CPU is left over"
    assert room_for_workers(replace(elastic, data_cpus=0.0), {"a": Node(cpus=3, gpus=0)}) == {"a": 3}
    assert room_for_workers(elastic, {}) == {}
    assert "cluster.workers.min=2 " in str(shortfall(elastic, nodes((2, 0))))
    assert "data.engine=local" in hint(elastic, nodes((2, 0)))
    told = displaced(elastic, nodes((4, 0), (4, 0)))
    assert told is not None and "displaces 2 workers" in told and "cluster.data_cpus=0.25" in told
    for some in (nodes((5, 0), (4, 0)), nodes((9, 0)), nodes((3, 0)), nodes((12, 0)), nodes()):
        assert displaced(elastic, some) is None
    assert displaced(replace(elastic, data_cpus=0.0), nodes((4, 0))) is None
    assert displaced(replace(elastic, wanted=WorkerRange(least=4, most=4, sp_size=2)), nodes((4, 0))) is None


DEMAND = Demand(wanted=WorkerRange(least=2, most=2, sp_size=1), cpus=1.0, gpus=0, data_cpus=0.0)
NODE = Node(cpus=1.0, gpus=0.0)


class Cluster:
    """A cluster and a clock that a test sets."""

    def __init__(self, demand: Demand = DEMAND, limit_s: float = 60.0) -> None:
        self.is_training = True
        self.time_s, self.view, self.said = 0.0, ClusterView(nodes=(NODE, NODE), workers=0), list[str]()
        self.answers: Callable[[], ClusterView | None] = lambda: self.view
        self.watch = WorkerWatch(
            demand, limit_s=limit_s, look=lambda: self.answers(), say=self.said.append, clock=self,
            is_training=lambda: self.is_training,
        )  # fmt: skip

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
