"""A child's progress, as its supervisor sees it in the memory that they share."""

from __future__ import annotations

import os
import time

from ray_ulysses.checkpoint.notice import Notice
from ray_ulysses.elastic.hang import RankProgress
from ray_ulysses.supervision.shared_progress import SharedProgress


def progress(shared: SharedProgress, idle_since: float) -> RankProgress:
    return shared.progress(0, idle_since=idle_since, state="R")


def test_both_sides_see_what_the_other_has_written() -> None:
    supervisor = SharedProgress.create()
    child = SharedProgress(os.dup(supervisor.descriptor))
    before = time.monotonic() - 60.0
    assert progress(supervisor, before).idle_s >= 60.0, "since it was asked for"
    child.beat("start", 0)
    for _ in range(3):
        child.beat("step", 7)
    first = progress(supervisor, before)
    assert (first.step, first.phase, first.micro_batch, first.steps) == (7, "step", 2, 0)
    assert first.idle_s < 60.0
    child.beat("step", 8)
    second = progress(supervisor, before)
    assert (second.step, second.micro_batch, second.steps) == (8, 0, 1) and second.step_s > 0, "step 7 is done"
    child.wait_for_row(True)
    assert progress(supervisor, before).waits_for_row
    child.wait_for_row(False)
    assert not progress(supervisor, before).waits_for_row
    child.beat("evaluation", 8)
    child.beat("save", 8)
    assert progress(supervisor, before).steps == 2, "each step counts once, whatever follows it"
    assert child.notice() is None
    for notice in (Notice(deadline=1700000000.5), Notice(), None):
        supervisor.set_notice(notice)
        assert child.notice() == notice
    supervisor.close()
    child.beat("save", 8)
    child.close()
