"""Whether a run may start from what its storage gives: never anew where there was state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.checkpoint.manifest import CHECKPOINT_FOLDER
from ray_ulysses.run.checkpoint_store import checkpoint_location
from ray_ulysses.tracking.events import CheckpointCommitted, CheckpointSetAside
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.step_runs import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ray_ulysses.checkpoint import Damage, Manifest
    from ray_ulysses.checkpoint.fence import Lineage
    from ray_ulysses.config import Config
    from ray_ulysses.storage import Store


def why_no_start(config: Config, store: Store, chosen: Manifest | None, passed: Sequence[Damage]) -> str | None:
    """Return why a run may not start from a choice, or None.

    To begin anew would give up a run whose state is there, or can be brought back.

    Args:
        config: The run's configuration.
        store: The store of its checkpoints.
        chosen: The newest whole checkpoint, if there is one.
        passed: Newer ones that can't be used.

    Raises:
        OSError: The store can't be listed.
    """
    foreign = [damage for damage in passed if damage.kind == "foreign"]
    if foreign:
        return f"{foreign[0]}; nothing was changed"
    if chosen is not None:
        return None
    unread = [damage for damage in passed if damage.kind == "unreadable"]
    if unread:
        return f"no checkpoint of the run can be read: {unread[0]}; repair the storage, then start again"
    folder = f"{checkpoint_location(config)}/{CHECKPOINT_FOLDER}"
    damaged = [str(damage) for damage in passed if damage.kind == "damaged"]
    if damaged:
        return (
            f"no checkpoint of the run is whole, and it does not begin anew by itself: {'; '.join(damaged)}. Nothing "
            f"was changed: restore the files in {folder}, or start a new run under another run.name "
            "(model.resume_from starts it from another run's checkpoint)"
        )
    known = commits_that_count(read_entries(config.run_dir), read_lineage(store))
    if known:
        return (
            f"the journal knows of the checkpoint of step {max(known)}, but there is none in {folder}; mount or "
            "correct the storage of the run (checkpoint.storage), or start a new run under another run.name"
        )
    return None


def commits_that_count(events: Iterable[Entry], lineage: Lineage) -> tuple[int, ...]:
    """Return the steps that a journal says were committed, not set aside since, and part of the run (pure).

    Args:
        events: The run's journal, in order.
        lineage: The run's attempts, as far as the store knows of them: it may be the store that is lost.

    Returns:
        The steps, ascending.
    """
    attempts: dict[int, int] = {}
    for event in events:
        if isinstance(event, CheckpointCommitted):
            attempts[event.step] = event.attempt
        elif isinstance(event, CheckpointSetAside):
            attempts.pop(event.step, None)
    return tuple(sorted(step for step, attempt in attempts.items() if lineage.holds(step, attempt)))
