"""A node that Ray announces as going away: every worker hears of it, and state is saved before it is gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import state
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from ray_ulysses.cluster.session import ray_session
from ray_ulysses.config import Config
from ray_ulysses.tracking.events import AttemptStarted, CheckpointCommitted
from ray_ulysses.tracking.history import read_history
from tests.cluster.test_train_job import Command, start
from tests.distributed.run_case import make_config, make_corpus
from tests.polling import wait_until
from tests.unit.cluster.metadata_fakes import fake_metadata
from tests.unit.tracking.journals import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
TIMEOUT_S = 150.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "node_ip_address": "127.0.1.1"})
    try:
        for number in (2, 3):
            cluster.add_node(num_cpus=1, node_ip_address=f"127.0.1.{number}", resources={"spot": 1})
        yield cluster
    finally:
        cluster.shutdown()


def _wait(config: Config, step: int, event: str = "step") -> None:
    def has_come() -> bool:
        return any(one.event == event and one.step >= step for one in read_events(config.run_dir))

    wait_until(has_come, f"{event} of step {step}", timeout_s=TIMEOUT_S, every_s=0.2)


def _config(cluster: Cluster, folder: Path, **changes: Any) -> Config:
    return make_config(
        folder / "runs", make_corpus(folder), run__stop_step=400, data__epochs=3, parallel__sp_size=1,
        cluster__cpus_per_worker=0.6, cluster__address=cluster.address, checkpoint__every_steps=None, **changes,
    )  # fmt: skip


def _until_saved(config: Config, command: Command) -> CheckpointCommitted:
    """Wait for a notice and its checkpoint, end the command, and return the first checkpoint."""
    _wait(config, 1, "preemption_notice")
    _wait(config, 1, "checkpoint_committed")
    command.process.terminate()
    command.process.wait(TIMEOUT_S)
    committed = [one for one in read_events(config.run_dir) if isinstance(one, CheckpointCommitted)]
    assert committed[0].reason == "preemption" and read_history(config.run_dir).checkpoints[-1].committed
    return committed[0]


@pytest.mark.slow
def test_a_drained_node_makes_the_run_save_before_its_time_is_up(cluster: Cluster, tmp_path: Path) -> None:
    config = _config(cluster, tmp_path, cluster__workers=2)
    command = start(config, tmp_path)
    try:
        _wait(config, 3)
        (started,) = [one for one in read_events(config.run_dir) if isinstance(one, AttemptStarted)]
        # Workers hear of the nodes of their run; one of three nodes has none.
        used = {name.split("/")[-1] for name in started.nodes}
        node = next(one for one in cluster.worker_nodes if one.node_ip_address in used).node_id
        deadline_ms = int((time.time() + 60) * 1000)
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        accepted, text = GcsClient(address=cluster.address).drain_node(node, reason, "spot", deadline_ms)
        assert accepted, text
        assert _until_saved(config, command).time < deadline_ms / 1000
    finally:
        command.kill()


@pytest.mark.slow
def test_a_notice_of_the_cloud_drains_the_node_and_the_run_saves(cluster: Cluster, tmp_path: Path) -> None:
    with fake_metadata() as fake:
        cloud = {"elastic__cloud_notices": "aws", "elastic__cloud_metadata_url": fake.url}
        config = _config(cluster, tmp_path, cluster__workers=1, **cloud)
        command = start(config, tmp_path)
        try:
            _wait(config, 3)
            wait_until(lambda: fake.asked, "a question", timeout_s=TIMEOUT_S)
            with ray_session(cluster.address, cpus=0):
                assert state.state.get_draining_nodes() == {}
                deadline = time.time() + 90.0
                fake.aws_interrupts(in_s=90.0)
                wait_until(state.state.get_draining_nodes, "a drained node", timeout_s=TIMEOUT_S)
                ((node, until_ms),) = state.state.get_draining_nodes().items()
                address = next(one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node)
            assert until_ms / 1000 == pytest.approx(deadline, abs=5.0)
            _until_saved(config, command)
        finally:
            command.kill()
    (started,) = [one for one in read_events(config.run_dir) if isinstance(one, AttemptStarted)]
    assert started.nodes[0].endswith(address)
    assert f"node {address} will be taken away at " in command.text
