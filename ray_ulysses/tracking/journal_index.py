"""The index of a journal's segment: what its lines say, read once, so that no reader parses a million of them again.

``attempt-0003.index`` stands beside ``attempt-0003.jsonl``. It consists of pieces, each for a stretch of the segment:
its steps as rows of a table, and its other lines as they are. A piece has a checksum of itself and one of the stretch,
and is believed if both are right; from the first that is not on, the segment's own lines are read. So an index that is
torn, stale or damaged costs time and nothing else, and damage in the segment is never hidden by it. It may be deleted.
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

from ray_ulysses.storage.regular import open_regular
from ray_ulysses.tracking.events import StepDone
from ray_ulysses.tracking.journal_lines import DamagedRecord, SegmentLines, parse_line
from ray_ulysses.tracking.step_runs import STEP_ROW, Entry, StepRun, grouped
from ray_ulysses.validation import ContentError, Digest, Whole, read_json

PIECE_BYTES = 2**20
"""A segment that grows is indexed in stretches of about this size: a tenth of a second of parsing."""
LEAST_BYTES = 2**14
"""A shorter rest is not worth an index."""

# The last byte is the version of what follows: what is of another one is not believed.
_MAGIC = b"journal\1"
# Magic, checksum of all that follows in the piece, bytes of its head, number of its steps.
_PREFIX = struct.Struct("<8sQQQ")
_SUM_END = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """What a piece says of its stretch of the segment.

    Attributes:
        start: The stretch's first byte.
        stop: The byte after its last.
        digest: Checksum of its bytes.
        num_lines: Lines before the stretch's end, in the whole segment.
        has_checksums: Whether one of them has a checksum.
        others: The lines that are no step's, each with the number of the piece's steps before it.
    """

    start: Whole
    stop: Whole
    digest: Digest
    num_lines: Whole
    has_checksums: bool
    others: tuple[tuple[Whole, str], ...]


_HEAD = TypeAdapter(_Head)


def index_path(segment: Path) -> Path:
    """Return where a segment's index lies."""
    return segment.with_suffix(".index")


def read_indexed(segment: Path, stream: BinaryIO, lines: SegmentLines) -> Iterator[Entry]:
    """Yield a segment's entries as far as its index can be believed, and bring `lines` to where it ends.

    Args:
        segment: The segment.
        stream: Its file.
        lines: Its reader, at the beginning.
    """
    with contextlib.suppress(OSError), open_regular(index_path(segment)) as index:
        for head, rows, _ in _pieces(index):
            stream.seek(head.start)
            text = stream.read(head.stop - head.start)
            if len(text) != head.stop - head.start or xxhash.xxh3_64_intdigest(text) != head.digest:
                return
            try:
                entries = _entries(head, rows, lines.attempt)
            except ContentError:
                # Another version's line.
                return
            lines.offset, lines.num_lines, lines.has_checksums = head.stop, head.num_lines, head.has_checksums
            yield from entries


def _entries(head: _Head, rows: np.ndarray, attempt: int) -> list[Entry]:
    entries: list[Entry] = []
    start = 0
    for place, line in (*head.others, (len(rows), "")):
        if place > start:
            entries.append(StepRun(rows[start:place]))
            start = place
        event = parse_line(line.encode(), attempt, must_have_checksum=False) if line else None
        entries += [event] if event is not None else []
    return entries


def _pieces(index: BinaryIO) -> Iterator[tuple[_Head, np.ndarray, int]]:
    """Yield the pieces that are whole and follow one another, each with its rows and with the place of its end."""
    reached = 0
    size = index.seek(0, os.SEEK_END)
    index.seek(0)
    while len(prefix := index.read(_PREFIX.size)) == _PREFIX.size:
        magic, digest, head_bytes, num_steps = _PREFIX.unpack(prefix)
        num_bytes = head_bytes + num_steps * STEP_ROW.itemsize
        if magic != _MAGIC or num_bytes > size - index.tell():
            return
        content = index.read(num_bytes)
        own = xxhash.xxh3_64(prefix[_SUM_END:])
        own.update(content)
        if own.intdigest() != digest:
            return
        try:
            head = read_json(_HEAD, content[:head_bytes])
        except ContentError:
            return
        if head.start != reached or head.stop <= reached:
            return
        reached = head.stop
        yield head, np.frombuffer(content, STEP_ROW, offset=head_bytes), index.tell()


class SegmentIndex:
    """Extends a segment's index; used by one thread at a time of the process that writes the segment or owns the run.

    Whatever the disk says to it, the segment itself is whole, and is read in its place.
    """

    def __init__(self, segment: Path, attempt: int) -> None:
        """Prepare; nothing is read before `extend`.

        Args:
            segment: The segment.
            attempt: Its attempt.
        """
        self._segment = segment
        self._lines: SegmentLines | None = None
        self._attempt = attempt
        self.reached = 0
        """Bytes of the segment that need no look for now."""

    def extend(self, least_bytes: int) -> None:
        """Index what the segment has beyond the index's end, if that is so much, up to the first damage."""
        with contextlib.suppress(OSError), open_regular(self._segment) as stream:
            self.reached = size = stream.seek(0, os.SEEK_END)
            lines, self._lines = self._lines, None
            if lines is None and size >= least_bytes:
                lines = self._resume()
            while lines is not None and size - lines.offset >= least_bytes:
                piece = self._next_piece(stream, lines)
                if piece is None or not self._append(piece):
                    # The next call finds out where the index ends.
                    return
            self._lines = lines

    def _resume(self) -> SegmentLines:
        """Return the reader at the end of what is indexed, and cut off what is not whole behind it."""
        lines = SegmentLines(self._segment.name, self._attempt)
        whole = 0
        with os.fdopen(os.open(index_path(self._segment), os.O_RDWR | os.O_CREAT, 0o644), "r+b") as index:
            for head, _, end in _pieces(index):
                lines.offset, lines.num_lines, lines.has_checksums = head.stop, head.num_lines, head.has_checksums
                whole = end
            index.truncate(whole)
        return lines

    def _append(self, piece: bytes) -> bool:
        """Write a piece at the index's end, and return whether all of it was taken."""
        descriptor = os.open(index_path(self._segment), os.O_WRONLY | os.O_APPEND)
        try:
            return os.write(descriptor, piece) == len(piece)
        finally:
            os.close(descriptor)

    def _next_piece(self, stream: BinaryIO, lines: SegmentLines) -> bytes | None:
        """Return the piece of the next stretch; None if there is nothing, or damage in it."""
        start = lines.offset
        entries: list[Entry] = []
        others: list[tuple[int, str]] = []
        for text, found in lines.read(stream):
            if isinstance(found, DamagedRecord):
                return None
            if isinstance(found, StepDone):
                entries.append(found)
            else:
                others.append((len(entries), text.decode()))
            if lines.offset - start >= PIECE_BYTES:
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
        return _encoded(head, b"".join(run.rows.tobytes() for run in grouped(entries) if isinstance(run, StepRun)))


def _encoded(head: _Head, rows: bytes) -> bytes:
    fields = {**asdict(head), "digest": f"{head.digest:016x}"}
    text = TypeAdapter(dict).dump_json(fields)
    sizes = struct.pack("<QQ", len(text), len(rows) // STEP_ROW.itemsize)
    digest = xxhash.xxh3_64(sizes)
    digest.update(text)
    digest.update(rows)
    return _MAGIC + struct.pack("<Q", digest.intdigest()) + sizes + text + rows
