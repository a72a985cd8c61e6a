"""Decides from which checkpoint a run starts; a run that has saved a state never restarts from step 0 by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint import newest_committed
from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.errors import RunError
from ray_ulysses.run.checkpoint_store import storage_answers
from ray_ulysses.run_names import CHECKPOINT_FOLDER
from ray_ulysses.tracking.events import CheckpointCommitted, CheckpointSetAside
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.steps import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ray_ulysses.checkpoint import Damage
    from ray_ulysses.checkpoint.fence import Lineage
    from ray_ulysses.run.settings import ResolvedRun
    from ray_ulysses.storage import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The starting point of an attempt, as decided from its checkpoints."""

    resumes_from: int | None = None
    """Step of the run's own state that it starts from; None for none."""
    unless: tuple[int, ...] = ()
    """Newer steps that the storage can't read now: the newest that is readable by then is taken instead."""
    refusal: str | None = None
    """Why it may not start; None if it may."""


def decide_start(whole: Sequence[int], passed: Sequence[Damage], committed: Sequence[int], location: str) -> Start:
    """Decide from which state of its own a run starts (pure).

    A start from step 0 would discard a run whose state exists or can be restored.

    Args:
        whole: Steps of the whole states that the run's recovery sources offer.
        passed: Newer checkpoints that can't be used, newest first.
        committed: Steps that were committed according to the journal, ascending; needed where no state is whole.
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
    if whole:
        return Start(resumes_from=max(whole), unless=unless)
    if unread:
        refusal = f"no checkpoint of the run can be read: {unread[0]}; repair the storage, then start again"
    elif damaged:
        refusal = (
            "no checkpoint of the run is whole, and it will not restart from step 0 by itself: "
            f"{'; '.join(map(str, damaged))}. Nothing was changed: restore the files in {folder}, or start a new run "
            "under another run.name (model.resume_from starts it from another run's checkpoint)"
        )
    elif committed:
        refusal = (
            f"the journal knows of the checkpoint of step {max(committed)}, but there is none in {folder}; mount or "
            "correct the storage of the run (checkpoint.storage), or start a new run under another run.name"
        )
    return Start(unless=unless, refusal=refusal)


def start_of(run: ResolvedRun, whole: Sequence[int], passed: Sequence[Damage]) -> Start:
    """Decide as `decide_start` does, with the commits that the run's journal records.

    Raises:
        OSError: The store can't be listed.
    """
    committed = () if whole else commits_that_count(read_entries(run.config.run_dir), read_lineage(run.store))
    return decide_start(whole, passed, committed, run.location)


def committed_step(run: ResolvedRun) -> int:
    """Return the step of the newest checkpoint that is committed, whole and part of the run; 0 if there is none.

    Raises:
        RunError: The storage does not answer, a newer checkpoint is of another version of ray-ulysses, or none is
            whole although one should be.
    """
    with storage_answers(run.location):
        choice = newest_committed(run.store, "sizes")
        whole = [] if choice.manifest is None else [choice.manifest.step]
        refusal = start_of(run, whole, choice.damaged).refusal
    if refusal is not None:
        raise RunError(f"run {run.config.run.name!r}: {refusal}")
    return whole[0] if whole else 0


def known_step(store: Store) -> int | None:
    """Return the step of the newest whole checkpoint, 0 if there is none; ``None`` if the storage does not answer."""
    try:
        manifest = newest_committed(store, "sizes").manifest
    except (OSError, RunError):
        return None
    return manifest.step if manifest is not None else 0


def commits_that_count(events: Iterable[Entry], lineage: Lineage) -> tuple[int, ...]:
    """Return the steps that a journal says were committed, not set aside since, and part of the run (pure).

    Args:
        events: The run's journal, in order.
        lineage: The run's attempts as the store records them; it may be the store that was lost.

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
