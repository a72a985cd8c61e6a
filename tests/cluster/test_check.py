"""`ray-ulysses check` on a Ray of its own: a run that is ready, and runs with a fault each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.run_case import make_config, make_corpus
from tests.polling import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def check(
    folder: Path, *options: str, fault: Callable[[Path], object] | None = None, **overrides: Any
) -> tuple[int, dict[str, Any]]:
    """Check a run, while a fault is planted into its trial, whose directory the fault is given."""
    settings = {
        "run__stop_step": None,
        "schedule__horizon_steps": None,
        "cluster__workers": 2,
        "data__rows_per_step": 4,
    }
    config = make_config(folder / "runs", make_corpus(folder), **{**settings, **overrides})
    (folder / "config.yaml").write_text(config.to_yaml())
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "ray_ulysses", "check", folder / "config.yaml", "--steps=12", "--json", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=(folder / "said").open("w"), text=True, env=environment
    ) as running:
        try:
            if fault is not None:
                trials = (folder / "runs").glob
                at_once(lambda: running.poll() is not None or any(trials("run-check-*/config.yaml")))
                fault(next(trials("run-check-*/config.yaml")).parent)
            told, _ = running.communicate(timeout=600)
        finally:
            running.kill()
    assert running.returncode in (0, 1), (folder / "said").read_text()[-3000:]
    return running.returncode, json.loads(told)


def at_once(holds: Callable[[], object]) -> None:
    """Look every few milliseconds: what follows must not be too late for a fault."""
    wait_until(holds, "the moment of the fault", timeout_s=300.0, every_s=0.002)


def full_storage(trial: Path) -> None:
    """Nothing can be created where its checkpoints would be."""
    (trial / "checkpoints").write_text("")


def damaged_checkpoint(trial: Path) -> None:
    """A byte of a shard changes once it is committed."""
    folder = trial / "checkpoints" / "step-00000012"
    at_once((folder / "manifest.json").is_file)
    shard = next(folder.rglob("rank-00001-of-00002.safetensors"))
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 0x10]))


def damaged_corpus(trial: Path) -> None:
    """Tokens change after the plan was made and before they are read."""
    for shard in (trial.parents[1] / "corpus" / "shards").iterdir():
        content = bytearray(shard.read_bytes())
        for at in range(4, len(content) - 4096, 64):
            content[at] ^= 0x10
        shard.write_bytes(content)


@pytest.mark.parametrize(
    ("line", "fault", "settings"),
    [
        ("checkpoint written", full_storage, {}),
        ("checkpoint loaded", damaged_checkpoint, {}),
        ("trains", damaged_corpus, {}),
        ("memory", None, {"memory__device_gib": 0.6}),
        ("finite", None, {"optimizer__lr": 1e30, "schedule__warmup_steps": 0}),
    ],
    ids=["storage that takes nothing", "damaged checkpoint", "damaged corpus", "too much memory", "not finite"],
)  # fmt: skip
def test_each_planted_fault_fails_the_line_that_names_it(
    tmp_path: Path, line: str, fault: Callable[[Path], object] | None, settings: dict[str, Any]
) -> None:
    code, report = check(tmp_path, fault=fault, **{"optimizer__lr": 3e-3, **settings})
    failed = {one["name"]: one["found"] for one in report["lines"] if one["holds"] is False}
    assert code == 1 and list(failed) == [line], report
    assert list((tmp_path / "runs").iterdir()) == []


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
