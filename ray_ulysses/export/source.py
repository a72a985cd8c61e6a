"""Chooses the checkpoint of a run to export, and explains why one can't be exported."""

from __future__ import annotations

from ray_ulysses.checkpoint.choice import Damage, committed_steps, examine, newest_committed, read_committed
from ray_ulysses.checkpoint.fence import Lineage, read_lineage
from ray_ulysses.checkpoint.manifest import Manifest
from ray_ulysses.checkpoint.retention import nameable, unreadable
from ray_ulysses.config import Config
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.export.report import StepChoice
from ray_ulysses.run.checkpoint_store import storage_answers, stored_checkpoints
from ray_ulysses.run.origin import choose_step, listed
from ray_ulysses.run.start_point import commits_that_count
from ray_ulysses.storage import Store
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.tracking.journal_reader import read_journal


def find_checkpoint(
    config: Config, run_dir: Place, step: StepChoice, *, trust_run: bool = False
) -> tuple[Store, Manifest]:
    """Return the checkpoint store of a run, and the manifest of the requested checkpoint.

    Raises:
        UserError: There is no such checkpoint, or it is on a server that only the run names.
        RunError: It can't be used, the storage does not answer, or the storage has lost all checkpoints.
    """
    location = stored_checkpoints(config, run_dir, trust_run=trust_run)
    store = open_store(location)
    with storage_answers(location):
        if committed_steps(store):
            return store, choose_checkpoint(store, step)
        lineage = read_lineage(store)
    raise _none_committed(run_dir, location, lineage)


def _none_committed(run_dir: Place, location: str, lineage: Lineage) -> UserError | RunError:
    """Return the error for a storage without checkpoints: the run has saved none, or they are missing."""
    try:
        journal = read_journal(run_dir)
    except OSError as error:
        return RunError(
            f"{location} holds no committed checkpoint of the run, and its journal, which would record one, "
            f"can't be read ({error.strerror or error})"
        )
    steps = commits_that_count(journal.entries, lineage)
    if journal.damaged and not steps:
        return RunError(
            f"{location} holds no committed checkpoint of the run, and its journal, which would record one, is "
            f"damaged ({journal.damaged[0]}); check that the storage is mounted, then try again"
        )
    if not steps:
        return UserError(
            f"RUN: has no committed checkpoint in {location}; `ray-ulysses train` commits one every "
            "checkpoint.every_steps"
        )
    return RunError(
        f"{location} holds no committed checkpoint of the run, and its journal records {len(steps)}, the newest of "
        f"step {steps[-1]}; check that the storage is mounted and checkpoint.storage is unchanged, then try again"
    )


def choose_checkpoint(store: Store, step: StepChoice) -> Manifest:
    """Return the manifest of the requested checkpoint; only sizes are compared, no tensor is read.

    A damaged or unreadable checkpoint is never skipped silently: the error for ``latest`` names the newest intact one,
    that for ``best`` the one that may have been the best.

    Args:
        store: The run's checkpoint store, with at least one checkpoint.
        step: A step, ``latest``, or ``best``: the lowest evaluation loss, or training loss if none was evaluated.

    Raises:
        UserError: There is no such checkpoint.
        RunError: It can't be used.
        OSError: The storage does not answer.
    """
    if step == "latest":
        return _latest(store)
    steps = committed_steps(store)
    if step == "best":
        step = _best(store, steps)
    if step not in steps:
        raise UserError(f"--step={step}: is not a committed step of this run; give one of {listed(steps)}")
    found = examine(store, step, "sizes")
    if isinstance(found, Damage):
        raise RunError(f"{found}; give another step with --step: {_others(steps, step)}")
    return found


def _best(store: Store, steps: tuple[int, ...]) -> int:
    committed = nameable(store)
    if unread := unreadable(committed):
        step = unread[-1]
        found = read_committed(store, step)
        why = str(found) if isinstance(found, Damage) else f"the checkpoint of step {step} could not be read just now"
        raise RunError(
            f"--step=best: {why}. It may be the best one: make it readable and try again, or give another step: "
            f"{_others(steps, step)}"
        )
    return choose_step(committed, "best", "--step=best")


def _latest(store: Store) -> Manifest:
    choice = newest_committed(store, "sizes")
    # A late commit of a dead attempt never was the run's newest; any other skipped checkpoint is reported.
    passed = [damage for damage in choice.damaged if damage.kind != "superseded"]
    if passed:
        hint = f"give --step {choice.manifest.step}, which is intact" if choice.manifest else "no other one is intact"
        raise RunError(f"{passed[0]}; {hint}")
    if choice.manifest is None:
        raise UserError("RUN: has no committed checkpoint that is part of the run; continue it with ray-ulysses train")
    return choice.manifest


def _others(steps: tuple[int, ...], step: int) -> str:
    return listed([other for other in steps if other != step]) or "none"
