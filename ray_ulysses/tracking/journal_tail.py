"""Follows a journal that is being written and returns each complete line once."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path

from ray_ulysses.storage.place import Place, place_of
from ray_ulysses.tracking.journal_files import is_main_file, journal_files
from ray_ulysses.tracking.journal_lines import DamagedRecord
from ray_ulysses.tracking.journal_reader import JournalFileReader
from ray_ulysses.tracking.step_groups import Entry

_ASK_EVERY_S = 1.5
_RETRY_S = 1.0


class JournalTail:
    """Reads what was added to a run's journal since the last call; of what was there before, the ends of long files."""

    def __init__(self, run_dir: Place | str) -> None:
        """Start before the first record; the directory need not exist yet."""
        self._run_dir = place_of(run_dir)
        self._readers: dict[str, JournalFileReader] = {}
        self._looked_at = -math.inf

    def poll(self, *, at_once: bool = False) -> list[Entry]:
        """Return the entries that have been completed since the last call, attempt after attempt.

        The controller of an attempt writes its records after the workers'. They are read first and returned last, so
        that no earlier record of a worker is returned after them. An incomplete line, and a file or folder that can't
        be read now, are left for the next call.

        Args:
            at_once: Whether an object store is asked even if it was asked a moment ago.
        """
        if not isinstance(self._run_dir, Path):
            now = time.monotonic()
            if not at_once and now - self._looked_at < _ASK_EVERY_S:
                return []
            self._looked_at = now
        added_by: list[tuple[tuple[int, bool], list[Entry]]] = []
        try:
            present = sorted(journal_files(self._run_dir, _RETRY_S), key=lambda file: is_main_file(file[1].name))
        except OSError:
            return []
        for attempt, path in present:
            added: list[Entry] = []
            with contextlib.suppress(OSError):
                reader = self._readers.setdefault(path.name, JournalFileReader(path, attempt)).continue_in(path)
                found = reader.read(ends_only=True)
                added += (entry for entry in found if not isinstance(entry, DamagedRecord))
            added_by.append(((attempt, not is_main_file(path.name)), added))
        added_by.sort(key=lambda added: added[0])
        return [entry for _, added in added_by for entry in added]
