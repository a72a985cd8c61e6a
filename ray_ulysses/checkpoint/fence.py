"""Fencing of attempts: late writes of a dead attempt are never loaded, and a dead attempt never deletes anything.

Attempt 3 creates ``attempts/0003.claimed`` before it looks for a checkpoint, and ``attempts/0003.from-00000010`` once
it has chosen the checkpoint of step 10. Both files are created atomically and never deleted, and only their names
matter. If a later attempt started from step 10, checkpoints of earlier attempts beyond step 10 are not part of the
run, no matter when they were committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ray_ulysses.run_names import ATTEMPT_FOLDER, ATTEMPT_KEY, claim_key, start_key
from ray_ulysses.storage import Store
from ray_ulysses.storage.store import create_if_absent


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The attempts of a run and the steps from which they started."""

    newest_attempt: int
    """Largest claimed attempt number, or 0 if no attempt was claimed."""
    started_from: dict[int, int]
    """Step from which each attempt started, by attempt number; an attempt is absent until it records its start."""

    def holds(self, step: int, attempt: int) -> bool:
        """Return whether the checkpoint of `step`, committed by `attempt`, is part of the run."""
        return all(start >= step for later, start in self.started_from.items() if later > attempt)


def lineage_of(keys: Iterable[str]) -> Lineage:
    """Return the lineage that the attempt files among `keys` record; other keys are ignored."""
    newest = 0
    started: dict[int, int] = {}
    for key in keys:
        match = ATTEMPT_KEY.match(key)
        if match:
            attempt = int(match["attempt"])
            newest = max(newest, attempt)
            if match["step"] is not None:
                step = int(match["step"])
                # An attempt starts only once. If two start files exist anyway, the smaller step is safer.
                started[attempt] = min(step, started.get(attempt, step))
    return Lineage(newest_attempt=newest, started_from=started)


def read_lineage(store: Store) -> Lineage:
    """Return the lineage that the store records."""
    return lineage_of(store.list(ATTEMPT_FOLDER))


def claim_attempt(store: Store, attempt: int) -> bool:
    """Claim an attempt number, and return whether it was free.

    One rank calls this function before the attempt looks for a checkpoint.

    Raises:
        OSError: The store is not writable.
    """
    return create_if_absent(store, claim_key(attempt), b"\n")


def start_attempt(store: Store, attempt: int, step: int) -> None:
    """Record the step from which an attempt starts; one rank calls this function before training starts.

    Raises:
        OSError: The store is not writable.
    """
    create_if_absent(store, start_key(attempt, step), b"\n")


def is_overtaken(store: Store, attempt: int) -> bool:
    """Return whether a newer attempt has been claimed, in which case `attempt` must neither commit nor delete."""
    return read_lineage(store).newest_attempt > attempt
