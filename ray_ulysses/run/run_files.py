"""Reads and writes the files that describe a run: its configuration, plan and README."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_ulysses.errors import UserError, without_secret
from ray_ulysses.run_names import CONFIG_FILE, JOURNAL_FOLDER, PLAN_FACTS_FILE, PLAN_TEXT_FILE, README_FILE
from ray_ulysses.storage.place import Place, is_file, open_store
from ray_ulysses.validation import parse_json

_MOST_CHARACTERS = 1 << 20


def check_run(run_dir: Place, argument: str = "RUN") -> None:
    """Refuse a directory that contains neither a configuration nor a journal.

    Args:
        run_dir: The directory.
        argument: The command line argument that specifies the directory, for errors.

    Raises:
        UserError: The directory is not a run directory.
    """
    if not is_file(run_dir / CONFIG_FILE) and not open_store(run_dir / JOURNAL_FOLDER).exists():
        raise UserError(
            f"{argument}={str(run_dir)!r} is not a run directory; use <run.storage>/<run.name>, which has a config.yaml"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTexts:
    """A run's plan and README as text, and the plan as JSON."""

    plan: str
    readme: str
    facts: Mapping[str, Any]


def describe_run(run_dir: Place, texts: RunTexts) -> None:
    """Write a run's plan and README to its directory. The caller must hold the run's claim.

    Raises:
        OSError: A file can't be written.
    """
    store = open_store(run_dir)
    store.replace(PLAN_TEXT_FILE, [f"{texts.plan}\n".encode()])
    store.replace(PLAN_FACTS_FILE, [json.dumps(texts.facts).encode()])
    store.replace(README_FILE, [texts.readme.encode()])


def describing_files(run_dir: Place) -> dict[str, str]:
    """Return the README, configuration and plan by file name, with passwords redacted; omits unreadable files."""
    store, found = open_store(run_dir), {}
    for name in (README_FILE, CONFIG_FILE, PLAN_TEXT_FILE):
        with contextlib.suppress(OSError, ValueError):
            found[name] = without_secret(store.read_whole(name).decode()[:_MOST_CHARACTERS])
    return found


def read_plan_facts(run_dir: Place) -> dict[str, Any]:
    """Return `RunTexts.facts` as stored by `describe_run`.

    Raises:
        OSError: The file is missing or can't be read.
        ValueError: The file does not contain a JSON object.
    """
    found = parse_json(open_store(run_dir).read_whole(PLAN_FACTS_FILE))
    if not isinstance(found, dict):
        raise ValueError(f"{run_dir / PLAN_FACTS_FILE} does not contain a JSON object")
    return found
