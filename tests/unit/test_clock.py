from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

import ray_ulysses
from ray_ulysses import clock as module
from ray_ulysses.clock import CLOCK_START, SystemClock
from ray_ulysses.tracking.journal import claim_journal
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.run_time import time_spent
from tests.unit.tracking.journals import STARTED

YEAR_S = 365 * 86400.0
STARTED = {
    "event": "attempt_started", **STARTED, "world_size": 1, "sp_size": 1, "dp_size": 1, "nodes": (), "resumed_step": 0,
    "resumed_from": None, "session": "one",
}  # fmt: skip
STEP = {"event": "step", "loss": 1.0, "tokens": 1, "rows": (0, 1), "digest": "0" * 16, "seconds": 0.001}
_OTHER_PROCESS = (
    "import sys, time\n"
    "wall = time.time\n"
    "time.time = lambda: wall() + float(sys.argv[1])\n"
    "from ray_ulysses.clock import SystemClock\n"
    "print(SystemClock().now())\n"
)


@pytest.fixture(autouse=True)
def first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLOCK_START, "")
    module._start.cache_clear()


@pytest.mark.parametrize("jump_s", [YEAR_S, -YEAR_S])
def test_the_time_of_a_run_is_what_passed_though_the_wall_clock_jumps_between_its_records(
    jump_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall, began = time.time, time.monotonic()
    with closing(claim_journal(tmp_path)) as journal:
        journal.append({**STARTED, "command_started": SystemClock().now()})
        for step in range(1, 5):
            monkeypatch.setattr(time, "time", lambda step=step: wall() + step * jump_s)
            journal.append({**STEP, "step": step})
        journal.append({"event": "attempt_ended", "reason": "finished"})
    passed = time.monotonic() - began
    spent = time_spent(read_entries(tmp_path))
    assert 0 < spent.total_s <= passed + 0.01
    assert 0 < spent.steps_s <= 0.004


def test_a_process_that_a_command_starts_after_a_jump_has_its_commands_time() -> None:
    before = SystemClock().now()
    command = [sys.executable, "-c", _OTHER_PROCESS, str(-YEAR_S)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert before <= float(done.stdout) <= SystemClock().now()


def test_a_machine_that_has_started_anew_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLOCK_START, f"{'0' * 36} 17.0")
    assert SystemClock().now() == pytest.approx(time.time(), abs=5.0)
    assert "0" * 36 not in os.environ[CLOCK_START]


def test_the_wall_clock_is_read_only_where_something_outside_the_package_is_compared_with_it() -> None:
    package = Path(ray_ulysses.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "time.time_ns", "datetime.now")
    }
    files = ("clock", "cluster/rehearsal", "commands/submit", "data/plan/plan_copies", "storage/atomic")
    assert found == {f"{name}.py" for name in (*files, "tracking/mlflow_results")}
