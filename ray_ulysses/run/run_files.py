"""Texts in a run's directory that describe the run: its configuration, its plan and its README."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ray_ulysses.errors import without_secret
from ray_ulysses.run_names import CONFIG_FILE, PLAN_TEXT_FILE, README_FILE
from ray_ulysses.storage.local import LocalStore

_MOST_CHARACTERS = 1 << 20


def describe_run(run_dir: Path, *, plan: str, readme: str) -> None:
    """Write the text of a run's plan, and its README; the caller holds the run's lock.

    Raises:
        OSError: They can't be written.
    """
    store = LocalStore(run_dir)
    store.replace(PLAN_TEXT_FILE, [f"{plan}\n".encode()])
    store.replace(README_FILE, [readme.encode()])


def describing_files(run_dir: Path) -> dict[str, str]:
    """Return the texts that exist, by name, without the passwords that a URI in them may contain."""
    found = {}
    for name in (README_FILE, CONFIG_FILE, PLAN_TEXT_FILE):
        with contextlib.suppress(OSError, ValueError):
            found[name] = without_secret((run_dir / name).read_text(encoding="utf-8")[:_MOST_CHARACTERS])
    return found
