"""A rehearsal from end to end: on nodes of its own, and on a cluster that others have started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_ulysses.cluster.local_cluster import LocalCluster
from tests.distributed.run_case import make_config, make_corpus

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]
TIMEOUT_S = 1200.0


@pytest.fixture
def config(tmp_path: Path) -> Path:
    settings = {"data__epochs": 4000, "data__context_tokens": 1024, "run__stop_step": None}
    limits = {"cluster__workers": {"min": 2, "max": 4}, "cluster__cpus_per_worker": 1.0, "cluster__data_cpus": 0.1}
    path = tmp_path / "config.yaml"
    path.write_text(make_config(tmp_path / "runs", make_corpus(tmp_path), **settings, **limits).to_yaml())
    return path


def _rehearse(path: Path, *options: str, address: str = "", typed: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "ray_ulysses", "rehearse", str(path), *options],
        input=typed, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        env={**os.environ, "RAY_ADDRESS": address},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_rehearsal_on_this_machine_proves_that_nothing_was_lost(config: Path, tmp_path: Path) -> None:
    faults = (
        "5s kill-worker, 15s stop-worker, 25s kill-agent, 35s kill-node, 50s add-node, "
        "110s kill-driver, 120s drain-node"
    )
    code, said = _rehearse(
        config, "--faults", faults, "--drain", "10s", "--compare", "40", "--out", str(tmp_path / "report")
    )
    assert code == 0, said
    assert (tmp_path / "report.md").read_text().startswith("# Rehearsal run-rehearsal-") and "Traceback" not in said
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["holds"] and (report["rows_lost"], report["rows_repeated"]) == (0, 0)
    assert report["rows"] == 6 * report["steps"] and report["unbroken"]["steps"] == 40
    found = {one["injected"]["fault"]["kind"]: one for one in report["recoveries"]}
    assert found["kill-node"]["workers"] == [4, 2] and found["add-node"]["workers"] == [2, 4]
    assert found["drain-node"]["lost_steps"] == found["add-node"]["lost_steps"] == 0
    assert all(one["lost_steps"] <= 3 for one in report["recoveries"])


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    cluster = LocalCluster(cpus_per_node=2)
    try:
        for _ in range(2):
            cluster.add_node()
        yield cluster
    finally:
        cluster.shutdown()


def test_a_cluster_of_others_is_touched_only_once_that_is_confirmed(
    cluster: LocalCluster, config: Path, tmp_path: Path
) -> None:
    code, said = _rehearse(config, "--faults", "5s add-node", address=cluster.address)
    assert code == 2 and "5s add-node: the rehearsal did not start this cluster" in said
    code, said = _rehearse(config, "--nodes", "3", address=cluster.address)
    assert code == 2 and "--nodes=3: the rehearsal uses the cluster at" in said
    code, said = _rehearse(config, "--faults", "5s kill-node", address=cluster.address, typed="run\n")
    assert code == 2 and "kill-node kills Ray on one node of the cluster" in said
    assert "the rehearsal was not confirmed; nothing was started" in said
    assert not (tmp_path / "runs").exists()

    faults = ("--faults", "5s crash-worker, 15s stop-worker, 25s kill-agent, 30s kill-driver, 60s kill-node")
    out = str(tmp_path / "report.md")
    code, said = _rehearse(config, *faults, "--compare", "0", "--yes", "--quiet", "--out", out, address=cluster.address)
    assert code == 0, said
    assert "training starts" not in said and (tmp_path / "report.md").read_text() in said
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["holds"] and report["unbroken"] is None
    workers = [one["workers"][1] for one in report["recoveries"]]
    # On a slow machine the node is lost before the command that was started again trains.
    assert workers[:3] == [4, 4, 4] and workers[3] in (2, 4) and workers[4] == 2
