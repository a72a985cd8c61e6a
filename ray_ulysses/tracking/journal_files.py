"""Finds and opens a run's journal files: files in a directory, or sequences of segments in an object store.

An object store does not support appends. There, the journal file ``journal/attempt-0003.jsonl`` is a folder of
immutable segments that contain complete lines. The empty ``00000000.jsonl`` claims the attempt's number,
``00000001.jsonl`` and so on follow, and ``00000001-00000256.jsonl`` replaces the segments with these numbers. In this
order, the segments are concatenated to form the file. If a run is copied between a directory and an object store,
existing files are read in their old format, and new records are written in the format of the new storage.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from ray_ulysses.run_names import JOURNAL_FILE_NAME, JOURNAL_FOLDER, JOURNAL_SEGMENT
from ray_ulysses.storage.place import Place, open_store, place_of
from ray_ulysses.storage.regular import entered, open_regular, opened_folder
from ray_ulysses.storage.store import Store, StoredFile

READ_RETRY_S = 20.0
_FETCHED_AT_ONCE = 16
_MOST_FETCHED_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalSegment:
    """A segment of a journal file."""

    key: str
    """Key of the segment in the run's store."""
    first: int
    """First segment number that the segment covers; a merged segment covers several."""
    last: int
    """Last segment number that the segment covers."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentedFile:
    """A journal file in an object store, as of its last listing."""

    store: Store
    """The run's store."""
    name: str
    """Name of the file, such as ``attempt-0003.jsonl``."""
    segments: tuple[JournalSegment, ...]
    """Segments of the file, in order."""
    missing: int | None = None
    """Number of the first missing segment that later segments follow; None if there is no gap."""
    unreadable: str | None = None
    """Key of a segment that can't be opened; None if there is no such segment."""

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes; raises OSError if a segment can't be opened."""
        if self.unreadable is not None:
            raise OSError(errno.EIO, "the journal segment can't be opened", self.unreadable)
        return sum(segment.num_bytes for segment in self.segments)

    def open(self) -> BinaryIO:
        """Return a stream over all segments; raises OSError if a segment can't be opened."""
        return io.BufferedReader(_SegmentStream(self))

    def listed_again(self) -> SegmentedFile:
        """List the file's segments again and return the result."""
        found = segmented_files(self.store, self.store.sizes(JOURNAL_FOLDER))
        return found.get(self.name, SegmentedFile(store=self.store, name=self.name, segments=()))


JournalFile = Path | SegmentedFile
"""A file of a run's journal: a path, or segments in an object store."""


def journal_files(run_dir: Place | str, retry_s: float = READ_RETRY_S) -> Iterator[tuple[int, JournalFile]]:
    """Yield the run's journal files as (attempt, file): by ascending attempt, with each attempt's main file first.

    Args:
        run_dir: The run's directory.
        retry_s: How long to retry while an object store is unavailable, in seconds.
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
            # Segments may have been merged between two pages of the listing.
            segmented = segmented_files(store, store.sizes(JOURNAL_FOLDER))
        files.update(segmented)
    found = []
    for name, file in files.items():
        if match := JOURNAL_FILE_NAME.match(name):
            found.append((int(match["attempt"]), match["writer"] or "", file))
    for attempt, _, file in sorted(found, key=lambda one: one[:2]):
        yield attempt, file


def attempt_numbers(run_dir: Place | str) -> tuple[int, ...]:
    """Return the numbers of all attempts that have a journal file, ascending."""
    return tuple(sorted({attempt for attempt, _ in journal_files(run_dir)}))


def is_main_file(name: str) -> bool:
    """Return whether a journal file name denotes an attempt's main file, rather than another writer's file."""
    return name.count(".") == 1


def open_journal_file(file: JournalFile) -> BinaryIO:
    """Open a journal file for reading.

    Raises:
        NotAPlainFileError: The file is a pipe, a socket or a device, or its path contains a symbolic link.
        OSError: The file can't be opened.
    """
    return open_regular(file, file.parent.parent) if isinstance(file, Path) else file.open()


def why_no_file(file: JournalFile) -> str | None:
    """Return why a journal file must not be opened, or None if it may (opening may still raise OSError)."""
    if not isinstance(file, Path):
        return None
    if file.is_symlink():
        return "the file is a symbolic link, which is not followed"
    return "the path is a folder, not a file" if file.is_dir() else None


def _entries(folder: Path, run_dir: Path) -> list[Path]:
    """Return the paths in a journal folder, or an empty list if the folder does not exist."""
    try:
        with opened_folder(run_dir, run_dir) as above, entered(folder, above) as descriptor:
            return [folder / name for name in os.listdir(descriptor)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def segmented_files(store: Store, sizes: Mapping[str, int | None]) -> dict[str, SegmentedFile]:
    """Return the journal files in a store's listing, by name.

    Args:
        store: The store that the files will be read from.
        sizes: The listing: the size of each object by key, or None for an object that can't be opened.
    """
    by_file: dict[str, list[JournalSegment]] = {}
    unreadable: dict[str, str] = {}
    for key, num_bytes in sizes.items():
        if (match := JOURNAL_SEGMENT.match(key)) is not None:
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
    """Build a file from its segments, leaving out segments that a merged segment covers."""
    kept: list[JournalSegment] = []
    # Only a main file has segment 0, which claims the attempt; other writers' files begin with segment 1.
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


class _SegmentStream(StoredFile):
    """A stream over a file's segments, which are prefetched from the store in parallel."""

    def __init__(self, file: SegmentedFile) -> None:
        super().__init__(file.num_bytes)
        self._file, self._fetched = file, dict[str, bytes]()

    def read_into(self, start: int, target: memoryview) -> int:
        """Read the rest of the segment at offset ``start``, up to the size of the buffer."""
        found = self._segment_at(start)
        if found is None:
            return 0
        begin, segment = found
        try:
            content = self._content(segment)
        except FileNotFoundError:
            # A merged segment has replaced this one since the listing. The offsets in the file are unchanged.
            self._file = self._file.listed_again()
            found, self.size = self._segment_at(start), self._file.num_bytes
            if found is None:
                raise
            begin, segment = found
            content = self._content(segment)
        part = content[start - begin :][: len(target)]
        target[: len(part)] = part
        return len(part)

    def _segment_at(self, position: int) -> tuple[int, JournalSegment] | None:
        """Return the segment at a file position and the segment's start, or None beyond the end."""
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
        """Fetch a segment and some of its successors; return their contents by key."""
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
                    f"journal segment {one.key} has {len(content)} bytes, but was listed with {one.num_bytes} bytes"
                )
        return {one.key: content for one, content in zip(wanted, contents, strict=True)}
