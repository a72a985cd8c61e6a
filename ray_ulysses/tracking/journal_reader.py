"""Reading of a journal: what its indexes can be believed in, and every other line with its checksum and fields."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from ray_ulysses.storage.regular import open_regular
from ray_ulysses.tracking.events import Event
from ray_ulysses.tracking.journal import segments
from ray_ulysses.tracking.journal_index import LEAST_BYTES, SegmentIndex, read_indexed
from ray_ulysses.tracking.journal_lines import DamagedRecord, SegmentLines, parse_line
from ray_ulysses.tracking.step_recovery import recovered_steps
from ray_ulysses.tracking.step_runs import Entry, StepRun, grouped, single
from ray_ulysses.validation import ContentError


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """All that the journal of a run tells.

    Attributes:
        entries: Attempts in order, an attempt's first segment before its others.
        damaged: The lines that were damaged, in the same order.
    """

    entries: tuple[Entry, ...]
    damaged: tuple[DamagedRecord, ...]


class SegmentReader:
    """Reads a segment from front to back, and goes on where it has stopped when the file has grown."""

    def __init__(self, segment: Path, attempt: int) -> None:
        """Prepare; nothing is read yet.

        Args:
            segment: Its file.
            attempt: Its attempt.
        """
        self._segment = segment
        self._lines = SegmentLines(segment.name, attempt)

    def read(self) -> Iterator[Entry | DamagedRecord]:
        """Yield what was added since the last call; what stands in place of the file counts as one damaged record.

        Raises:
            NotAPlainFileError: The segment is a pipe, a socket or a device.
            OSError: It can't be read.
        """
        why = _why_no_file(self._segment)
        if why is not None:
            name, attempt = self._lines.segment, self._lines.attempt
            yield DamagedRecord(segment=name, attempt=attempt, line=0, reason=why, outcome="lost")
            return
        with open_regular(self._segment) as stream:
            if self._lines.offset == 0:
                yield from read_indexed(self._segment, stream, self._lines)
            for _, found in self._lines.read(stream):
                if found is not None:
                    yield found


def read_entries(run_dir: Path | str) -> tuple[Entry, ...]:
    """Return the entries of `read_journal`."""
    return read_journal(run_dir).entries


def read_journal(run_dir: Path | str) -> Journal:
    """Read a run's journal; changes nothing.

    A last line without its end is left out, since its writer may still be at it, or has died there.

    Raises:
        NotAPlainFileError: A segment is a pipe, a socket or a device.
        OSError: A segment can't be read.
    """
    entries: list[Entry] = []
    damaged: list[DamagedRecord] = []
    places: list[int] = []
    for attempt, path in segments(run_dir):
        for found in grouped(SegmentReader(path, attempt).read()):
            if isinstance(found, DamagedRecord):
                damaged.append(found)
                places.append(len(entries))
            else:
                entries.append(found)
    return _with_recovered_steps(entries, damaged, places)


def index_journal(run_dir: Path | str) -> None:
    """Index what attempts that were killed have left without; nobody may train the run now."""
    for attempt, path in segments(run_dir):
        SegmentIndex(path, attempt).extend(LEAST_BYTES)


def read_beside(run_dir: Path | str) -> list[Event]:
    """Return the events beside the attempts' first segments, in order; they are few, however long the run is.

    Raises:
        OSError: A segment can't be read.
    """
    beside = [(attempt, path) for attempt, path in segments(run_dir) if path.name.count(".") > 1]
    found = [entry for attempt, path in beside for entry in SegmentReader(path, attempt).read()]
    return [event for event in single(found) if not isinstance(event, DamagedRecord)]


def read_edges(run_dir: Path | str, attempt: int, num_bytes: int = 2**20) -> list[Event]:
    """Return the events at the beginning and at the end of an attempt's first segment, in order.

    Args:
        run_dir: The run's directory.
        attempt: The attempt's number.
        num_bytes: How much is read at either end, so that a long attempt takes no time.
    """
    path = next((path for number, path in segments(run_dir) if number == attempt), None)
    if path is None or path.name.count(".") > 1 or _why_no_file(path) is not None:
        return []
    with open_regular(path) as stream:
        text = stream.read(num_bytes)
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(len(text), size - num_bytes))
        # A line that is cut is damaged.
        text += (b"\n" if size > 2 * num_bytes else b"") + stream.read()
    events = []
    for line in text.split(b"\n"):
        with contextlib.suppress(ContentError):
            event = parse_line(line, attempt, must_have_checksum=False) if line else None
            events += [event] if event is not None else []
    return events


def _why_no_file(segment: Path) -> str | None:
    """Return what stands in place of a segment's file, where that is nothing to read; the rest tells its opening."""
    if segment.is_dir():
        return "a folder stands in place of the file"
    if segment.is_symlink() and not segment.exists():
        return f"it is a link to {segment.readlink()}, which is not there"
    return None


def _with_recovered_steps(entries: Sequence[Entry], damaged: list[DamagedRecord], places: Sequence[int]) -> Journal:
    """Return a journal, its lost steps made good where that can be (pure).

    Args:
        entries: What is whole.
        damaged: What is not.
        places: Entries before each damaged record.
    """
    lost = [number for number, record in enumerate(damaged) if record.outcome == "lost"]
    if lost:
        num_before = [0, *accumulate(len(entry.rows) if isinstance(entry, StepRun) else 1 for entry in entries)]
        events = list(single(entries))
        recovered = recovered_steps(events, [(num_before[places[number]], damaged[number].attempt) for number in lost])
        for number, step in reversed(list(zip(lost, recovered, strict=True))):
            if step is not None:
                events.insert(num_before[places[number]], step)
                damaged[number] = replace(damaged[number], outcome="recovered")
        entries = list(grouped(events))
    return Journal(entries=tuple(entries), damaged=tuple(damaged))
