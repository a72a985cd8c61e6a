"""Whose the newest attempt is: only what is certain ends a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.run.takeover import is_taken_over, owner_of, refuse_taken_over
from ray_ulysses.tracking.journal import AttemptJournal
from tests.unit.tracking.journals import STARTED, journal

_FIELDS = {
    "world_size": 1,
    "sp_size": 1,
    "dp_size": 1,
    "nodes": ["a"],
    "resumed_step": 0,
    "resumed_from": None,
}


def _attempt(run_dir: Path, session: str | None) -> int:
    """Claim an attempt, which says whose it is unless it dies before."""
    journal = AttemptJournal.claim(run_dir)
    if session is not None:
        journal.append({"event": "attempt_started", **STARTED, "session": session, **_FIELDS})
    journal.close()
    return journal.attempt


def test_an_attempt_is_its_session_s_by_its_own_word() -> None:
    records = journal(
        [
            {"event": "attempt_started", **STARTED, "attempt": 1, "session": "one"},
            {"event": "attempt_started", **STARTED, "attempt": 2, "session": "two"},
            {"event": "attempt_started", **STARTED, "attempt": 3},
            {"event": "attempt_ended", "attempt": 4, "reason": "stopped"},
        ]
    ).entries
    found = [owner_of(attempt, records, (1, 2, 3, 4), "one") for attempt in (1, 2, 3, 4, 5)]
    assert found == ["own", "other", "unknown", "unknown", "elsewhere"]


def test_a_worker_that_was_thought_dead_takes_its_own_command_s_newer_attempt_for_no_other_s(tmp_path: Path) -> None:
    _attempt(tmp_path, "one")
    assert not is_taken_over(tmp_path, _attempt(tmp_path, "one"), "one")
    assert not is_taken_over(tmp_path, _attempt(tmp_path, None), "one")
    # Its journal may be seen late on another host.
    assert not is_taken_over(tmp_path, 99, "one")
    assert is_taken_over(tmp_path, _attempt(tmp_path, "two"), "one")


def test_only_a_command_that_has_begun_can_be_taken_over(tmp_path: Path) -> None:
    refuse_taken_over(tmp_path, 0, "one")
    newest = _attempt(tmp_path, "dead")
    refuse_taken_over(tmp_path, newest, "one")
    own = _attempt(tmp_path, "one")
    # The storage of the checkpoints may have been emptied, or be another one.
    for older in (0, newest, own):
        refuse_taken_over(tmp_path, older, "one")
    refuse_taken_over(tmp_path, _attempt(tmp_path, None), "one")
    with pytest.raises(UserError, match="attempt 99 belongs to it"):
        refuse_taken_over(tmp_path, 99, "one")
    theirs = _attempt(tmp_path, "two")
    with pytest.raises(UserError, match=f"attempt {theirs} belongs to it"):
        refuse_taken_over(tmp_path, theirs, "one")
    refuse_taken_over(tmp_path, theirs, "two")
