from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.clock import SystemClock
from ray_ulysses.cluster.run_metrics import RunMetrics
from ray_ulysses.config import parse_config
from ray_ulysses.tracking.journal import claim_journal
from tests.unit.config.trees import small_tree
from tests.unit.tracking.journals import started, step


def test_a_runs_newest_numbers_are_gauges_with_its_name(tmp_path: Path) -> None:
    config = parse_config(small_tree(run__storage=str(tmp_path)))
    config.run_dir.mkdir()
    set_to: list[tuple[str, float, Any]] = []

    class FakeGauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self.name = name

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            set_to.append((self.name, value, tags))

    metrics = RunMetrics(config, FakeGauge)
    metrics.read()
    metrics.export()
    assert set_to == [], "before the first step there is nothing to show"
    with closing(claim_journal(config.run_dir, SystemClock(), after=0)) as journal:
        for number, fields in enumerate((started(), step(1), step(2))):
            journal.append({"time": 100.0 + 2 * number, "attempt": journal.attempt, **fields})
        journal.sync()
        metrics.read()
        metrics.export()
        metrics.export()
    tags = {"run": "first"}
    assert [one for one in set_to if one[0] != "ulysses_goodput"] == [
        ("ulysses_step", 2, tags),
        ("ulysses_loss", pytest.approx(3 - 2 / 7), tags),
        ("ulysses_tokens_per_s", pytest.approx(1002 / 1.5), tags),
    ]
    ((_, goodput, _),) = (one for one in set_to if one[0] == "ulysses_goodput")
    assert 0 < goodput <= 1
