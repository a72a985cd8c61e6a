from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.tracking.events import AttemptEnded, RunFailed, StartFailed
from ray_ulysses.tracking.failures import record_failure
from ray_ulysses.tracking.journal_reader import read_entries

_FIELDS: dict[str, Any] = {
    "time": 21.5,
    "attempt": 1,
    "session": "s",
    "kind": "hang",
    "reason": "rank 1 stands still",
    "rank": 1,
}


@pytest.mark.parametrize(
    "failure",
    [
        AttemptEnded(**_FIELDS, fault_at=18.0, detected_at=21.0, restarts=True),
        AttemptEnded(**_FIELDS, restarts=True),
        StartFailed(**_FIELDS, command_started=2.5, failure=1, max_failures=3),
        RunFailed(**_FIELDS, way_out="repair the node", lost_steps=2, restarts=False),
    ],
    ids=["timed", "untimed", "start", "run"],
)
def test_a_failure_is_read_as_it_was_recorded(tmp_path: Path, failure: AttemptEnded | StartFailed | RunFailed) -> None:
    record_failure(tmp_path, failure, writer="controller")
    (read,) = read_entries(tmp_path)
    assert read == failure
