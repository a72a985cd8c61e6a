"""What several ranks run over NCCL on one GPU passes over gloo on CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.nccl_cases import run_all

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_cases_of_a_gpu_pass_on_cpus(ranks: int) -> None:
    assert len(run_all(ranks, "cpu")) >= 6


def test_a_script_that_torchrun_starts_several_times_is_on_a_host_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import json, os, sys, beside\nprint(json.dumps([dict(os.environ), sys.argv]))")
    (tmp_path / "beside.py").touch()
    found = []
    for rank in ("0", "3"):
        command = [sys.executable, "tests/gpu/one_gpu_rank.py", str(script), "--sp-size", "2"]
        environment = {**os.environ, "RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        found.append(json.loads(done.stdout))
    assert len({environment["NCCL_HOSTID"] for environment, _ in found}) == 2
    assert {environment["LOCAL_RANK"] for environment, _ in found} == {"0"}
    assert found[0][1] == [str(script), "--sp-size", "2"]
