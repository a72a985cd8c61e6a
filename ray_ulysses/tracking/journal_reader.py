"""Reads a run's journal: completely, only the beginnings and ends of long files, or incrementally as the journal grows.

Every line is checked. Steps of long files are parsed in blocks with pyarrow, because a run can have a million steps.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from ray_ulysses.storage.place import Place, place_of
from ray_ulysses.tracking.events import Event
from ray_ulysses.tracking.journal_files import (
    JournalFile,
    SegmentedFile,
    is_main_file,
    journal_files,
    open_journal_file,
    why_no_file,
)
from ray_ulysses.tracking.journal_lines import DamagedRecord, has_checksum, parse_line
from ray_ulysses.tracking.steps import (
    OPTIONAL_FIELDS,
    STEP_ROW,
    Entry,
    Rows,
    StepGroup,
    group_steps,
    ungroup_steps,
)
from ray_ulysses.validation import YEAR_10000_S, ContentError

END_BYTES = 2**17
"""Number of bytes to read at each end of a long file if only the ends are requested; enough for hundreds of steps."""
_BLOCK_BYTES = 2**20
_FEW_STEPS = 128
"""Largest number of steps for which parsing them one by one is faster than importing pyarrow."""
# This cannot match inside a JSON string, where the quotation marks are escaped.
_STEP_MARK = b'"event": "step"'
_ASK_EVERY_S = 1.5
_RETRY_S = 1.0
_WHOLE = ("attempt", "step", "tokens")
_FLOATS = ("time", "loss", "seconds")
_Read = TypeVar("_Read")


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """The content of a run's journal."""

    entries: tuple[Entry, ...]
    """Entries ordered by attempt. Within an attempt, its main file comes first, then other writers' entries by time."""
    damaged: tuple[DamagedRecord, ...]
    """Damaged lines, in reading order."""


class JournalFileReader:
    """Reads a journal file from front to back. Each call of `read` continues where the last stopped."""

    def __init__(self, file: JournalFile, attempt: int) -> None:
        self._file, self._attempt = file, attempt
        self._offset = 0
        # None after lines were skipped, because line numbers are then unknown.
        self._num_lines: int | None = 0

    def continue_in(self, file: JournalFile) -> JournalFileReader:
        """Continue with a newer listing of the same file; return `self`."""
        self._file = file
        return self

    def read(self, *, ends_only: bool = False, stop: int | None = None) -> Iterator[Entry | DamagedRecord]:
        """Yield the entries added since the last call. A folder or a symbolic link yields one damaged record.

        An incomplete last line without a newline is skipped: its writer is still writing the line, or died.

        Args:
            ends_only: Whether the first call reads only the beginning and the end of a long file, and returns only the
                first and the last step in them.
            stop: Offset of the end of a line at which to stop; None reads to the end of the file.

        Raises:
            NotAPlainFileError: The file is a pipe, a socket or a device.
            OSError: The file can't be read.
        """
        if (reason := why_no_file(self._file)) is not None:
            yield self._damaged(0, reason)
            return
        with open_journal_file(self._file) as stream:
            if self._offset == 0 and isinstance(self._file, SegmentedFile) and self._file.missing is not None:
                yield self._damaged(0, f"its segment {self._file.missing} is missing")
            if ends_only and self._offset == 0 and stream.seek(0, os.SEEK_END) > 2 * END_BYTES:
                yield from self._read_ends(stream)
            stream.seek(self._offset)
            end = sys.maxsize if stop is None else stop
            while lines := _read_lines(stream, min(_BLOCK_BYTES, end - self._offset)):
                yield from self._parse(lines)
                if not lines[-1].endswith(b"\n"):
                    # If the writer completes the line now, its rest must not be parsed as a separate line.
                    return

    def read_singly(self) -> Iterator[tuple[Event, int]]:
        """Yield each event added since the last call, with the offset after its line; damaged lines are skipped.

        Raises:
            OSError: See `read`.
        """
        if why_no_file(self._file) is not None:
            return
        size = self._file.stat().st_size if isinstance(self._file, Path) else self._file.num_bytes
        if size == self._offset:
            # Do not open the files of earlier attempts at every poll; they no longer grow.
            return
        with open_journal_file(self._file) as stream:
            stream.seek(self._offset)
            for line in stream:
                text = line.removesuffix(b"\n")
                if _is_being_written(line, text):
                    return
                self._offset += len(line)
                for event in self._parse_line(text, None) if text else ():
                    if not isinstance(event, DamagedRecord):
                        yield event, self._offset

    def _read_ends(self, stream: BinaryIO) -> Iterator[Entry | DamagedRecord]:
        size = stream.tell()
        stream.seek(0)
        head = stream.readlines(END_BYTES)
        # Start one byte early. Otherwise a line that begins exactly here would be dropped as the rest of another line.
        stream.seek(max(stream.tell(), size - END_BYTES) - 1)
        stream.readline()
        begin, tail = stream.tell(), stream.readlines()
        if tail and not tail[-1].endswith(b"\n"):
            tail.pop()
        # Do not skip damaged steps, so that they are reported.
        steps = [line for line in (*head, *tail) if _STEP_MARK in line and has_checksum(line.removesuffix(b"\n"))]
        left_out = {*steps} - {*steps[:1], *steps[-1:]}
        self._num_lines = None
        yield from self._parse([line for line in (*head, *tail) if line not in left_out])
        self._offset = begin + sum(map(len, tail))

    def _parse(self, lines: Sequence[bytes]) -> Iterator[Entry | DamagedRecord]:
        """Yield the entries of consecutive lines, and advance the offset and the line number."""
        steps: list[bytes] = []
        for line in lines:
            text = line.removesuffix(b"\n")
            if _STEP_MARK in text and has_checksum(text):
                steps.append(text)
            else:
                yield from self._parse_steps(steps)
                steps = []
                if _is_being_written(line, text):
                    return
                if text:
                    yield from self._parse_line(text, self._num_lines)
                # Empty lines have numbers too. One of them terminates a torn line after its writer died.
                self._count(1)
            self._offset += len(line)
        yield from self._parse_steps(steps)

    def _parse_steps(self, steps: Sequence[bytes]) -> Iterator[Entry | DamagedRecord]:
        rows = parse_steps(steps, self._attempt) if len(steps) > _FEW_STEPS else None
        if rows is not None:
            yield StepGroup(rows)
        else:
            begin = self._num_lines
            found = (
                one
                for number, text in enumerate(steps)
                for one in self._parse_line(text, None if begin is None else begin + number)
            )
            yield from group_steps(found)
        self._count(len(steps))

    def _parse_line(self, text: bytes, num_before: int | None) -> Iterator[Event | DamagedRecord]:
        try:
            event = parse_line(text, self._attempt)
        except ContentError as error:
            yield self._damaged(None if num_before is None else num_before + 1, str(error))
        else:
            if event is not None:
                yield event

    def _count(self, num_lines: int) -> None:
        self._num_lines = None if self._num_lines is None else self._num_lines + num_lines

    def _damaged(self, line: int | None, reason: str) -> DamagedRecord:
        return DamagedRecord(file=self._file.name, line=line, reason=reason)


def _read_lines(stream: BinaryIO, num_bytes: int) -> list[bytes]:
    """Read lines until they contain `num_bytes`. `readlines` reads an extra line if the limit is at a line's end."""
    lines: list[bytes] = []
    while num_bytes > 0 and (line := stream.readline()):
        lines.append(line)
        num_bytes -= len(line)
    return lines


def _is_being_written(line: bytes, text: bytes) -> bool:
    """Return whether a line (`text` without its newline) has no newline and an incomplete record."""
    # A complete record whose newline was damaged is not torn: a writer never replaces the newline with another byte.
    return text is line and not has_checksum(text) and not has_checksum(text[:-1])


def parse_steps(lines: Sequence[bytes], attempt: int) -> Rows | None:
    """Parse step lines in bulk; return None if any needs the slow parser, for example because its loss is "nan".

    Args:
        lines: Step lines with correct checksums.
        attempt: The attempt that the steps must belong to.
    """
    import pyarrow as pa
    from pyarrow import json

    floats = (*_FLOATS, "saving_seconds", *OPTIONAL_FIELDS)
    fields = [(name, pa.int64()) for name in _WHOLE] + [(name, pa.float64()) for name in floats]
    schema = pa.schema([*fields, ("rows", pa.list_(pa.int64())), ("digest", pa.string())])
    text = b"\n".join(lines)
    try:
        table = json.read_json(
            pa.BufferReader(text),
            read_options=json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            parse_options=json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        ).combine_chunks()
        columns = {name: table.column(name) for name in schema.names}
        given = (*_WHOLE, *_FLOATS, "rows", "digest")
        if len(table) != len(lines) or any(columns[name].null_count for name in given):
            return None
        digests = columns["digest"].to_pylist()
        ranges = columns["rows"].combine_chunks()
        if {*map(len, digests)} != {16} or not (np.diff(ranges.offsets.to_numpy()) == 2).all():
            return None
        rows = np.empty(len(lines), STEP_ROW)
        rows["digest"] = np.frombuffer(bytes.fromhex("".join(digests)), ">u8")
    except (pa.ArrowInvalid, ValueError):
        return None
    rows["first_row"], rows["end_row"] = ranges.flatten().to_numpy().reshape(-1, 2).T
    for name in (*_WHOLE, *_FLOATS):
        rows[name] = columns[name].to_numpy()
    rows["saving_seconds"] = columns["saving_seconds"].fill_null(0.0).to_numpy()
    for name in OPTIONAL_FIELDS:
        rows[name] = columns[name].fill_null(np.nan).to_numpy()
    return rows if _are_valid(rows, attempt) else None


def _are_valid(rows: Rows, attempt: int) -> bool:
    """Return whether all values are valid for the fields of `StepDone`."""
    return bool(
        (rows["attempt"] == attempt).all()
        and all((rows[name] >= 0).all() for name in ("step", "tokens", "first_row"))
        and (rows["end_row"] >= rows["first_row"]).all()
        and all(
            ((rows[name] >= 0) & (rows[name] < YEAR_10000_S)).all() for name in ("time", "seconds", "saving_seconds")
        )
        and not any(np.isinf(rows[name]).any() for name in ("learning_rate", "peak_memory_gib", "mfu"))
    )


def read_entries(run_dir: Place | str, *, ends_only: bool = False) -> tuple[Entry, ...]:
    """Read a run's journal and return only its entries; see `read_journal`."""
    return read_journal(run_dir, ends_only=ends_only).entries


def read_journal(run_dir: Place | str, *, ends_only: bool = False) -> Journal:
    """Read a run's journal.

    Args:
        run_dir: The run's directory.
        ends_only: Whether to read only the beginning and the end of each long file, and to return only the first and
            the last of its steps. This is fast, and sufficient to find each attempt's start and end.

    Raises:
        NotAPlainFileError: A journal file is a pipe, a socket or a device.
        OSError: A journal file can't be read.
    """
    entries: list[Entry] = []
    damaged: list[DamagedRecord] = []
    for attempt, files in groupby(journal_files(run_dir), key=lambda found: found[0]):
        num_main = len(entries)
        for _, path in files:
            for found in JournalFileReader(path, attempt).read(ends_only=ends_only):
                if isinstance(found, DamagedRecord):
                    damaged.append(found)
                else:
                    entries.append(found)
            if is_main_file(path.name):
                num_main = len(entries)
        # Several commands may have recorded events under this attempt, each in several files.
        entries[num_main:] = sorted(entries[num_main:], key=lambda entry: entry.time)
    return Journal(entries=tuple(entries), damaged=tuple(damaged))


def read_side_files(run_dir: Place | str, readers: dict[str, JournalFileReader]) -> Iterator[Event]:
    """Yield the events that are not in the attempts' main files, in reading order.

    Args:
        run_dir: The run's directory.
        readers: The last call's reader of each file, by name; only events recorded since then are yielded. This call
            adds the readers of new files.

    Raises:
        OSError: A journal file can't be read.
    """
    for attempt, file in journal_files(run_dir):
        if not is_main_file(file.name):
            reader = readers.setdefault(file.name, JournalFileReader(file, attempt)).continue_in(file)
            yield from (event for event in ungroup_steps(reader.read()) if not isinstance(event, DamagedRecord))


def read_head_and_tail(run_dir: Place | str, attempt: int) -> list[Event]:
    """Return the events at the beginning and the end of an attempt's main file, with only its first and last step."""
    path = next((path for number, path in journal_files(run_dir) if number == attempt), None)
    if path is None or not is_main_file(path.name):
        return []
    found = JournalFileReader(path, attempt).read(ends_only=True)
    return [event for event in ungroup_steps(found) if not isinstance(event, DamagedRecord)]


def in_reading_order(
    files: Iterable[tuple[int, JournalFile]],
    read: Callable[[int, JournalFile], Iterable[_Read]],
    time_of: Callable[[_Read], float],
) -> Iterator[_Read]:
    """Read journal files attempt by attempt, and yield the main file's items before those from other writers.

    Other writers record after the workers. Their files are read first; otherwise an item that a worker records
    during the read could be missed and, in the next read, be yielded after an item that follows it.

    Args:
        files: Files from `journal_files`.
        read: Function that reads the items of an attempt's file.
        time_of: Function that returns an item's time, the sort key for other writers' items.
    """
    for attempt, found in groupby(files, key=lambda one: one[0]):
        listed = [file for _, file in found]
        beside = [one for file in listed if not is_main_file(file.name) for one in read(attempt, file)]
        for file in listed:
            if is_main_file(file.name):
                yield from read(attempt, file)
        yield from sorted(beside, key=time_of)


class JournalTail:
    """Polls a run's journal for new entries; the first poll reads only the beginnings and ends of long files."""

    def __init__(self, run_dir: Place | str) -> None:
        """Start before the first entry. The directory does not need to exist yet."""
        self._run_dir = place_of(run_dir)
        self._readers: dict[str, JournalFileReader] = {}
        self._looked_at = -math.inf

    def poll(self, *, at_once: bool = False) -> list[Entry]:
        """Return the entries recorded since the last call, `in_reading_order`.

        Incomplete lines, and files or folders that can't be read now, are left for the next call.

        Args:
            at_once: Whether to list an object store even if it was listed a moment ago.
        """
        if not isinstance(self._run_dir, Path):
            now = time.monotonic()
            if not at_once and now - self._looked_at < _ASK_EVERY_S:
                return []
            self._looked_at = now
        try:
            present = list(journal_files(self._run_dir, _RETRY_S))
        except OSError:
            return []
        return list(in_reading_order(present, self._added_to, lambda entry: entry.time))

    def _added_to(self, attempt: int, file: JournalFile) -> list[Entry]:
        added: list[Entry] = []
        with contextlib.suppress(OSError):
            reader = self._readers.setdefault(file.name, JournalFileReader(file, attempt)).continue_in(file)
            added += (one for one in reader.read(ends_only=True) if not isinstance(one, DamagedRecord))
        return added
