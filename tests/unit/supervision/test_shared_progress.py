"""A child's progress, as its supervisor sees it in the memory that they share."""

from __future__ import annotations

import os

from ray_ulysses.checkpoint.notice import Notice
from ray_ulysses.supervision.shared_progress import Progress, SharedProgress


def test_both_sides_see_what_the_other_has_written() -> None:
    supervisor = SharedProgress.create()
    child = SharedProgress(os.dup(supervisor.descriptor))
    assert supervisor.progress() == Progress(beats=0, step=0, phase="starting", at=0.0, stepped=False)
    child.beat("starting", 0)
    child.beat("step", 7)
    first = supervisor.progress()
    assert (first.beats, first.step, first.phase, first.stepped) == (2, 7, "step", False) and first.at > 0
    child.beat("step", 8)
    assert supervisor.progress().stepped, "step 7 is done"
    assert child.notice() is None
    for notice in (Notice(deadline=1700000000.5), Notice(), None):
        supervisor.set_notice(notice)
        assert child.notice() == notice
    supervisor.close()
    child.beat("saving", 8)
    child.close()


def test_a_child_that_saves_has_completed_a_step() -> None:
    progress = SharedProgress.create()
    progress.beat("step", 3)
    progress.beat("saving", 3)
    assert progress.progress().stepped
    progress.close()
