"""The index of a journal file: its parsed lines, so that no reader parses a million of them again.

``attempt-0003.index`` lies beside ``attempt-0003.jsonl``. It consists of blocks, each for a range of the journal file:
its steps as rows of a table, and its other lines as they are. A block holds a checksum of itself and one of the range,
and is used if both are right; from the first block that is not, the journal file itself is read. So an index that is
torn, stale or damaged costs time and nothing else, and never hides damage in the journal. It may be deleted.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash
from pydantic import TypeAdapter

from ray_ulysses.storage.regular import open_inside, open_regular
from ray_ulysses.tracking.events import StepDone
from ray_ulysses.tracking.journal_lines import DamagedRecord, JournalLines, parse_line
from ray_ulysses.tracking.step_groups import STEP_ROW, Entry, StepGroup, step_rows
from ray_ulysses.validation import ContentError, Digest, Whole, read_json

BLOCK_BYTES = 2**20
"""A growing journal file is indexed in ranges of about this size: a tenth of a second of parsing."""
MIN_BYTES = 2**14
"""A shorter rest is not worth an index."""

# The last byte is the version of the format; a block of another version is not used.
_MAGIC = b"journal\2"
# Magic, checksum of all that follows in the block, bytes of its head, number of its steps.
_PREFIX = struct.Struct("<8sQQQ")
_CHECKSUM_END = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """The head of a block.

    Attributes:
        start: First byte of its range of the journal file.
        stop: The byte after the last.
        digest: Checksum of these bytes.
        num_lines: Lines up to the range's end, in the whole file.
        has_checksums: Whether one of them has a checksum.
        others: The lines that are not steps, each with the number of the block's steps before it.
    """

    start: Whole
    stop: Whole
    digest: Digest
    num_lines: Whole
    has_checksums: bool
    others: tuple[tuple[Whole, str], ...]


_HEAD = TypeAdapter(_Head)


def index_path(file: Path) -> Path:
    """Return the path of a journal file's index."""
    return file.with_suffix(".index")


def read_indexed(file: Path, stream: BinaryIO, lines: JournalLines) -> Iterator[Entry]:
    """Yield the entries of a journal file as far as its index is valid, and move `lines` to where it ends.

    Args:
        file: The journal file.
        stream: The same, opened.
        lines: Its reader, at the start.
    """
    with contextlib.suppress(OSError), open_regular(index_path(file), file.parent.parent) as index:
        for head, rows, _ in _blocks(index):
            stream.seek(head.start)
            text = stream.read(head.stop - head.start)
            if len(text) != head.stop - head.start or xxhash.xxh3_64_intdigest(text) != head.digest:
                return
            try:
                entries = _entries(head, rows, lines.attempt)
            except ContentError:
                # A line of another version.
                return
            _move(lines, head)
            yield from entries


def _move(lines: JournalLines, head: _Head) -> None:
    lines.offset, lines.num_lines, lines.has_checksums = head.stop, head.num_lines, head.has_checksums


def _entries(head: _Head, rows: np.ndarray, attempt: int) -> list[Entry]:
    entries: list[Entry] = []
    start = 0
    for stop, line in (*head.others, (len(rows), "")):
        if stop > start:
            entries.append(StepGroup(rows[start:stop]))
            start = stop
        event = parse_line(line.encode(), attempt, must_have_checksum=False) if line else None
        entries += [event] if event is not None else []
    return entries


def _blocks(index: BinaryIO) -> Iterator[tuple[_Head, np.ndarray, int]]:
    """Yield the blocks that are intact and follow one another, each with its rows and the offset of its end."""
    reached = 0
    size = index.seek(0, os.SEEK_END)
    index.seek(0)
    while len(prefix := index.read(_PREFIX.size)) == _PREFIX.size:
        magic, checksum, head_bytes, num_steps = _PREFIX.unpack(prefix)
        num_bytes = head_bytes + num_steps * STEP_ROW.itemsize
        if magic != _MAGIC or num_bytes > size - index.tell():
            return
        content = index.read(num_bytes)
        if _checksum(prefix[_CHECKSUM_END:], content) != checksum:
            return
        try:
            head = read_json(_HEAD, content[:head_bytes])
        except ContentError:
            return
        if head.start != reached or head.stop <= reached:
            return
        reached = head.stop
        yield head, np.frombuffer(content, STEP_ROW, offset=head_bytes), index.tell()


class JournalFileIndex:
    """Extends the index of a journal file; used by one thread at a time, of the file's writer or the run's owner.

    Errors of the disk are ignored: readers then use the journal file itself.
    """

    def __init__(self, file: Path, attempt: int) -> None:
        """Read nothing before `extend`.

        Args:
            file: The journal file.
            attempt: Its attempt.
        """
        self._file = file
        self._lines: JournalLines | None = None
        self._attempt = attempt
        self.reached = 0
        """Size of the journal file when it was last inspected."""

    def extend(self, min_bytes: int) -> None:
        """Index the part of the file beyond the index's end, if it has this size, up to the first damage."""
        with contextlib.suppress(OSError), open_regular(self._file, self._file.parent.parent) as stream:
            self.reached = size = stream.seek(0, os.SEEK_END)
            lines, self._lines = self._lines, None
            if lines is None and size >= min_bytes:
                lines = self._resume()
            while lines is not None and size - lines.offset >= min_bytes:
                block = self._next_block(stream, lines)
                if block is None or not self._append(block):
                    # The next call finds out where the index ends.
                    return
            self._lines = lines

    def _resume(self) -> JournalLines:
        """Return a reader that starts at the end of the index, and truncate the index to its intact blocks."""
        lines = JournalLines(self._file.name, self._attempt)
        intact = 0
        with os.fdopen(self._open(os.O_RDWR | os.O_CREAT), "r+b") as index:
            for head, _, end in _blocks(index):
                _move(lines, head)
                intact = end
            index.truncate(intact)
        return lines

    def _open(self, flags: int) -> int:
        return open_inside(index_path(self._file), self._file.parent.parent, flags)

    def _append(self, block: bytes) -> bool:
        """Append a block to the index, and return whether all of it was written."""
        descriptor = self._open(os.O_WRONLY | os.O_APPEND)
        try:
            return os.write(descriptor, block) == len(block)
        finally:
            os.close(descriptor)

    def _next_block(self, stream: BinaryIO, lines: JournalLines) -> bytes | None:
        """Return the block of the next range; None if there is nothing to index, or damage in it."""
        start = lines.offset
        steps: list[StepDone] = []
        others: list[tuple[int, str]] = []
        for text, found in lines.read(stream):
            if isinstance(found, DamagedRecord):
                return None
            if isinstance(found, StepDone):
                steps.append(found)
            else:
                others.append((len(steps), text.decode()))
            if lines.offset - start >= BLOCK_BYTES:
                break
        if lines.offset == start:
            return None
        stream.seek(start)
        head = _Head(
            start=start,
            stop=lines.offset,
            digest=xxhash.xxh3_64_intdigest(stream.read(lines.offset - start)),
            num_lines=lines.num_lines,
            has_checksums=lines.has_checksums,
            others=tuple(others),
        )
        text = TypeAdapter(dict).dump_json({**asdict(head), "digest": f"{head.digest:016x}"})
        content = text + step_rows(steps).tobytes()
        sizes = struct.pack("<QQ", len(text), len(steps))
        return _MAGIC + struct.pack("<Q", _checksum(sizes, content)) + sizes + content


def _checksum(sizes: bytes, content: bytes) -> int:
    state = xxhash.xxh3_64(sizes)
    state.update(content)
    return state.intdigest()
