"""Fencing of attempts: a dead attempt's late writes are never loaded, and it never deletes anything.

An attempt claims ``attempts/0003.claimed`` before it looks for what to resume from, and creates
``attempts/0003.from-00000010`` once it has chosen. Both are created if absent, are empty,
and stay. The lineage follows from their names alone: a checkpoint beyond the step from which a later attempt
started is not part of the run, whenever it was committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ray_ulysses.run_names import ATTEMPT_FOLDER, ATTEMPT_KEY, claim_key, start_key
from ray_ulysses.storage import Store
from ray_ulysses.storage.store import create_if_absent


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The attempts of a run, and the start of each that has announced one."""

    newest_attempt: int
    """Largest number that was claimed; 0 if none was."""
    started_from: dict[int, int]
    """Step from which each attempt started, by its number."""

    def holds(self, step: int, attempt: int) -> bool:
        """Return whether a checkpoint that an attempt committed at a step is part of the run (pure)."""
        return all(start >= step for later, start in self.started_from.items() if later > attempt)


def lineage_of(keys: Iterable[str]) -> Lineage:
    """Return the lineage that the names of the attempts' files give (pure); other keys are ignored."""
    newest = 0
    started: dict[int, int] = {}
    for key in keys:
        match = ATTEMPT_KEY.match(key)
        if match:
            attempt = int(match["attempt"])
            newest = max(newest, attempt)
            if match["step"] is not None:
                step = int(match["step"])
                # An attempt starts once; of two files the smaller step is the one that hides less.
                started[attempt] = min(step, started.get(attempt, step))
    return Lineage(newest_attempt=newest, started_from=started)


def read_lineage(store: Store) -> Lineage:
    """Return the attempts that a store knows."""
    return lineage_of(store.list(ATTEMPT_FOLDER))


def claim_attempt(store: Store, attempt: int) -> bool:
    """Announce an attempt before it looks for what to resume from; one rank calls.

    Returns:
        Whether the number was free.

    Raises:
        OSError: The store can't be written.
    """
    return create_if_absent(store, claim_key(attempt), b"\n")


def start_attempt(store: Store, attempt: int, step: int) -> None:
    """Announce from which step an attempt starts, before it trains; one rank calls.

    Raises:
        OSError: The store can't be written.
    """
    create_if_absent(store, start_key(attempt, step), b"\n")


def is_overtaken(store: Store, attempt: int) -> bool:
    """Return whether a newer attempt has been claimed; this one must then neither commit nor delete."""
    return read_lineage(store).newest_attempt > attempt
