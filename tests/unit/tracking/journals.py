"""Builders for journal events, with defaults for fields that a test does not need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ray_ulysses.tracking.events import Event, event_adapter
from ray_ulysses.tracking.journal_lines import encode_event
from ray_ulysses.tracking.journal_reader import Journal, read_entries
from ray_ulysses.tracking.steps import ungroup_steps
from ray_ulysses.validation import read_json

STARTED: dict[str, Any] = {"rank_nodes": (), "last_step": 100, "plan_ids": ("p",), "versions": {}}
COMMITTED: dict[str, Any] = {"digest": "0" * 16, "tokens": 0, "next_row": 0}
"""Required fields of some events that few tests need."""


def started(resumed_step: int = 0, **changes: Any) -> dict[str, Any]:
    """Return the fields of an attempt's start on four workers."""
    sizes = {"world_size": 4, "sp_size": 2, "dp_size": 2, "nodes": ["a"]}
    resumed = {"resumed_step": resumed_step, "resumed_from": None}
    return {"event": "attempt_started", **STARTED, **sizes, **resumed, **changes}


def step(number: int, **changes: Any) -> dict[str, Any]:
    """Return the fields of a step that trains six rows."""
    fields: dict[str, Any] = {
        "event": "step", "step": number, "loss": 3.0 - number / 7, "tokens": 1000 + number, "seconds": 1.5,
        "rows": [max(0, number * 6 - 6), number * 6], "digest": f"{number * 0x1234567890ABCDEF % 2**64:016x}",
    }  # fmt: skip
    return {**fields, **changes}


def commit(number: int, **changes: Any) -> dict[str, Any]:
    """Return the fields of a checkpoint's commit."""
    place = {"path": f"checkpoints/step-{number:08d}", "world_size": 4}
    return {"event": "checkpoint_committed", **COMMITTED, "step": number, **place, **changes}


_DEFAULTS = {"attempt_started": started(), "checkpoint_committed": commit(0)}


def event(fields: Mapping[str, Any]) -> Event:
    """Return an event of some fields."""
    defaults = _DEFAULTS.get(fields["event"], {})
    return read_json(event_adapter(), encode_event({"time": 0.0, "attempt": 1, **defaults, **fields}))


def journal(records: Iterable[Mapping[str, Any]]) -> Journal:
    """Return a journal of some events."""
    return Journal(entries=tuple(event(record) for record in records), damaged=())


def read_events(run_dir: Path | str) -> tuple[Event, ...]:
    """Return a run's events one by one."""
    return tuple(ungroup_steps(read_entries(run_dir)))
