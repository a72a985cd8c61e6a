"""Reading of a journal: every line's checksum and fields are checked, and what is damaged is named and set aside."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from ray_ulysses.storage.regular import open_regular
from ray_ulysses.tracking.events import Event, event_adapter
from ray_ulysses.tracking.journal import segments
from ray_ulysses.tracking.line_checksum import corrected, has_checksum, is_intact
from ray_ulysses.tracking.step_recovery import recovered_steps
from ray_ulysses.validation import ContentError, faults_text

Outcome = Literal["corrected", "recovered", "lost"]

# Enough for flipped bits; a file that is damaged all over is not worth minutes.
_MOST_TRIES = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class DamagedRecord:
    """A line of a journal that is not what was written.

    Attributes:
        segment: Name of its file.
        attempt: The attempt whose file it is.
        line: Number of its line, from 1.
        reason: What is wrong with it.
        outcome: Whether a flipped bit in it was corrected by its checksum, its step was recovered from the sums of the
            next checkpoint (all but its loss and its duration), or it is lost.
    """

    segment: str
    attempt: int
    line: int
    reason: str
    outcome: Outcome

    def __str__(self) -> str:
        outcome = {
            "corrected": "its flipped bit was corrected",
            "recovered": "its step was recovered from the next checkpoint's sums, without loss and duration",
            "lost": "it was set aside",
        }
        return f"journal/{self.segment}, line {self.line}: {self.reason}; {outcome[self.outcome]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """All that the journal of a run tells.

    Attributes:
        events: Attempts in order, an attempt's first segment before its others.
        damaged: The lines that were damaged, in the same order.
    """

    events: tuple[Event, ...]
    damaged: tuple[DamagedRecord, ...]


def read_events(run_dir: Path | str) -> tuple[Event, ...]:
    """Return the events of `read_journal`."""
    return read_journal(run_dir).events


def read_journal(run_dir: Path | str) -> Journal:
    """Read a run's journal; changes nothing.

    A last line without its end is left out, since its writer may still be at it, or has died there.

    Raises:
        NotAPlainFileError: A segment is a pipe, a socket or a device.
        OSError: A segment can't be read.
    """
    events: list[Event] = []
    damaged: list[DamagedRecord] = []
    places: list[int] = []
    for attempt, path in segments(run_dir):
        for found in _read_segment(path, attempt):
            if isinstance(found, DamagedRecord):
                damaged.append(found)
                places.append(len(events))
            else:
                events.append(found)
    lost = [number for number, record in enumerate(damaged) if record.outcome == "lost"]
    recovered = recovered_steps(events, [(places[number], damaged[number].attempt) for number in lost])
    for number, step in reversed(list(zip(lost, recovered, strict=True))):
        if step is not None:
            events.insert(places[number], step)
            damaged[number] = replace(damaged[number], outcome="recovered")
    return Journal(events=tuple(events), damaged=tuple(damaged))


def read_beside(run_dir: Path | str) -> list[Event]:
    """Return the events beside the attempts' first segments, in order; they are few, however long the run is.

    Raises:
        OSError: A segment can't be read.
    """
    beside = [(attempt, path) for attempt, path in segments(run_dir) if path.name.count(".") > 1]
    found = [event for attempt, path in beside for event in _read_segment(path, attempt)]
    return [event for event in found if not isinstance(event, DamagedRecord)]


def read_edges(run_dir: Path | str, attempt: int, num_bytes: int = 2**20) -> list[Event]:
    """Return the events at the beginning and at the end of an attempt's first segment, in order.

    Args:
        run_dir: The run's directory.
        attempt: The attempt's number.
        num_bytes: How much is read at either end, so that a long attempt takes no time.
    """
    path = next((path for number, path in segments(run_dir) if number == attempt), None)
    if path is None or path.name.count(".") > 1:
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


def parse_line(line: bytes, attempt: int, *, must_have_checksum: bool) -> Event | None:
    """Return the event of a line without its end; None if a later version has written one of a kind unknown here.

    Args:
        line: The line.
        attempt: The attempt whose segment it stands in.
        must_have_checksum: Whether it is damaged without a checksum; versions that wrote none are read too.

    Raises:
        ContentError: It is damaged; the text says how.
    """
    is_checked = is_intact(line)
    if not is_checked and (must_have_checksum or has_checksum(line)):
        raise ContentError("its checksum is wrong")
    try:
        event = event_adapter().validate_json(line)
    except ValidationError as error:
        if is_checked and error.errors(include_url=False)[0]["type"] == "union_tag_invalid":
            return None
        raise ContentError(faults_text(error)) from None
    if event.attempt != attempt:
        raise ContentError(f"attempt is {event.attempt}, but it stands in a segment of attempt {attempt}")
    return event


def _read_segment(path: Path, attempt: int) -> Iterator[Event | DamagedRecord]:
    has_checksums, num_tries = False, 0
    with open_regular(path) as stream:
        for number, line in enumerate(stream, start=1):
            text = line.removesuffix(b"\n")
            if not text:
                # What keeps the rest of a line, whose writer died, from the next record.
                continue
            try:
                event = parse_line(text, attempt, must_have_checksum=has_checksums)
                has_checksums = has_checksums or has_checksum(text)
            except ContentError as error:
                num_tries += 1
                event = _try_to_correct(line, attempt) if num_tries <= _MOST_TRIES else None
                if event is None and text is line:
                    # Its writer is still at it, or has died there.
                    return
                outcome: Outcome = "lost" if event is None else "corrected"
                yield DamagedRecord(segment=path.name, attempt=attempt, line=number, reason=str(error), outcome=outcome)
            if event is not None:
                yield event


def _try_to_correct(line: bytes, attempt: int) -> Event | None:
    """Return the event of a line of which one bit was flipped, perhaps in its end."""
    text = corrected(line.removesuffix(b"\n")) if line.endswith(b"\n") else line[:-1]
    try:
        return None if text is None else parse_line(text, attempt, must_have_checksum=True)
    except ContentError:
        return None
