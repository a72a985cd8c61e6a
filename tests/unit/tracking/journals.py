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
_DEFAULTS: dict[str, dict[str, Any]] = {
    "attempt_started": {
        **STARTED,
        "world_size": 1,
        "sp_size": 1,
        "dp_size": 1,
        "nodes": (),
        "resumed_step": 0,
        "resumed_from": None,
    },
    "checkpoint_committed": {"path": "p", "world_size": 1, **COMMITTED},
}


def step(number: int, **changes: Any) -> dict[str, Any]:
    """Return the fields of a step that trains six rows."""
    fields: dict[str, Any] = {
        "event": "step",
        "step": number,
        "loss": 3.0 - number / 7,
        "tokens": 1000 + number,
        "rows": [max(0, number * 6 - 6), number * 6],
        "digest": f"{number * 0x1234567890ABCDEF % 2**64:016x}",
        "seconds": 1.5,
    }
    return {**fields, **changes}


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
