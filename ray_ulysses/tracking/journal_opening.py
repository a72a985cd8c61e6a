"""Opens a run's journal for writing, in a directory or in an object store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ray_ulysses.clock import Clock
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.events import Event
from ray_ulysses.tracking.journal import AttemptJournal


class JournalWriter(Protocol):
    """Appends events to one journal file; `AttemptJournal` says what each method promises.

    Attributes:
        attempt: The attempt's number.
    """

    attempt: int

    @property
    def path(self) -> Path | str:
        """The journal file, for errors."""
        ...

    @property
    def num_bytes(self) -> int:
        """The size of the file, including what is still to be written."""
        ...

    @property
    def num_pending(self) -> int:
        """The number of records that were not accepted yet."""
        ...

    def append(self, event: Mapping[str, Any], watch: Callable[[Event], None] = ...) -> None:
        """Record one event."""
        ...

    def is_gone(self) -> bool:
        """Return whether the file was deleted or moved away."""
        ...

    def sync(self) -> None:
        """Make all records durable."""
        ...

    def close(self) -> None:
        """Write the rest and end."""
        ...


def claim_journal(run_dir: Place, clock: Clock | None = None, *, after: int = 0) -> JournalWriter:
    """Start the journal of a new attempt under the first free number.

    Args:
        run_dir: The run's directory.
        clock: Source of the records' times.
        after: The number is larger than this, since attempts may be known that left no journal here.

    Raises:
        UserError: The journal can't be written.
    """
    if isinstance(run_dir, Path):
        return AttemptJournal.claim(run_dir, clock, after=after)
    from ray_ulysses.tracking.segmented_journal import claim_segmented

    return claim_segmented(run_dir, clock, after=after)


def open_journal(
    run_dir: Place, attempt: int, *, writer: str | None = None, clock: Clock | None = None
) -> JournalWriter:
    """Continue the journal of an attempt that has been claimed, perhaps by another process.

    Args:
        run_dir: The run's directory.
        attempt: The claimed number.
        writer: Name of this writer, which gets a file of its own; None for the attempt's main file.
        clock: Source of the records' times.

    Raises:
        OSError: It can't be opened.
    """
    if isinstance(run_dir, Path):
        return AttemptJournal.open(run_dir, attempt, writer=writer, clock=clock)
    from ray_ulysses.tracking.segmented_journal import open_segmented

    return open_segmented(run_dir, attempt, writer=writer, clock=clock)
