"""A queue on disk whose events survive the process until their delivery is acknowledged.

The directory holds ``00000001.jsonl`` and so on, one file per opening (so that a late write of a dying process touches
no other file), and ``state.json`` with the position up to which everything was delivered and the receiver's marks.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from ray_ulysses.logging import get_logger
from ray_ulysses.storage.local import LocalStore
from ray_ulysses.storage.regular import make_folder, open_regular, read_regular
from ray_ulysses.validation import ContentError, Whole, read_json

_logger = get_logger(__name__)
_EVENT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A place in the spool: the number of a file and a byte offset in it."""

    file: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """The content of ``state.json``."""

    file: Whole
    offset: Whole
    marks: dict[str, Whole]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpooledEvent:
    """One event, and the position behind it, which acknowledges it and all events before it."""

    event: Mapping[str, Any]
    end: Position


class Spool:
    """A bounded first-in, first-out queue of JSON objects in a directory, for one writer and one reader thread."""

    def __init__(self, directory: Path, *, max_bytes: int = 64 << 20, file_bytes: int = 4 << 20) -> None:
        """Open the directory; undelivered events of earlier files come first.

        Args:
            directory: Created if absent.
            max_bytes: Maximum size of undelivered events; later events are rejected.
            file_bytes: Size at which a new file is started.

        Raises:
            OSError: The directory can't be written.
        """
        self._directory = directory
        self._max_bytes = max_bytes
        self._file_bytes = file_bytes
        self._lock = threading.Lock()
        directory.parent.mkdir(parents=True, exist_ok=True)
        make_folder(directory, directory.parent)
        self._done, self.marks = self._read_state()
        self._out: BinaryIO
        self._out_file = 0
        self._open_next()
        self._waiting = self._waiting_bytes()

    def append(self, event: Mapping[str, Any]) -> bool:
        """Write an event, which survives this process once this returns.

        Returns:
            False if the spool is full and nothing was written.

        Raises:
            OSError: The disk does not accept it.
        """
        line = json.dumps(event, separators=(",", ":"), default=str).encode() + b"\n"
        with self._lock:
            if self._waiting + len(line) > self._max_bytes:
                return False
            if self._out.tell() >= self._file_bytes:
                full = self._out
                # If this fails, the next event finds the full file still open, and tries again.
                self._open_next()
                with suppress(OSError):
                    full.close()
            self._out.write(line)
            self._out.flush()
            self._waiting += len(line)
        return True

    def peek(self, limit: int) -> tuple[SpooledEvent, ...]:
        """Return up to ``limit`` of the oldest undelivered events, without removing them.

        A line that is not a JSON object, torn by a power failure, is skipped with a warning.
        """
        with self._lock:
            done, last = self._done, self._out_file
        entries: list[SpooledEvent] = []
        for number in self._numbers():
            if number < done.file:
                continue
            if number > last or len(entries) >= limit:
                break
            start = done.offset if number == done.file else 0
            entries.extend(self._read_file(number, start, limit - len(entries), is_last=number == last))
        return tuple(entries)

    def acknowledge(self, end: Position, marks: Mapping[str, int]) -> None:
        """Forget everything up to a position, and keep the receiver's marks for the next process.

        Raises:
            OSError: The state can't be written; this spool goes on behind the position, and only the next process
                delivers the events again.
        """
        with self._lock:
            self._done, self.marks = end, dict(marks)
            self._waiting = self._waiting_bytes()
        state = {"file": end.file, "offset": end.offset, "marks": dict(marks)}
        # A run directory that was deleted meanwhile stays deleted.
        LocalStore(self._directory, must_exist=True).replace("state.json", [json.dumps(state).encode()])
        with self._lock:
            for number in self._numbers():
                if number < end.file:
                    self._path(number).unlink(missing_ok=True)

    @property
    def is_empty(self) -> bool:
        """True if every event has been acknowledged."""
        with self._lock:
            return self._waiting == 0

    def num_waiting(self) -> int:
        """Return the number of undelivered events, by reading all of them."""
        return len(self.peek(sys.maxsize))

    def close(self) -> None:
        """Close the open file; undelivered events stay on disk."""
        with self._lock:
            is_empty = self._out.tell() == 0
            # What a full disk did not take was refused when it was appended, and is refused again here.
            with suppress(OSError):
                self._out.close()
                if is_empty:
                    self._path(self._out_file).unlink(missing_ok=True)

    def _waiting_bytes(self) -> int:
        total = 0
        for number in self._numbers():
            if number >= self._done.file:
                # An earlier process may still be closing, and delete its empty file.
                with suppress(FileNotFoundError):
                    size = self._path(number).stat().st_size
                    total += size - (self._done.offset if number == self._done.file else 0)
        return total

    def _open_next(self) -> None:
        number = max((*self._numbers(), self._out_file, self._done.file)) + 1
        self._out = open(self._path(number), "xb")  # noqa: SIM115  (stays open for the life of the spool)
        self._out_file = number

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self._directory.glob("*.jsonl") if path.stem.isdigit())

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:08d}.jsonl"

    def _read_state(self) -> tuple[Position, dict[str, int]]:
        try:
            state = read_json(TypeAdapter(_State), read_regular(self._directory / "state.json", self._directory.parent))
            return Position(file=state.file, offset=state.offset), state.marks
        except FileNotFoundError:
            pass
        except ContentError as error:
            _logger.warning("%s is damaged (%s): its events are delivered again", self._directory / "state.json", error)
        return Position(file=0, offset=0), {}

    def _read_file(self, number: int, start: int, limit: int, *, is_last: bool) -> list[SpooledEvent]:
        entries: list[SpooledEvent] = []
        try:
            stream = open_regular(self._path(number), self._directory.parent)
        except FileNotFoundError:
            # Empty when it was closed, or delivered, since the files were listed.
            return entries
        with stream:
            stream.seek(start)
            for line in stream:
                if len(entries) >= limit:
                    break
                if is_last and not line.endswith(b"\n"):
                    break
                start += len(line)
                try:
                    event = read_json(_EVENT, line)
                except ContentError:
                    _logger.warning("%s: a torn line was skipped", self._path(number))
                    event = {}
                entries.append(SpooledEvent(event=event, end=Position(file=number, offset=start)))
        return entries
