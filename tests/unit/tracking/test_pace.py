"""Estimates of a run's remaining time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray_ulysses.tracking.history import run_pace
from ray_ulysses.tracking.journal import claim_journal
from tests.unit.tracking.journals import STARTED


def pace_of(folder: Path, **started: Any) -> float:
    sizes = {"world_size": 2, "sp_size": 1, "dp_size": 2, "nodes": ["a"], "resumed_step": 0, "resumed_from": None}
    command = {"session": "s", "command_started": 0.0}
    journal = claim_journal(folder)
    journal.append({"event": "attempt_started", **STARTED, "time": 10.0, "attempt": 1, **command, **sizes, **started})
    row = {"loss": 1.0, "tokens": 8, "rows": [0, 1], "digest": "0" * 16}
    journal.append({"event": "step", "time": 12.0, "attempt": 1, "step": 1, "seconds": 2.0, **row})
    journal.close()
    pace = run_pace(folder)
    assert pace is not None and pace.start_s == 12.0
    return pace.seconds_left


def test_the_remaining_time_covers_all_stages(tmp_path: Path) -> None:
    assert pace_of(tmp_path / "one", last_step=11) == 20.0
    assert pace_of(tmp_path / "stage", last_step=11, run_last_step=101, stage="short") == 200.0
