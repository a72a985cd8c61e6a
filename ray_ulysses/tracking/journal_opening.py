"""Opens a run's journal for writing, in a directory or in an object store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ray_ulysses.clock import Clock
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.journal import AttemptJournal

if TYPE_CHECKING:
    from ray_ulysses.tracking.segmented_journal import SegmentedJournal

    JournalWriter = AttemptJournal | SegmentedJournal


def claim_journal(run_dir: Place, clock: Clock | None = None, *, after: int = 0) -> JournalWriter:
    """Start the journal of a new attempt under the first free number, as `AttemptJournal.claim` does."""
    if isinstance(run_dir, Path):
        return AttemptJournal.claim(run_dir, clock, after=after)
    from ray_ulysses.tracking.segmented_journal import claim_segmented

    return claim_segmented(run_dir, clock, after=after)


def open_journal(
    run_dir: Place, attempt: int, *, writer: str | None = None, clock: Clock | None = None
) -> JournalWriter:
    """Continue the journal of an attempt that has been claimed, as `AttemptJournal.open` does."""
    if isinstance(run_dir, Path):
        return AttemptJournal.open(run_dir, attempt, writer=writer, clock=clock)
    from ray_ulysses.tracking.segmented_journal import open_segmented

    return open_segmented(run_dir, attempt, writer=writer, clock=clock)
