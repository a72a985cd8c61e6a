"""Decides where a run starts from what its storage gives: never anew where there was state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.run.checkpoint_store import checkpoint_location
from ray_ulysses.run_names import CHECKPOINT_FOLDER
from ray_ulysses.tracking.events import CheckpointCommitted, CheckpointSetAside
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.step_runs import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ray_ulysses.checkpoint import Damage, Manifest
    from ray_ulysses.checkpoint.fence import Lineage
    from ray_ulysses.config import Config
    from ray_ulysses.storage import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where an attempt starts, as far as is known of the checkpoints.

    Attributes:
        resumes_from: Step of the checkpoint that it starts from; None for none.
        unless: Newer steps that the storage does not give now: the newest that it gives by then is taken instead.
        refusal: Why it may not start; None if it may.
    """

    resumes_from: int | None = None
    unless: tuple[int, ...] = ()
    refusal: str | None = None


def decide_start(whole: int | None, passed: Sequence[Damage], committed: Sequence[int], location: str) -> Start:
    """Decide from which checkpoint of its own a run starts (pure).

    To begin anew would give up a run whose state is there, or can be brought back.

    Args:
        whole: Step of the newest whole checkpoint; None if there is none.
        passed: Newer ones that can't be used, newest first.
        committed: Steps of which the journal says that they were committed, ascending; asked where none is whole.
        location: Root of the store.
    """
    foreign, unread, damaged = (
        [damage for damage in passed if damage.kind == kind] for kind in ("foreign", "unreadable", "damaged")
    )
    unless = tuple(sorted(damage.step for damage in unread))
    folder = f"{location}/{CHECKPOINT_FOLDER}"
    refusal = None
    if foreign:
        return Start(refusal=f"{foreign[0]}; nothing was changed")
    if whole is not None:
        return Start(resumes_from=whole, unless=unless)
    if unread:
        refusal = f"no checkpoint of the run can be read: {unread[0]}; repair the storage, then start again"
    elif damaged:
        refusal = (
            f"no checkpoint of the run is whole, and it does not begin anew by itself: {'; '.join(map(str, damaged))}. "
            f"Nothing was changed: restore the files in {folder}, or start a new run under another run.name "
            "(model.resume_from starts it from another run's checkpoint)"
        )
    elif committed:
        refusal = (
            f"the journal knows of the checkpoint of step {max(committed)}, but there is none in {folder}; mount or "
            "correct the storage of the run (checkpoint.storage), or start a new run under another run.name"
        )
    return Start(unless=unless, refusal=refusal)


def why_no_start(config: Config, store: Store, chosen: Manifest | None, passed: Sequence[Damage]) -> str | None:
    """Return why a run may not start from a choice, or None.

    Args:
        config: The run's configuration.
        store: The store of its checkpoints.
        chosen: The newest whole checkpoint, if there is one.
        passed: Newer ones that can't be used, newest first.

    Raises:
        OSError: The store can't be listed.
    """
    whole = None if chosen is None else chosen.step
    committed = () if chosen is not None else commits_that_count(read_entries(config.run_dir), read_lineage(store))
    return decide_start(whole, passed, committed, checkpoint_location(config)).refusal


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
