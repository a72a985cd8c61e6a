"""A run's numbers at the address where Ray exports the metrics of a node."""

from __future__ import annotations

import re
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
import ray

from ray_ulysses.clock import SystemClock
from ray_ulysses.cluster.run_metrics import RunMetrics
from ray_ulysses.config import parse_config
from ray_ulysses.tracking.journal import claim_journal
from tests.polling import wait_until
from tests.unit.config.trees import small_tree
from tests.unit.tracking.journals import started, step

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_a_runs_numbers_are_among_rays_metrics(cluster: None, tmp_path: Path) -> None:
    config = parse_config(small_tree(run__storage=str(tmp_path)))
    config.run_dir.mkdir()
    with closing(claim_journal(config.run_dir, SystemClock(), after=0)) as journal:
        for number, fields in enumerate((started(), step(1), step(2))):
            journal.append({"time": 100.0 + 2 * number, "attempt": journal.attempt, **fields})
        journal.sync()
        (node,) = (one for one in ray.nodes() if one["Alive"])
        page = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        metrics = RunMetrics(config)
        metrics.read()
        metrics.export()

        def shown() -> str:
            try:
                with urllib.request.urlopen(page, timeout=10) as answer:
                    return str(answer.read().decode())
            except OSError as error:
                return str(error)

        names = ("step", "loss", "tokens_per_s", "goodput")
        wait_until(
            lambda: all(re.search(f'^ray_ulysses_{name}{{.*run="first".*}} ', shown(), re.MULTILINE) for name in names),
            "the gauges", timeout_s=100, every_s=1.0, said=shown,
        )  # fmt: skip
        assert re.search(r"^ray_ulysses_step{.*} 2\.0$", shown(), re.MULTILINE)
