"""The steps that a run has taken over from another one whose checkpoint it went on from."""

from __future__ import annotations

from collections.abc import Iterable

from ray_ulysses.tracking.events import AttemptStarted, TakenOver
from ray_ulysses.tracking.step_runs import Entry


def taken_over(events: Iterable[Entry]) -> TakenOver:
    """Return the steps that the newest attempts of a run build on, beside those that its own journal records (pure).

    Args:
        events: The run's journal.
    """
    found = TakenOver()
    for event in events:
        if not isinstance(event, AttemptStarted):
            continue
        if event.taken_over is not None:
            found = event.taken_over
        elif event.resumed_step == 0:
            found = TakenOver()
    return found
