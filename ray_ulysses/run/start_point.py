"""Decides from which checkpoint a run starts; a run that has saved a state never restarts from step 0 by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.run_names import CHECKPOINT_FOLDER
from ray_ulysses.tracking.events import CheckpointCommitted, CheckpointSetAside
from ray_ulysses.tracking.journal_reader import read_entries
from ray_ulysses.tracking.steps import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ray_ulysses.checkpoint import Damage
    from ray_ulysses.checkpoint.fence import Lineage
    from ray_ulysses.run.settings import ResolvedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The starting point of an attempt, as decided from its checkpoints.

    Attributes:
        resumes_from: Step of the run's own state that it starts from; None for none.
        unless: Newer steps that the storage can't read now: the newest that is readable by then is taken instead.
        refusal: Why it may not start; None if it may.
    """

    resumes_from: int | None = None
    unless: tuple[int, ...] = ()
    refusal: str | None = None


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
