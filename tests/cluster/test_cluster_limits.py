"""A run that a live cluster can't hold is refused, a lost node is awaited and given up, and local nodes share a GPU."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from ray_ulysses.cluster.capacity import Demand, Node
from ray_ulysses.cluster.local_cluster import LocalCluster
from ray_ulysses.cluster.session import cluster_nodes, free_nodes, look_at_cluster, ray_session
from ray_ulysses.cluster.train_job import _check_capacity
from ray_ulysses.config import Config
from ray_ulysses.errors import RunError
from ray_ulysses.run.ownership import claim_checkpoints
from ray_ulysses.run.settings import resolve_run
from ray_ulysses.storage import current_owner
from ray_ulysses.tracking.history import read_history
from tests.cluster.commands import Command, start, started_below, train
from tests.distributed.harness import run_ranks
from tests.distributed.run_case import make_config, prepare_attempt, run_worker
from tests.polling import wait_until
from tests.unit.tracking.journals import read_events


@ray.remote(num_cpus=0.9)
class RayTrainWorker:
    """Has the name of Ray Train's."""

    def ping(self) -> None: ...


pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]
TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        head = {"num_cpus": 1, "node_ip_address": "127.0.1.1", "object_store_memory": 128 << 20}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(num_cpus=1, node_ip_address="127.0.1.2", object_store_memory=128 << 20)
            cluster.wait_for_nodes()
            yield cluster
        finally:
            cluster.shutdown()


def config_for(cluster: Cluster, corpus: Path, folder: Path, **overrides: Any) -> Config:
    settings = {
        "run__stop_step": 160, "parallel__sp_size": 1, "cluster__workers": 2, "cluster__cpus_per_worker": 0.9,
        "cluster__address": cluster.address,
    }  # fmt: skip
    return make_config(folder / "runs", corpus, **(settings | overrides))


def wait_while_alive(command: Command, holds: Callable[[], object], what: str) -> None:
    def is_so() -> object:
        assert command.process.poll() is None, f"the command ended before {what}"
        return holds()

    wait_until(is_so, what, timeout_s=TIMEOUT_S)


def test_nodes_and_workers_are_counted_and_what_can_not_fit_is_refused(
    cluster: Cluster, corpus: Path, tmp_path: Path
) -> None:
    """A canary of Ray 2.60: its table of actors and its nodes that are about to go."""
    console = Console(record=True, width=200)

    def check(config: Config) -> None:
        _check_capacity(config, Demand.of(resolve_run(config)), console, embedded=False)

    with ray_session(cluster.address, cpus=0):
        assert cluster_nodes() == (Node(cpus=1.0, gpus=0.0),) * 2
        workers = [RayTrainWorker.remote() for _ in range(2)]
        ray.get([worker.ping.remote() for worker in workers])
        view = look_at_cluster()
        assert view is not None and view.workers == 2
        assert sum(node.cpus for node in free_nodes()) == pytest.approx(0.2)

        with pytest.raises(RunError, match=r"set cluster\.workers=2"):
            check(config_for(cluster, corpus, tmp_path, cluster__workers=8))
        waits = config_for(cluster, corpus, tmp_path, cluster__workers=8, cluster__wait_for_nodes=True)
        check(waits)
        assert console.export_text() == ""
        check(config_for(cluster, corpus, tmp_path))
        assert "free resources for only 0" in console.export_text()


@pytest.mark.parametrize(
    ("moment", "number"), [("waiting for nodes", signal.SIGTERM), ("workers starting", signal.SIGINT)]
)
def test_a_stop_during_the_start_ends_what_was_started(
    cluster: Cluster, corpus: Path, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    waits = moment == "waiting for nodes"
    overrides = {"cluster__workers": 8, "cluster__wait_for_nodes": True} if waits else {}
    config = config_for(cluster, corpus, tmp_path, **overrides)
    command = start(config, tmp_path)
    try:
        if waits:
            wait_while_alive(command, lambda: "waiting up to" in command.text, "the wait is told")
        else:
            wait_while_alive(command, _train_processes, "Ray Train starts")
        asked = time.monotonic()
        command.process.send_signal(number)
        assert command.process.wait(30) == 130, command.text
        # Five seconds on a machine that does nothing else.
        assert time.monotonic() - asked < 15
    finally:
        command.kill()
    text = command.text
    assert f"{number.name}: there is no step to save yet; stopping now" in text
    assert "Traceback" not in text and "raylet" not in text
    assert current_owner(config.run_dir) is None
    wait_until(lambda: not _train_processes(), "what was started ends with the command")


def _train_processes() -> list[psutil.Process]:
    return started_below(None, "SupervisedController", "RayTrainWorker")


def test_a_lost_node_is_awaited_and_given_up_without_a_dump(cluster: Cluster, corpus: Path, tmp_path: Path) -> None:
    """The last that uses the cluster: it takes a node away."""
    # As long as the workers of a slow machine take to start.
    config = config_for(cluster, corpus, tmp_path, elastic__worker_start_timeout_s=60.0, data__epochs=20)
    command = start(config, tmp_path)
    try:
        wait_while_alive(command, lambda: read_history(config.run_dir).step >= 3, "step 3")
        (node,) = cluster.worker_nodes
        cluster.remove_node(node, allow_graceful=False)
        assert command.process.wait(TIMEOUT_S) == 1
    finally:
        command.kill()
    text = command.text
    assert "s for nodes: cluster.workers=2 needs 0.9 CPUs each" in text
    assert "workers started within 60 s (elastic.worker_start_timeout_s)" in text
    assert "set cluster.workers=1, which fits" in text and "the same command resumes from " in text
    assert read_history(config.run_dir).status == "failed"
    for word in ("(raylet)", "RAY_TRAIN_", "ScalingConfig", "Traceback", socket.gethostname() + "/"):
        assert word not in text


def test_a_second_directory_of_the_same_checkpoints_is_refused_before_a_worker_starts(
    corpus: Path, tmp_path: Path
) -> None:
    def config_in(storage: str) -> Config:
        return make_config(
            tmp_path / storage, corpus, run__stop_step=2, cluster__workers=2, cluster__cpus_per_worker=0.25,
            checkpoint__storage=str(tmp_path / "place"),
        )  # fmt: skip

    first, second = config_in("a"), config_in("b")
    prepare_attempt(first, "first")
    claim_checkpoints(resolve_run(first))
    run_ranks(run_worker, 2, first, "first", timeout_s=TIMEOUT_S)
    code, text = train(second, tmp_path / "second")
    assert code == 2, text
    assert f"belong to the run directory {first.run_dir} of host " in text and "Set another run.name" in text
    assert "starting Ray" not in text and not read_events(second.run_dir)


def _seen() -> tuple[list[str], str, str]:
    return [str(one) for one in ray.get_gpu_ids()], os.environ["CUDA_VISIBLE_DEVICES"], os.environ["NCCL_HOSTID"]


def test_two_nodes_each_claim_the_one_gpu(ray_folder: Path) -> None:
    cluster = LocalCluster(cpus_per_node=1, gpus_per_node=1, gpus=("0",))
    try:
        nodes = [cluster.add_node() for _ in range(2)]
        with ray_session(cluster.address, cpus=0):
            look = ray.remote(_seen)
            asked = [
                look.options(num_gpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
                for node in nodes
            ]
            found = ray.get(asked, timeout=60)
        assert [one[:2] for one in found] == [(["0"], "0")] * 2
        assert {one[2] for one in found} == set(cluster.nodes.values())
    finally:
        cluster.shutdown()
