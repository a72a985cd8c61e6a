"""Finds and opens the files of a run's journal: files in a directory, or sequences of segments in an object store.

An object store can't append. There a journal file ``journal/attempt-0003.jsonl`` is a folder of segments, each of
which holds whole lines and is never changed: ``00000000.jsonl`` (empty) claims the attempt's number, ``00000001.jsonl``
and so on follow, and ``00000001-00000256.jsonl`` takes the place of the segments it names. In this order they are the
file. A run that was copied from one kind of place to the other is read as it was written, and goes on as it is written
where it is now.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from ray_ulysses.run_names import JOURNAL_FILE_NAME, JOURNAL_FOLDER, JOURNAL_SEGMENT
from ray_ulysses.storage.place import Place, open_store, place_of
from ray_ulysses.storage.regular import entered, open_regular, opened_folder
from ray_ulysses.storage.store import Store

READ_RETRY_S = 20.0
_FETCHED_AT_ONCE = 16
_MOST_FETCHED_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalSegment:
    """A segment of a journal file."""

    key: str
    """Its key in the run's store."""
    first: int
    """Its number, or the first of those whose place it takes."""
    last: int
    """The last of these numbers."""
    num_bytes: int
    """Its size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentedFile:
    """A journal file in an object store, as it was when it was listed."""

    store: Store
    """The run's store."""
    name: str
    """Name of the file, as it would be in a directory."""
    segments: tuple[JournalSegment, ...]
    """Its segments, in order."""
    missing: int | None = None
    """The number of the first segment that is missing before a later one; None if there is none."""
    unreadable: str | None = None
    """The key of a segment that can't be opened now; None if there is none."""

    @property
    def num_bytes(self) -> int:
        """Its size; raises OSError if a segment can't be opened."""
        if self.unreadable is not None:
            raise OSError(errno.EIO, "the journal's segment can't be opened", self.unreadable)
        return sum(segment.num_bytes for segment in self.segments)

    def open(self) -> BinaryIO:
        """Return a stream of the whole file; raises OSError if a segment can't be opened."""
        return io.BufferedReader(_SegmentStream(self))

    def listed_again(self) -> SegmentedFile:
        """Return the file as it is now."""
        found = segmented_files(self.store, self.store.sizes(JOURNAL_FOLDER))
        return found.get(self.name, SegmentedFile(store=self.store, name=self.name, segments=()))


JournalFile = Path | SegmentedFile
"""A file of a run's journal."""


def journal_files(run_dir: Place | str, retry_s: float = READ_RETRY_S) -> Iterator[tuple[int, JournalFile]]:
    """Yield (attempt, file) of each journal file in reading order: by attempt, its main file first.

    Args:
        run_dir: The run's directory.
        retry_s: How long an object store that is away is asked again, in seconds.
    """
    place = place_of(run_dir)
    store = open_store(place, retry_s=retry_s)
    files: dict[str, JournalFile] = {}
    if isinstance(place, Path):
        for path in _entries(place / JOURNAL_FOLDER, place):
            files[path.name] = path
            if path.is_dir() and not path.is_symlink():
                files.update(segmented_files(store, store.sizes(f"{JOURNAL_FOLDER}/{path.name}")))
    else:
        segmented = segmented_files(store, store.sizes(JOURNAL_FOLDER))
        if any(file.missing is not None for file in segmented.values()):
            # Segments may have been merged between two pages of the list.
            segmented = segmented_files(store, store.sizes(JOURNAL_FOLDER))
        files.update(segmented)
    found = []
    for name, file in files.items():
        match = JOURNAL_FILE_NAME.match(name)
        if match:
            found.append((int(match["attempt"]), match["writer"] or "", file))
    for attempt, _, file in sorted(found, key=lambda one: one[:2]):
        yield attempt, file


def attempt_numbers(run_dir: Place | str) -> tuple[int, ...]:
    """Return the numbers of all attempts of a run that have a journal, ascending."""
    return tuple(sorted({attempt for attempt, _ in journal_files(run_dir)}))


def is_main_file(name: str) -> bool:
    """Return whether a journal file of this name is an attempt's main one, not that of another writer beside it."""
    return name.count(".") == 1


def open_journal_file(file: JournalFile) -> BinaryIO:
    """Open a journal file for reading.

    Raises:
        NotAPlainFileError: It is a pipe, a socket or a device, or there is a link on the way.
        OSError: It can't be opened.
    """
    return open_regular(file, file.parent.parent) if isinstance(file, Path) else file.open()


def why_no_file(file: JournalFile) -> str | None:
    """Return why nothing can be read in place of a journal file; other obstacles are errors of opening it."""
    if not isinstance(file, Path):
        return None
    if file.is_symlink():
        return "it is a link, which is not followed"
    return "a folder is in place of the file" if file.is_dir() else None


def _entries(folder: Path, run_dir: Path) -> list[Path]:
    """Return what is in the folder of a journal; nothing if it is absent."""
    try:
        with opened_folder(run_dir, run_dir) as above, entered(folder, above) as descriptor:
            return [folder / name for name in os.listdir(descriptor)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def segmented_files(store: Store, sizes: Mapping[str, int | None]) -> dict[str, SegmentedFile]:
    """Return the journal files that a listing of a store holds, by name (pure).

    Args:
        store: The store, which the files keep.
        sizes: The size of each file, by key; None for one that can't be opened.
    """
    by_file: dict[str, list[JournalSegment]] = {}
    unreadable: dict[str, str] = {}
    for key, num_bytes in sizes.items():
        match = JOURNAL_SEGMENT.match(key)
        if match is not None:
            first = int(match["first"] or 0)
            segment = JournalSegment(key=key, first=first, last=int(match["last"] or first), num_bytes=num_bytes or 0)
            by_file.setdefault(match["file"], []).append(segment)
            if num_bytes is None:
                unreadable.setdefault(match["file"], key)
    return {
        name: replace(_in_order(store, name, segments), unreadable=unreadable.get(name))
        for name, segments in by_file.items()
    }


def _in_order(store: Store, name: str, segments: Sequence[JournalSegment]) -> SegmentedFile:
    """Return a file of the segments that are not replaced by longer ones."""
    kept: list[JournalSegment] = []
    # Segment 0 claims an attempt; the file of another writer begins with 1.
    begins = 0 if is_main_file(name) else 1
    reached, missing = -1, None
    for segment in sorted(segments, key=lambda one: (one.first, -one.last)):
        if segment.last <= reached:
            continue
        wanted = max(reached + 1, begins)
        if segment.first > wanted and missing is None:
            missing = wanted
        kept.append(segment)
        reached = segment.last
    return SegmentedFile(store=store, name=name, segments=tuple(kept), missing=missing)


class _SegmentStream(io.RawIOBase):
    """Reads the segments of a file one after another, several at once from the store."""

    def __init__(self, file: SegmentedFile) -> None:
        self._position, self._fetched = 0, dict[str, bytes]()
        self._take(file)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a place and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read what is left of the segment at this place, as far as it fits."""
        found = self._segment_at(self._position)
        if found is None:
            return 0
        start, segment = found
        try:
            content = self._content(segment)
        except FileNotFoundError:
            # A longer segment has taken its place since. The bytes stay where they are in the file.
            self._take(self._file.listed_again())
            found = self._segment_at(self._position)
            if found is None:
                raise
            start, segment = found
            content = self._content(segment)
        part = content[self._position - start :][: len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def _take(self, file: SegmentedFile) -> None:
        self._file, self._size = file, file.num_bytes

    def _segment_at(self, position: int) -> tuple[int, JournalSegment] | None:
        """Return the segment that holds a place, and where it begins; None beyond the end."""
        start = 0
        for segment in self._file.segments:
            if start <= position < start + segment.num_bytes:
                return start, segment
            start += segment.num_bytes
        return None

    def _content(self, segment: JournalSegment) -> bytes:
        if segment.key not in self._fetched:
            self._fetched = self._fetch(segment)
        return self._fetched[segment.key]

    def _fetch(self, segment: JournalSegment) -> dict[str, bytes]:
        """Return the content of a segment and of some that follow it."""
        wanted, num_bytes = [segment], segment.num_bytes
        for after in self._file.segments[self._file.segments.index(segment) + 1 :]:
            num_bytes += after.num_bytes
            if len(wanted) == _FETCHED_AT_ONCE or num_bytes > _MOST_FETCHED_BYTES:
                break
            wanted.append(after)
        with ThreadPoolExecutor(len(wanted)) as pool:
            contents = list(pool.map(lambda one: self._file.store.read_whole(one.key), wanted))
        for one, content in zip(wanted, contents, strict=True):
            if len(content) != one.num_bytes:
                raise OSError(
                    f"journal segment {one.key} has {len(content)} bytes, and was listed with {one.num_bytes}"
                )
        return {one.key: content for one, content in zip(wanted, contents, strict=True)}
