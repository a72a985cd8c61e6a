"""Decides which checkpoints are the best and which are kept, and deletes the others and what failed saves left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ray_ulysses.checkpoint.choice import committed_in, committed_steps, for_each_step
from ray_ulysses.checkpoint.fence import Lineage, read_lineage
from ray_ulysses.checkpoint.manifest import CheckpointRef, ManifestError, read_facts
from ray_ulysses.logging import get_logger
from ray_ulysses.run_names import (
    CHECKPOINT_FOLDER,
    CHECKPOINT_KEY,
    MANIFEST_FILE,
    NOTE_NAME,
    SHARD_KEY,
    manifest_key,
    step_folder,
)
from ray_ulysses.storage import LocalStore, Store
from ray_ulysses.storage.atomic import sweep_temporaries

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepRules:
    """The rules of retention; a checkpoint is kept if any rule keeps it."""

    last: int
    """How many of the newest are kept."""
    every_steps: int | None = None
    """Each whose step is a multiple; None for no such rule."""
    best: int = 0
    """How many are kept of each stage and its data, those with the lowest metric."""
    best_metric: str = "eval_loss"
    """The metric: ``eval_loss`` or ``loss``."""

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"checkpoint.keep_last={self.last} would delete the only state there is; use 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """The facts of a checkpoint that retention decides by."""

    attempt: int | None
    """The attempt that committed it; None if its manifest can't be read: then all of it stays."""
    metrics: Mapping[str, float]
    stage: str = ""
    """Name of the stage that trained it; empty in a run without stages."""
    measured: str = ""
    """Identity of what its numbers were measured on."""

    @property
    def group(self) -> tuple[str, str]:
        """Return a key that is equal for checkpoints with comparable losses."""
        return self.stage, self.measured


def steps_to_delete(committed: Mapping[int, Committed], *, newest: int, rules: KeepRules) -> tuple[int, ...]:
    """Return the committed steps that are no longer needed, oldest first (pure).

    Args:
        committed: Checkpoints of the run, by step.
        newest: The step that was committed just now; it and whatever is beyond it are kept.
        rules: What is kept.

    Raises:
        ValueError: `newest` is not committed.
    """
    if newest not in committed:
        raise ValueError(f"step {newest} is not committed, so nothing may be deleted in its favour")
    kept = keep_reasons(committed, newest=newest, rules=rules)
    # What can't be read now may be what a rule wants.
    return tuple(sorted(step for step in committed if step not in kept and committed[step].attempt is not None))


def keep_reasons(committed: Mapping[int, Committed], *, newest: int, rules: KeepRules) -> dict[int, tuple[str, ...]]:
    """Return in words which rules keep each step (pure); a step that none keeps is left out."""
    older = sorted(step for step in committed if step <= newest)
    reasons: dict[int, list[str]] = {step: ["beyond the newest"] for step in committed if step > newest}
    for step in older[-rules.last :]:
        reasons.setdefault(step, []).append(f"last {rules.last}")
    for step in older:
        if rules.every_steps is not None and step % rules.every_steps == 0:
            reasons.setdefault(step, []).append(f"every {rules.every_steps}")
    for step in best_steps(committed, older, rules.best_metric, rules.best):
        reasons.setdefault(step, []).append(f"best {rules.best_metric}")
    return {step: tuple(words) for step, words in sorted(reasons.items())}


def best_steps(committed: Mapping[int, Committed], steps: Iterable[int], metric: str, num_steps: int) -> list[int]:
    """Return the steps of each stage and its data with the lowest metric, best first; of equal ones the newer (pure).

    Losses of different stages do not compare, since their contexts and corpora differ, nor those from before a branch
    with those after it, if other documents are held out since.
    """
    of_groups: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for step in steps:
        value = committed[step].metrics.get(metric)
        if value is not None and math.isfinite(value):
            of_groups.setdefault(committed[step].group, []).append((value, -step))
    return [-step for known in of_groups.values() for _, step in sorted(known)[:num_steps]]


def leftovers(
    keys: Iterable[str], committed: Mapping[int, int | None], *, attempt: int, newest: int
) -> tuple[str, ...]:
    """Return the folders of shards that no manifest names (pure).

    Args:
        keys: All keys under the checkpoints' folder.
        committed: The attempt that each committed step's manifest names; None if it can't be read: its shards are
            unknown then, so all of them stay.
        attempt: The attempt that asks; folders of later ones are not its business.
        newest: The step that this attempt has committed last. It saves in the order of its steps, so its own
            shards beyond that may still be in progress, by ranks that are ahead of this one.
    """
    found = set()
    for key in keys:
        match = SHARD_KEY.match(key)
        if not match:
            continue
        step, owner = int(match["step"]), int(match["attempt"])
        saving = owner == attempt and step > newest
        needed = step in committed and committed[step] in (owner, None)
        if owner <= attempt and not needed and not saving:
            found.add(match["folder"])
    return tuple(sorted(found))


class Retention:
    """Deletes what a new checkpoint has made superfluous; used by one rank, one call at a time.

    Args:
        store: The run's store.
        rules: What is kept.
    """

    def __init__(self, store: Store, rules: KeepRules) -> None:
        self._store = store
        self._rules = rules
        # A manifest of a large world takes a while to read, and does not change.
        self._known: dict[int, Committed] = {}
        # Keys under the checkpoints' folder; None where that is not known. Listing a thousand takes seconds.
        self._keys: frozenset[str] | None = None

    def forget(self) -> None:
        """List everything again at the next call: a save that failed may have left something behind."""
        self._keys = None

    def apply(self, newest: CheckpointRef) -> tuple[int, ...]:
        """Delete what `newest` has made superfluous, after it was committed.

        A checkpoint's manifest goes first, so that a death in between leaves it absent and not torn. An attempt that a
        newer one has overtaken deletes nothing: what it takes for old may be what the other started from.

        Returns:
            The steps that were deleted.

        Raises:
            OSError: Something could not be deleted; the next call tries again.
        """
        store = self._store
        # If anything fails, everything is listed again: this step would not be, beside later ones.
        known, self._keys = self._keys, None
        lineage = read_lineage(store)
        if lineage.newest_attempt > newest.attempt:
            return ()
        keys = self._list(newest, known)
        committed = self._committed(newest, committed_in(keys))
        alive = {step: found for step, found in committed.items() if _is_alive(lineage, step, found)}
        if newest.step not in alive:
            raise OSError(f"the checkpoint of step {newest.step} was committed a moment ago and is not listed")
        # Beyond the newest a dead one stays: its attempt may have been passed over because it could not be read.
        dead = {step for step in committed if step not in alive and step <= newest.step}
        deleted = tuple(sorted({*dead, *steps_to_delete(alive, newest=newest.step, rules=self._rules)}))
        for step in deleted:
            store.delete(manifest_key(step))
            # Up to the newest, nobody is writing: an attempt saves in the order of its steps.
            self._delete(step_folder(step))
            self._known.pop(step, None)
        kept = {step: found.attempt for step, found in committed.items() if step not in deleted}
        keys = frozenset(key for key in keys if not key.startswith(tuple(f"{step_folder(step)}/" for step in deleted)))
        dead_folders = leftovers(keys, kept, attempt=newest.attempt, newest=newest.step)
        for folder in dead_folders:
            self._delete(folder)
        if isinstance(store, LocalStore):
            # What a process was writing when it was killed has no name that a listing shows.
            sweep_temporaries(store.path(CHECKPOINT_FOLDER), store.root)
        self._keys = keys.difference(f"{folder}/" for folder in dead_folders)
        return deleted

    def _delete(self, folder: str) -> None:
        """Delete a folder; of one that holds files of others, only what the run has written there."""
        keys = self._store.list(folder)
        own = [key for key in keys if _is_own(key)]
        if len(own) == len(keys):
            self._store.delete(folder)
            return
        _log.warning("%s: was written by something else, and stays; move it elsewhere", min({*keys} - {*own}))
        for key in own:
            self._store.delete(key)

    def _list(self, newest: CheckpointRef, known: frozenset[str] | None) -> frozenset[str]:
        """Return the keys of manifests, and the folders of shards with a slash at their end.

        Nobody but this attempt writes checkpoints, and a newer one ends it.
        """
        listed = self._store.list(CHECKPOINT_FOLDER if known is None else step_folder(newest.step))
        matches = ((key, SHARD_KEY.match(key)) for key in listed)
        return frozenset((*(known or ()), *(f"{match['folder']}/" if match else key for key, match in matches)))

    def _committed(self, newest: CheckpointRef, steps: Iterable[int]) -> dict[int, Committed]:
        """Return the facts of committed steps; only manifests that are not known yet, and the newest, are read."""
        self._known.pop(newest.step, None)
        unknown = [step for step in steps if step not in self._known]
        read = for_each_step(unknown, lambda step: read_committed_facts(self._store, step))
        found = self._known | {step: facts for step, facts in zip(unknown, read, strict=True) if facts is not None}
        self._known = {step: facts for step, facts in found.items() if facts.attempt is not None}
        return {step: found[step] for step in steps if step in found}


def read_committed_facts(store: Store, step: int) -> Committed | None:
    """Return the facts of a committed step; None if it was deleted since it was listed."""
    try:
        ref, meta = read_facts(store, step)
    except ManifestError as error:
        return None if isinstance(error.__cause__, FileNotFoundError) else Committed(attempt=None, metrics={})
    return Committed(attempt=ref.attempt, metrics=meta.metrics, stage=meta.stage, measured=meta.measured)


def _is_own(key: str) -> bool:
    """Return whether a key below the checkpoints' folder is one that a run writes (pure)."""
    found = CHECKPOINT_KEY.match(key)
    name = "" if found is None else found["name"]
    return SHARD_KEY.match(key) is not None or name == MANIFEST_FILE or NOTE_NAME.match(name) is not None


def _is_alive(lineage: Lineage, step: int, found: Committed) -> bool:
    return found.attempt is None or lineage.holds(step, found.attempt)


def nameable(store: Store) -> dict[int, Committed]:
    """Return the committed checkpoints that somebody can mean by a name, by step, ascending.

    What a dead attempt committed late is not among them. One whose manifest is damaged, of another version or not given
    now is, with no attempt and no numbers: a reference to it fails with that reason and never resolves to an older one.
    """
    lineage, steps = read_lineage(store), committed_steps(store)
    facts = for_each_step(steps, lambda step: read_committed_facts(store, step))
    return {
        step: found
        for step, found in zip(steps, facts, strict=True)
        if found is not None and _is_alive(lineage, step, found)
    }


def unreadable(committed: Mapping[int, Committed]) -> tuple[int, ...]:
    """Return the steps whose numbers are not known, ascending: any of them may be the best one (pure)."""
    return tuple(sorted(step for step, found in committed.items() if found.attempt is None))


def best_of(committed: Mapping[int, Committed]) -> int | None:
    """Return the step of the lowest evaluation loss, of the lowest training loss where none was evaluated (pure).

    It is one of the newest stage and data, since losses of others do not compare with theirs. Those that `unreadable`
    returns are passed over, which the caller must report.
    """
    known = {step: found for step, found in committed.items() if found.attempt is not None}
    if not known:
        return None
    newest = known[max(known)].group
    known = {step: found for step, found in known.items() if found.group == newest}
    best = best_steps(known, known, "eval_loss", 1) or best_steps(known, known, "loss", 1)
    return best[0] if best else None
