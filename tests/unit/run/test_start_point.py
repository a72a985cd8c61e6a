"""What a journal says that a store should hold."""

from __future__ import annotations

from ray_ulysses.checkpoint.fence import Lineage
from ray_ulysses.run.start_point import commits_that_count
from ray_ulysses.tracking.events import Event
from tests.unit.tracking.journals import event

LOST = Lineage(newest_attempt=0, started_from={})


def committed(step: int, attempt: int = 1) -> Event:
    return event({"event": "checkpoint_committed", "step": step, "attempt": attempt})


def test_steps_that_were_set_aside_are_not_missed() -> None:
    aside = event({"event": "checkpoint_set_aside", "step": 4, "reason": "torn", "attempt": 2})
    started = event({"event": "attempt_started"})
    assert commits_that_count([], LOST) == ()
    assert commits_that_count([started, committed(2), committed(4), aside], LOST) == (2,)
    assert commits_that_count([committed(4), aside, committed(4)], LOST) == (4,)


def test_what_a_later_attempt_started_before_is_not_missed() -> None:
    lineage = Lineage(newest_attempt=2, started_from={1: 0, 2: 2})
    assert commits_that_count([committed(2), committed(4), committed(6, 2)], lineage) == (2, 6)
    assert commits_that_count([committed(4), committed(4, 2)], lineage) == (4,)
