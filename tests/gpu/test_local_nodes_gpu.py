"""The whole product on nodes of this machine that each claim its one GPU: lost, drained and new nodes, and export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.rehearsal.check import TOLERANCES
from ray_ulysses.tracking.events import StepDone
from tests.cluster.conftest import ray_folder as ray_folder
from tests.distributed.run_case import make_config, make_corpus
from tests.gpu.test_run_gpu import losses, trained
from tests.unit.tracking.journals import read_events

COMPARED = 40
FAULTS = "5s kill-node, 30s add-node, 60s drain-node, 75s add-node"


def ray_ulysses(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ray_ulysses", *map(str, arguments)],
        capture_output=True, text=True, timeout=500, check=False, env={**os.environ, "RAY_ADDRESS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


def test_nodes_that_share_a_gpu_come_and_go_and_nothing_is_lost(tmp_path: Path, ray_folder: Path) -> None:
    sp_size, nodes = 2, 4
    corpus = make_corpus(tmp_path)
    settings: dict[str, Any] = {"data__epochs": 4000, "data__context_tokens": 1024, "parallel__allowed_sp": [1, 2]}
    config = make_config(
        tmp_path / "runs", corpus, run__stop_step=None, parallel__sp_size=sp_size, cluster__gpus_per_worker=1,
        cluster__workers={"min": sp_size, "max": nodes}, **settings,
    )  # fmt: skip
    path, out = tmp_path / "config.yaml", tmp_path / "report.md"
    path.write_text(config.to_yaml())
    options = ("--faults", FAULTS, "--drain", "10s", "--compare", COMPARED, "--out", out)
    print(ray_ulysses("rehearse", path, "--nodes", nodes, *options))
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["holds"] and (report["rows_lost"], report["rows_repeated"]) == (0, 0)
    assert report["unbroken"]["steps"] == COMPARED
    found = {one["injected"]["fault"]["kind"]: one for one in report["recoveries"]}
    fewer = (nodes - 1) // sp_size * sp_size
    assert found["kill-node"]["workers"] == [nodes, fewer] and found["drain-node"]["lost_steps"] == 0

    # The same steps on one process.
    alone = make_config(
        tmp_path / "alone", corpus, run__stop_step=COMPARED, parallel__sp_size=1, cluster__gpus_per_worker=1,
        cluster__workers=1, **settings,
    )  # fmt: skip
    trained(alone, tmp_path)
    (run,) = (one for one in (tmp_path / "runs").glob("*/*-rehearsal-*") if (one / "config.yaml").exists()
              and not one.name.endswith("-unbroken"))  # fmt: skip
    ours = {event.step: event.loss for event in read_events(run) if isinstance(event, StepDone)}
    wanted = losses(alone)
    assert len(wanted) == COMPARED
    for step, loss in wanted.items():
        assert ours[step] == pytest.approx(loss, rel=TOLERANCES["fp32"]), f"step {step}"

    ray_ulysses("export", run, "--out", tmp_path / "model")
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.config.hidden_size == 32
