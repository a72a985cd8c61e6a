"""Divides the time without steps, at the start of a command and after a failure, by its use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ray_ulysses.tracking.events import STOP_REASONS, AttemptEnded, PhaseStarted

_Mark = tuple[float, str]
"""A moment, and the part that the time belongs to from then on."""

_PARTS_OF_PHASES = {"build": "build_s", "load": "load_s"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StartTime:
    """The time from a command's start, or from the last step before a failure, to the next step, in seconds by its use.

    Attributes:
        cut_off_s: After the last completed step of an attempt, until it failed.
        detect_s: From a failure until it was noticed.
        form_s: Until the ranks of the next attempt had joined.
        load_s: A checkpoint was chosen, loaded and verified.
        build_s: Everything else: configuration, plan, self-test, model, and the wait for the first rows.
        unknown_s: The journal does not say which, as those of earlier versions.
    """

    cut_off_s: float = 0.0
    detect_s: float = 0.0
    form_s: float = 0.0
    load_s: float = 0.0
    build_s: float = 0.0
    unknown_s: float = 0.0


@dataclass(slots=True)
class StartTimeline:
    """The uses of a command's time since its last step, as its events tell."""

    _marks: list[_Mark] = field(default_factory=list)
    _end_of_attempt: list[_Mark] = field(default_factory=list)
    _has_stepped: bool = False

    def begin(self, at: float, part: str, *, has_stepped: bool = False) -> None:
        """Forget everything before a moment.

        Args:
            at: The moment.
            part: The part that the time belongs to from then on.
            has_stepped: Whether the attempt has just completed a step.
        """
        self._marks, self._end_of_attempt, self._has_stepped = [(at, part)], [], has_stepped

    def note(self, at: float, part: str) -> None:
        """Note the part that the time belongs to from a moment on."""
        self._marks.append((at, part))

    def phase(self, event: PhaseStarted) -> None:
        """Note the part of a phase."""
        self.note(event.time, _PARTS_OF_PHASES.get(event.part or "", "unknown_s"))

    def attempt_ended(self, event: AttemptEnded, last_record: float) -> None:
        """Note that the attempt has ended; of several records of a failure, the first that says when it was counts.

        Args:
            event: The record.
            last_record: The time of the record before it.
        """
        detected = event.time if event.detected_at is None else event.detected_at
        if event.reason.startswith(STOP_REASONS):
            self._end_of_attempt = [(event.time, "form_s")]
        elif event.fault_at is not None:
            fault = min(event.fault_at, detected)
            if self._has_stepped:
                self._marks = [(fault, "cut_off_s")]
            self._end_of_attempt = [(fault, "detect_s"), (detected, "form_s")]
        elif not self._end_of_attempt:
            self._end_of_attempt = [(min(last_record, detected), "unknown_s"), (detected, "form_s")]

    def attempt_vanished(self, last_record: float) -> None:
        """Note that another attempt has begun, and that the last record of this one may not be its end."""
        if not self._end_of_attempt:
            self._end_of_attempt = [(last_record, "unknown_s")]

    def split(self, begin: float, end: float) -> Iterator[tuple[str, float]]:
        """Yield the parts of an interval and their seconds, which add up to its length."""
        marks = self._marks
        if self._end_of_attempt:
            first = self._end_of_attempt[0][0]
            marks = [*(mark for mark in marks if mark[0] <= first), *self._end_of_attempt]
        at, part = begin, marks[0][1]
        for moment, following in marks:
            moment = min(max(moment, at), end)
            yield part, moment - at
            at, part = moment, following
        yield part, end - at
