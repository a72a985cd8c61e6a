"""Reads a run's journal, through its indexes where they are valid; all other lines are checked one by one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.events import Event
from ray_ulysses.tracking.journal_files import JournalFile, is_main_file, journal_files, open_journal_file, why_no_file
from ray_ulysses.tracking.journal_index import MIN_BYTES, JournalFileIndex, read_indexed
from ray_ulysses.tracking.journal_lines import DamagedRecord, JournalLines, parse_line
from ray_ulysses.tracking.step_groups import Entry, group_steps, ungroup_steps
from ray_ulysses.validation import ContentError


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """The content of a run's journal.

    Attributes:
        entries: The attempts in order, of each its main file before what others recorded, by time.
        damaged: The damaged lines, in the same order.
    """

    entries: tuple[Entry, ...]
    damaged: tuple[DamagedRecord, ...]


class JournalFileReader:
    """Reads a journal file from front to back, and continues where it stopped when the file has grown."""

    def __init__(self, file: JournalFile, attempt: int) -> None:
        """Read nothing yet.

        Args:
            file: The journal file.
            attempt: Its attempt.
        """
        self._file = file
        self._lines = JournalLines(file.name, attempt)

    def read(self) -> Iterator[Entry | DamagedRecord]:
        """Yield what was added since the last call; a folder or dead link in its place is one damaged record.

        Raises:
            NotAPlainFileError: The file is a pipe, a socket or a device.
            OSError: It can't be read.
        """
        reason = why_no_file(self._file)
        if reason is not None:
            yield self._lost(reason)
            return
        with open_journal_file(self._file) as stream:
            if self._lines.offset == 0:
                yield from self._first_entries(stream)
            for _, found in self._lines.read(stream):
                if found is not None:
                    yield found

    def continue_in(self, file: JournalFile) -> JournalFileReader:
        """Read on in the same file as it was listed anew, and return itself."""
        self._file = file
        return self

    def _first_entries(self, stream: BinaryIO) -> Iterator[Entry | DamagedRecord]:
        """Yield what an index holds, or that a segment is missing."""
        if isinstance(self._file, Path):
            yield from read_indexed(self._file, stream, self._lines)
        elif self._file.missing is not None:
            yield self._lost(f"its segment {self._file.missing} is missing")

    def _lost(self, reason: str) -> DamagedRecord:
        return DamagedRecord(file=self._lines.file, attempt=self._lines.attempt, line=0, reason=reason)


def read_entries(run_dir: Place | str) -> tuple[Entry, ...]:
    """Return the entries of `read_journal`."""
    return read_journal(run_dir).entries


def read_journal(run_dir: Place | str) -> Journal:
    """Read a run's journal; changes nothing.

    A last line without a line end is left out: its writer is still writing it, or died.

    Raises:
        NotAPlainFileError: A journal file is a pipe, a socket or a device.
        OSError: A journal file can't be read.
    """
    entries: list[Entry] = []
    damaged: list[DamagedRecord] = []
    for attempt, files in groupby(journal_files(run_dir), key=lambda found: found[0]):
        num_main = len(entries)
        for _, path in files:
            for found in group_steps(JournalFileReader(path, attempt).read()):
                if isinstance(found, DamagedRecord):
                    damaged.append(found)
                else:
                    entries.append(found)
            if is_main_file(path.name):
                num_main = len(entries)
        # Several commands may have recorded beside an attempt, each in several files.
        entries[num_main:] = sorted(entries[num_main:], key=lambda entry: entry.time)
    return Journal(entries=tuple(entries), damaged=tuple(damaged))


def index_journal(run_dir: Place | str) -> None:
    """Index the journal files that killed attempts left without an index; no process may train the run now."""
    for attempt, path in journal_files(run_dir):
        # In an object store nothing could be written in place.
        if isinstance(path, Path):
            JournalFileIndex(path, attempt).extend(MIN_BYTES)


def read_side_files(run_dir: Place | str) -> list[Event]:
    """Return the events that other writers recorded beside the attempts' main files, in order; they are always few.

    Raises:
        OSError: A journal file can't be read.
    """
    files = [(attempt, path) for attempt, path in journal_files(run_dir) if not is_main_file(path.name)]
    found = [entry for attempt, path in files for entry in JournalFileReader(path, attempt).read()]
    return [event for event in ungroup_steps(found) if not isinstance(event, DamagedRecord)]


def read_head_and_tail(run_dir: Place | str, attempt: int, num_bytes: int = 2**20) -> list[Event]:
    """Return the first and last events of an attempt's main file, in order.

    Args:
        run_dir: The run's directory.
        attempt: The attempt's number.
        num_bytes: Bytes read at either end, so that a long attempt takes no longer.
    """
    path = next((path for number, path in journal_files(run_dir) if number == attempt), None)
    if path is None or not is_main_file(path.name) or why_no_file(path) is not None:
        return []
    with open_journal_file(path) as stream:
        text = stream.read(num_bytes)
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(len(text), size - num_bytes))
        # A truncated line counts as damaged.
        text += (b"\n" if size > 2 * num_bytes else b"") + stream.read()
    events = []
    for line in text.split(b"\n"):
        with contextlib.suppress(ContentError):
            event = parse_line(line, attempt, must_have_checksum=False) if line else None
            events += [event] if event is not None else []
    return events
