"""Follows a journal that is being written: each whole line once, whichever attempt and process writes it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ray_ulysses.tracking.journal import segments
from ray_ulysses.tracking.journal_lines import DamagedRecord
from ray_ulysses.tracking.journal_reader import SegmentReader
from ray_ulysses.tracking.step_runs import Entry, grouped


class JournalTail:
    """Reads what was added to a run's journal since the last look."""

    def __init__(self, run_dir: Path | str) -> None:
        """Start before the first record; the directory need not exist yet."""
        self._run_dir = Path(run_dir)
        self._readers: dict[Path, SegmentReader] = {}

    def poll(self) -> list[Entry]:
        """Return the entries that have been completed since the last call, attempt after attempt.

        What supervises an attempt writes beside its workers, after them: its records come last, and are read first, so
        that nothing of the workers' that came before them is returned after them.
        A line without its end is left for the next call; a file or folder that can't be read now is tried again then.
        """
        added_by: list[tuple[tuple[int, bool], list[Entry]]] = []
        try:
            present = sorted(segments(self._run_dir), key=_is_beside, reverse=True)
        except OSError:
            return []
        for attempt, path in present:
            added: list[Entry] = []
            with contextlib.suppress(OSError):
                found = grouped(self._readers.setdefault(path, SegmentReader(path, attempt)).read())
                added += (entry for entry in found if not isinstance(entry, DamagedRecord))
            added_by.append(((attempt, _is_beside((attempt, path))), added))
        added_by.sort(key=lambda added: added[0])
        return [entry for _, added in added_by for entry in added]


def _is_beside(segment: tuple[int, Path]) -> bool:
    """Whether a segment is not the attempt's first, but of a writer with a name."""
    return segment[1].name.count(".") > 1
