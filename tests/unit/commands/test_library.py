"""`plan` and `train` as functions: what their import loads, and that they are the commands."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses import plan, train
from ray_ulysses.errors import ConfigError
from ray_ulysses.run.preflight import report_run
from tests.distributed.run_case import make_config
from tests.unit.config.trees import small_tree


def test_the_import_of_the_functions_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from ray_ulysses import plan, train; sys.exit(bool({'torch', 'ray', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=240, check=False).returncode == 0


def test_plan_returns_what_the_command_prints(tmp_path: Path) -> None:
    tree: dict[str, Any] = small_tree(run__storage=str(tmp_path), data__path=str(tmp_path / "none"))
    file = tmp_path / "config.yaml"
    config = make_config(tmp_path, tmp_path / "none", cluster__workers=2)
    file.write_text(config.to_yaml())
    assert plan(file) == plan(str(file), []) == report_run(config, tmp_path)
    assert [problem.path for problem in plan(file).problems] == ["data.path"]
    report = plan(tree, ["cluster.workers=2", "parallel.sp_size=2"], synthetic=True)
    assert report.layout.world_size == 2 and not report.problems
    with pytest.raises(FrozenInstanceError):
        report.name = "other"  # type: ignore[misc]


def test_train_refuses_what_the_command_refuses() -> None:
    with pytest.raises(ConfigError, match=r"run\.sede"):
        train(small_tree(), ["run.sede=1"])
