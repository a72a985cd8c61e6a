"""Follows a journal that is being written and returns each complete line once."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ray_ulysses.tracking.journal import is_main_file, journal_files
from ray_ulysses.tracking.journal_lines import DamagedRecord
from ray_ulysses.tracking.journal_reader import JournalFileReader
from ray_ulysses.tracking.step_groups import Entry, group_steps


class JournalTail:
    """Reads what was added to a run's journal since the last call."""

    def __init__(self, run_dir: Path | str) -> None:
        """Start before the first record; the directory need not exist yet."""
        self._run_dir = Path(run_dir)
        self._readers: dict[Path, JournalFileReader] = {}

    def poll(self) -> list[Entry]:
        """Return the entries that have been completed since the last call, attempt after attempt.

        The controller of an attempt writes its records after the workers'. They are read first and returned last, so
        that no earlier record of a worker is returned after them. An incomplete line, and a file or folder that can't
        be read now, are left for the next call.
        """
        added_by: list[tuple[tuple[int, bool], list[Entry]]] = []
        try:
            present = sorted(journal_files(self._run_dir), key=lambda file: is_main_file(file[1]))
        except OSError:
            return []
        for attempt, path in present:
            added: list[Entry] = []
            with contextlib.suppress(OSError):
                found = group_steps(self._readers.setdefault(path, JournalFileReader(path, attempt)).read())
                added += (entry for entry in found if not isinstance(entry, DamagedRecord))
            added_by.append(((attempt, not is_main_file(path)), added))
        added_by.sort(key=lambda added: added[0])
        return [entry for _, added in added_by for entry in added]
