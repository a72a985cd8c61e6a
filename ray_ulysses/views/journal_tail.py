"""Follows a journal that is being written: each whole line once, whichever attempt and process writes it."""

from __future__ import annotations

from pathlib import Path

from ray_ulysses.storage.regular import open_regular
from ray_ulysses.tracking.events import Event
from ray_ulysses.tracking.journal import segments
from ray_ulysses.tracking.journal_reader import parse_line
from ray_ulysses.validation import ContentError


class JournalTail:
    """Reads what was added to a run's journal since the last look."""

    def __init__(self, run_dir: Path | str) -> None:
        """Start before the first record; the directory need not exist yet."""
        self._run_dir = Path(run_dir)
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[Event]:
        """Return the events that have been completed since the last call, attempt after attempt.

        A line without its end is left for the next call; a file that can't be read now is tried again then.
        """
        events: list[Event] = []
        for attempt, path in segments(self._run_dir):
            try:
                with open_regular(path) as stream:
                    stream.seek(self._offsets.get(path, 0))
                    added = stream.read()
            except OSError:
                continue
            whole = added[: added.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            events += [event for line in whole.split(b"\n") if (event := _parse(line, attempt)) is not None]
        return events


def _parse(line: bytes, attempt: int) -> Event | None:
    """Return a line's event, or None for one that is damaged or that this version does not know."""
    try:
        return parse_line(line, attempt, must_have_checksum=False)
    except ContentError:
        return None
