"""An elastic run: the number of its workers follows the nodes, and what is trained does not notice."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from ray_ulysses.config import Config
from ray_ulysses.tracking.events import StepDone
from ray_ulysses.tracking.history import AttemptRecord, read_history
from tests.distributed.run_case import make_config, make_corpus
from tests.polling import wait_until
from tests.unit.tracking.journals import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
TIMEOUT_S = 400.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "node_ip_address": "127.0.1.1"})
    try:
        yield cluster
    finally:
        cluster.shutdown()


def _add_node(cluster: Cluster, number: int) -> object:
    return cluster.add_node(num_cpus=2, node_ip_address=f"127.0.1.{number}")


def _wait_for_steps(command: subprocess.Popen[bytes], config: Config, worlds: list[int], steps: int = 3) -> None:
    """Wait until the newest of the attempts with these worlds has trained some steps."""
    attempts: list[AttemptRecord] = []

    def have_trained() -> bool:
        assert command.poll() is None, "the command ended"
        if config.run_dir.is_dir():
            attempts[:] = [one for one in read_history(config.run_dir).attempts if one.first_step is not None]
        if [one.world_size for one in attempts] != worlds:
            return False
        return (attempts[-1].last_step or 0) - (attempts[-1].first_step or 0) >= steps

    wait_until(have_trained, f"worlds {worlds}", timeout_s=TIMEOUT_S, every_s=0.2, said=lambda: str(attempts))


@pytest.mark.slow
def test_an_elastic_run_follows_its_nodes(cluster: Cluster, tmp_path: Path) -> None:
    _add_node(cluster, 2)
    second = _add_node(cluster, 3)
    config = make_config(
        tmp_path / "runs", make_corpus(tmp_path), run__stop_step=100_000, data__epochs=650,
        cluster__workers={"min": 2, "max": 4}, cluster__cpus_per_worker=1.0, cluster__data_cpus=0.1,
        cluster__address=cluster.address, checkpoint__every_steps=50, elastic__grow_interval_s=1.0,
    )  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    with (tmp_path / "log.txt").open("w") as log:
        command = subprocess.Popen(
            [sys.executable, "-m", "ray_ulysses", "train", str(path)], stdout=log, stderr=log, start_new_session=True
        )
    try:
        # By then the first states are in peer memory.
        _wait_for_steps(command, config, [4], steps=8)
        # Without notice: as a spot node that is taken away.
        second.kill_all_processes(allow_graceful=False, wait=True)
        cluster.worker_nodes.discard(second)
        _wait_for_steps(command, config, [4, 2])
        third = _add_node(cluster, 4)
        _wait_for_steps(command, config, [4, 2, 4])
        deadline_ms = int((time.time() + 120) * 1000)
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        accepted, text = GcsClient(address=cluster.address).drain_node(third.node_id, reason, "spot", deadline_ms)
        assert accepted, text
        _wait_for_steps(command, config, [4, 2, 4, 2])
        command.terminate()
        command.wait(TIMEOUT_S)
    finally:
        command.kill()
        command.wait()
    history = read_history(config.run_dir)
    first, second_, third_, fourth = history.attempts
    assert [one.reason for one in (second_, third_)] == ["resized", "resized"] and history.status == "stopped"
    # A lost node costs a step or few (none is on storage by then); a change of size costs none.
    assert history.lost_steps <= 3 and "peer memory" in str(second_.resumed_from)
    assert (second_.first_step, third_.first_step, fourth.first_step) == (
        (first.last_step or 0) - history.lost_steps + 1, (second_.last_step or 0) + 1, (third_.last_step or 0) + 1,
    )  # fmt: skip
    assert [step.step for step in history.steps] == list(range(1, history.step + 1))
    assert history.rows_consumed == history.step * config.data.rows_per_step
    # Steps that were trained again, on half as many workers, have the same losses.
    losses = [
        {
            one.step: one.loss
            for one in read_events(config.run_dir)
            if isinstance(one, StepDone) and one.attempt == number
        }
        for number in (1, 2)
    ]
    both = losses[0].keys() & losses[1].keys()
    assert len(both) == history.lost_steps and all(
        abs(losses[0][step] / losses[1][step] - 1.0) <= 1e-5 for step in both
    )
