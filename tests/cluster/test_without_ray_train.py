"""A run without a private part of Ray Train: its workers form again, and are started again, all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from ray_ulysses.tracking.history import read_history
from tests.cluster.test_elastic import TIMEOUT_S, _add_node, _wait_for_steps
from tests.cluster.test_elastic import cluster as cluster
from tests.distributed.run_case import make_config, make_corpus

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]
WITHOUT_SEAM = """
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
del DataParallelTrainer._initialize_and_run_controller
from ray_ulysses.cli import main
main()
"""


def test_a_run_without_a_seam_survives_a_node_and_all_of_its_workers(cluster: Cluster, tmp_path: Path) -> None:
    first, second = _add_node(cluster, 2), _add_node(cluster, 3)
    config = make_config(
        tmp_path / "runs", make_corpus(tmp_path), run__stop_step=100_000, data__epochs=650,
        cluster__workers={"min": 2, "max": 4}, cluster__cpus_per_worker=1.0, cluster__data_cpus=0.1,
        cluster__address=cluster.address, checkpoint__every_steps=50,
    )  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    with (tmp_path / "log.txt").open("w") as log:
        command = subprocess.Popen(
            [sys.executable, "-c", WITHOUT_SEAM, "train", str(path)], stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_for_steps(command, config, [4])
        second.kill_all_processes(allow_graceful=False, wait=True)
        cluster.worker_nodes.discard(second)
        _wait_for_steps(command, config, [4, 2])
        # No supervisor is left: the command starts others.
        (raylet,) = first.all_processes["raylet"]
        found = psutil.Process(raylet.process.pid).children(recursive=True)
        workers = [process for process in found if any("JoinedWorker" in word for word in process.cmdline())]
        assert len(workers) == 2, found
        for worker in workers:
            worker.kill()
        _wait_for_steps(command, config, [4, 2, 2])
        command.terminate()
        command.wait(TIMEOUT_S)
    finally:
        command.kill()
        command.wait()
    told = " ".join((tmp_path / "log.txt").read_text().split())
    assert "lacks TorchTrainer._initialize_and_run_controller" in told, told
    history = read_history(config.run_dir)
    assert history.status == "stopped" and history.lost_steps <= 6
    assert all("peer memory" in str(one.resumed_from) for one in history.attempts[1:])
    assert [step.step for step in history.steps] == list(range(1, history.step + 1))
    assert history.rows_consumed == history.step * config.data.rows_per_step
