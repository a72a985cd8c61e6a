"""The load harness of the coordinator finds costs that are quadratic in the number of workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]


def _counted(out: Path, plant: str, *sizes: int) -> dict[str, Any]:
    options = ["--only", "counts", "--plant", plant, "--sizes", *map(str, sizes), "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.scale.coordinator", *options]
    subprocess.run(command, check=True, cwd=_ROOT, timeout=120, stdout=subprocess.DEVNULL)
    record: dict[str, Any] = json.loads((out / "scale_coordinator.json").read_text())
    return record


def test_no_event_costs_the_coordinator_more_than_linearly_many_calls_and_bytes(tmp_path: Path) -> None:
    record = _counted(tmp_path, "", 32, 64, 128, 256)
    assert record["is_linear"], record["slopes"]
    assert "**not met**" not in (tmp_path / "scale_coordinator.md").read_text()


@pytest.mark.parametrize(
    ("plant", "figures"),
    [
        pytest.param("orders", {"sent_bytes per loss"}, marks=pytest.mark.slow),
        ("reduce", {"calls per join", "calls per loss", "calls per growth"}),
        ("messages", {"calls per beats", "calls per loss", "calls per growth"}),
    ],
)
def test_a_planted_quadratic_cost_is_found(tmp_path: Path, plant: str, figures: set[str]) -> None:
    record = _counted(tmp_path, plant, 32, 128)
    assert not record["is_linear"]
    assert {name for name, slope in record["slopes"].items() if slope > 1.1} == figures
    assert "**not met**" in (tmp_path / "scale_coordinator.md").read_text()
