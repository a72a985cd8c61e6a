"""`ray-ulysses check` on a Ray of its own: a run that is ready, and one whose learning rate is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.run_case import make_config, make_corpus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def check(folder: Path, *options: str, **overrides: Any) -> tuple[int, dict[str, Any]]:
    settings = {
        "run__stop_step": None,
        "schedule__horizon_steps": None,
        "cluster__workers": 2,
        "data__rows_per_step": 4,
    }
    config = make_config(folder / "runs", make_corpus(folder), **{**settings, **overrides})
    (folder / "config.yaml").write_text(config.to_yaml())
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", "ray_ulysses", "check", folder / "config.yaml", "--steps=12", "--json", *options],
        capture_output=True, text=True, timeout=600, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def test_a_run_that_is_ready_holds_in_every_line_and_leaves_nothing(tmp_path: Path) -> None:
    code, report = check(tmp_path, optimizer__lr=3e-3, memory__device_gib=4.0)
    lines = {line["name"]: line["holds"] for line in report["lines"]}
    assert (code, report["holds"]) == (0, True), report
    assert all(lines[name] for name in ("documents apart", "trains", "memory", "loss", "checkpoint loaded"))
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_learning_rate_that_is_too_high_fails_the_loss_and_what_was_written_can_be_kept(tmp_path: Path) -> None:
    code, report = check(tmp_path, "--keep", optimizer__lr=30.0, optimizer__max_grad_norm=None)
    failed = [line["name"] for line in report["lines"] if line["holds"] is False]
    assert code == 1 and set(failed) & {"loss", "finite"}, report
    assert [path.name.startswith("run-check-") for path in (tmp_path / "runs").iterdir()] == [True]
