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

        What supervises an attempt writes beside its workers, after them: its records come last, and are read first, so
        that nothing of the workers' that came before them is returned after them.
        A line without its end is left for the next call; a file or folder that can't be read now is tried again then.
        """
        added_by: list[tuple[tuple[int, bool], list[Event]]] = []
        try:
            found = sorted(segments(self._run_dir), key=_is_beside, reverse=True)
        except OSError:
            return []
        for attempt, path in found:
            try:
                with open_regular(path) as stream:
                    stream.seek(self._offsets.get(path, 0))
                    added = stream.read()
            except OSError:
                continue
            whole = added[: added.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            events = [event for line in whole.split(b"\n") if (event := _parse(line, attempt)) is not None]
            added_by.append(((attempt, _is_beside((attempt, path))), events))
        added_by.sort(key=lambda added: added[0])
        return [event for _, events in added_by for event in events]


def _is_beside(segment: tuple[int, Path]) -> bool:
    """Whether a segment is not the attempt's first, but of a writer with a name."""
    return segment[1].name.count(".") > 1


def _parse(line: bytes, attempt: int) -> Event | None:
    """Return a line's event, or None for one that is damaged or that this version does not know."""
    try:
        return parse_line(line, attempt, must_have_checksum=False)
    except ContentError:
        return None
