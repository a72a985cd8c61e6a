"""Follows a journal that is being written: each whole line once, whichever attempt and process writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ray_ulysses.tracking.journal import JOURNAL_FOLDER, REQUIRED_FIELDS


class JournalTail:
    """Reads what was added to a run's journal since the last look."""

    def __init__(self, run_dir: Path | str) -> None:
        """Start before the first record; the directory need not exist yet."""
        self._folder = Path(run_dir) / JOURNAL_FOLDER
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[dict[str, Any]]:
        """Return the records that have been completed since the last call, attempt after attempt.

        A line without its end is left for the next call; a file that can't be read now is tried again then.
        """
        records: list[dict[str, Any]] = []
        for path in sorted(self._folder.glob("attempt-*.jsonl")):
            try:
                with path.open("rb") as stream:
                    stream.seek(self._offsets.get(path, 0))
                    added = stream.read()
            except OSError:
                continue
            whole = added[: added.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            records += [record for line in whole.splitlines() if (record := _parse(line)) is not None]
        return records


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a line's record, or None for one that a death has torn or that this version does not know."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    required = REQUIRED_FIELDS.get(record.get("event", ""))
    return None if required is None or any(name not in record for name in required) else record
