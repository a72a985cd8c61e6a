"""A script that calls ``train``, with a plugin that Ray's workers import from ``PYTHONPATH``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ray_ulysses.tracking.history import read_history
from tests.cluster.commands import TIMEOUT_S
from tests.distributed.run_case import make_config
from tests.docs_commands import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
_SCRIPT = """
import json, sys
from ray_ulysses import train
results = [train(sys.argv[1], overrides, quiet=True) for overrides in ([], ["run.stop_step=2"])]
print(json.dumps([[one.history.status, one.history.step, one.was_complete] for one in results]))
"""


def test_a_script_trains_with_a_plugin(corpus: Path, tmp_path: Path) -> None:
    config = make_config(
        tmp_path, corpus, run__stop_step=2, run__plugins=["examples.plugin:Focal"], cluster__workers=2,
        cluster__cpus_per_worker=0.25, elastic__cloud_notices="none",
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, str(tmp_path / "config.yaml")], cwd=tmp_path, timeout=TIMEOUT_S,
            env={**os.environ, "RAY_ADDRESS": "", "RAY_TMPDIR": ray_folder, "PYTHONPATH": str(ROOT),
                 "PLUGIN_FILE": str(tmp_path / "events")},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [["finished", 2, False], ["finished", 2, True]]
    steps = read_history(config.run_dir).steps
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [event for event in events if event[0] == "step"] == [["step", one.step, one.loss] for one in steps]
    assert events[-1] == ["end", 2, "finished"]
