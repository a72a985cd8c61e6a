"""Describes where a run's time went; `tracking.time_spent` defines the parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_ulysses.report.words import duration, percent

if TYPE_CHECKING:
    from ray_ulysses.tracking.run_time import StartTime, TimeSpent

_NAMES = {
    "steps_s": "steps that count",
    "startup_s": "start-up",
    "waiting_s": "waiting for workers",
    "recovery_s": "recovery",
    "stages_s": "between stages",
    "lost_steps_s": "lost steps",
    "saves_s": "saves",
    "evaluation_s": "evaluation",
    "other_s": "other",
}
_NAMES_OF_A_START = {
    "cut_off_s": "cut-off steps",
    "detect_s": "detection",
    "form_s": "workers",
    "load_s": "loading",
    "build_s": "building",
    "unknown_s": "unknown",
}


def goodput_in_words(spent: TimeSpent) -> str:
    """Return the goodput on one line: ``18.90% of 1m22s: steps 15s, start-up 52s``; short parts are omitted."""
    if spent.goodput is None:
        return "- (no step yet that counts)"
    shown = [f"{name} {duration(seconds)}" for name, seconds in _parts(spent) if seconds >= 0.5]
    division = _division(spent.recovery)
    if division:
        shown = [f"{part} ({division})" if part.startswith("recovery ") else part for part in shown]
    return f"{percent(spent.goodput)} of {duration(spent.total_s)}: {', '.join(shown)}"


def time_rows(spent: TimeSpent) -> list[tuple[str, str, str]]:
    """Return a row per part with its seconds and its share, and one for their sum."""
    total = spent.total_s
    if total <= 0:
        return []
    rows = [(f"{seconds:.1f}s", percent(seconds / total), name) for name, seconds in _parts(spent)]
    return [*rows, (f"{total:.1f}s", percent(1.0), "total of all commands")]


def divisions_in_words(spent: TimeSpent) -> list[str]:
    """Return a line about what the time at starts went into, and one about that of recoveries, where it is known."""
    divided = {"start-up and waiting": spent.starts, "recovery": spent.recovery}
    return [f"{name}: {division}" for name, time in divided.items() if (division := _division(time))]


def _division(time: StartTime) -> str:
    """Return the parts of a start with their seconds; nothing if none of them is known."""
    shown = {name: getattr(time, field) for field, name in _NAMES_OF_A_START.items() if getattr(time, field) >= 0.05}
    return "" if set(shown) <= {"unknown"} else ", ".join(f"{name} {seconds:.1f}s" for name, seconds in shown.items())


def pause_in_words(spent: TimeSpent) -> str | None:
    """Return the line about the time between commands, if there was any."""
    if spent.between_commands_s <= 0:
        return None
    return f"not counted: {duration(spent.between_commands_s)} between commands, when nothing ran"


def _parts(spent: TimeSpent) -> list[tuple[str, float]]:
    parts = {field: (name, getattr(spent, field)) for field, name in _NAMES.items()}
    if not spent.stages_s:
        # Most runs have none.
        del parts["stages_s"]
    return list(parts.values())
