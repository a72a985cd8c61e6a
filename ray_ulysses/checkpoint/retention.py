"""Retention: selects the checkpoints to keep, and deletes all others and the remains of failed saves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ray_ulysses.checkpoint.choice import begun_steps, committed_in, for_each_step
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
    """Retention rules; a checkpoint is kept if at least one rule applies."""

    last: int
    """Number of newest checkpoints to keep."""
    every_steps: int | None = None
    """Keep every checkpoint whose step is a multiple of this number; None disables the rule."""
    best: int = 0
    """Number of checkpoints with the lowest `best_metric` to keep for each pair of stage and evaluation data."""
    best_metric: str = "eval_loss"
    """``eval_loss`` or ``loss``."""

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"checkpoint.keep_last={self.last} would delete every checkpoint; use 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """The manifest fields of a checkpoint that retention depends on."""

    attempt: int | None
    """Attempt that committed the checkpoint, or None if the manifest can't be read; such a checkpoint is kept."""
    metrics: Mapping[str, float]
    stage: str = ""
    """Name of the training stage, or an empty string if the run has no stages."""
    measured: str = ""
    """Identity of the data on which the metrics were measured."""

    @property
    def group(self) -> tuple[str, str]:
        """Grouping key, equal for checkpoints whose losses are comparable."""
        return self.stage, self.measured


def steps_to_delete(committed: Mapping[int, Committed], *, newest: int, rules: KeepRules) -> tuple[int, ...]:
    """Return the steps of `committed` that no rule keeps, in ascending order.

    `newest` is the step that was just committed. This step and later steps are always kept.

    Raises:
        ValueError: `newest` is not committed.
    """
    if newest not in committed:
        raise ValueError(f"step {newest} is not committed, so no other checkpoint may be deleted")
    kept = keep_reasons(committed, newest=newest, rules=rules)
    # A checkpoint whose manifest can't be read is kept, because a rule might apply to it.
    return tuple(sorted(step for step in committed if step not in kept and committed[step].attempt is not None))


def keep_reasons(committed: Mapping[int, Committed], *, newest: int, rules: KeepRules) -> dict[int, tuple[str, ...]]:
    """Return, for each step that is kept, short descriptions of the rules that keep the step."""
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
    """Return up to `num_steps` steps with the lowest metric per `Committed.group`, best first; ties favor later steps.

    Losses are not comparable between stages, because context lengths and corpora differ, or before and after a branch
    that changed the held-out documents.
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
    """Return the shard folders that no manifest refers to.

    Args:
        keys: All keys under the checkpoint folder.
        committed: Attempt that committed each step. The attempt is None if the manifest can't be read, in which case
            all shards of the step are kept.
        attempt: Number of the current attempt; folders of later attempts are ignored.
        newest: Step that the current attempt committed last. An attempt saves its steps in order, so its own shards
            of later steps may belong to a save in progress, on ranks that are ahead of this one.
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
    """Deletes checkpoints that are no longer needed; used by one rank only, without concurrent calls."""

    def __init__(self, store: Store, rules: KeepRules) -> None:
        self._store = store
        self._rules = rules
        # Cached because manifests do not change, and reading one takes a while at a large world size.
        self._known: dict[int, Committed] = {}
        # Keys under the checkpoint folder, or None if they must be listed; listing a thousand steps takes seconds.
        self._keys: frozenset[str] | None = None

    def forget(self) -> None:
        """Discard the cached listing after a failed save, which may have left files behind."""
        self._keys = None

    def apply(self, newest: CheckpointRef) -> tuple[int, ...]:
        """Delete the checkpoints and leftover shards that are not needed after the commit of `newest`.

        Return the deleted steps, in ascending order. A checkpoint's manifest is deleted before its shards, so that an
        interruption leaves no damaged checkpoint. If a newer attempt has started, nothing is deleted, because that
        attempt may have resumed from an old checkpoint.

        Raises:
            OSError: A deletion failed; the next call tries again.
        """
        store = self._store
        # If this call fails, the next call must list everything: an incremental listing would miss this step's keys.
        known, self._keys = self._keys, None
        lineage = read_lineage(store)
        if lineage.newest_attempt > newest.attempt:
            return ()
        keys = self._list(newest, known)
        committed = self._committed(newest, committed_in(keys))
        alive = {step: found for step, found in committed.items() if _is_alive(lineage, step, found)}
        if newest.step not in alive:
            raise OSError(f"the checkpoint of step {newest.step} was just committed, but the storage does not list it")
        # A superseded checkpoint beyond `newest` stays, in case it was skipped only because it was unreadable.
        dead = {step for step in committed if step not in alive and step <= newest.step}
        deleted = tuple(sorted({*dead, *steps_to_delete(alive, newest=newest.step, rules=self._rules)}))
        for step in deleted:
            store.delete(manifest_key(step))
            # No save of this step can be in progress, because an attempt saves its steps in order.
            self._delete(step_folder(step))
            self._known.pop(step, None)
        kept = {step: found.attempt for step, found in committed.items() if step not in deleted}
        keys = frozenset(key for key in keys if not key.startswith(tuple(f"{step_folder(step)}/" for step in deleted)))
        dead_folders = leftovers(keys, kept, attempt=newest.attempt, newest=newest.step)
        for folder in dead_folders:
            self._delete(folder)
        if isinstance(store, LocalStore):
            # Listings do not show the temporary files of killed processes.
            sweep_temporaries(store.path(CHECKPOINT_FOLDER), store.root)
        self._keys = keys.difference(f"{folder}/" for folder in dead_folders)
        return deleted

    def _delete(self, folder: str) -> None:
        """Delete a folder, or only the run's files in it if the folder also contains other files."""
        keys = self._store.list(folder)
        own = [key for key in keys if _is_own(key)]
        if len(own) == len(keys):
            self._store.delete(folder)
            return
        _log.warning("%s: was not written by ray-ulysses and is not deleted; move it elsewhere", min({*keys} - {*own}))
        for key in own:
            self._store.delete(key)

    def _list(self, newest: CheckpointRef, known: frozenset[str] | None) -> frozenset[str]:
        """Return the keys under the checkpoint folder, with each shard's key replaced by its folder and a slash.

        Known keys stay valid, because only this attempt writes checkpoints until a newer attempt starts.
        """
        steps = begun_steps(self._store) if known is None else (newest.step,)
        return frozenset(known or ()).union(*for_each_step(steps, self._keys_of))

    def _keys_of(self, step: int) -> list[str]:
        keys = [f"{step_folder(step)}/{name}" for name in self._store.names(step_folder(step))]
        return [f"{key}/" if SHARD_KEY.match(f"{key}/") else key for key in keys]

    def _committed(self, newest: CheckpointRef, steps: Iterable[int]) -> dict[int, Committed]:
        """Return the manifest fields of the committed steps; reads only new manifests and the manifest of `newest`."""
        self._known.pop(newest.step, None)
        found = self._known | _read_committed(self._store, [step for step in steps if step not in self._known])
        self._known = {step: facts for step, facts in found.items() if facts.attempt is not None}
        return {step: found[step] for step in steps if step in found}


def _read_committed(store: Store, steps: Sequence[int]) -> dict[int, Committed]:
    """Return the manifest fields of those steps whose manifest still exists."""

    def read(step: int) -> Committed | None:
        try:
            ref, meta = read_facts(store, step)
        except ManifestError as error:
            return None if isinstance(error.__cause__, FileNotFoundError) else Committed(attempt=None, metrics={})
        return Committed(attempt=ref.attempt, metrics=meta.metrics, stage=meta.stage, measured=meta.measured)

    found = zip(steps, for_each_step(steps, read), strict=True)
    return {step: facts for step, facts in found if facts is not None}


def _is_own(key: str) -> bool:
    """Return whether a key under the checkpoint folder matches the pattern of a file that a run writes."""
    found = CHECKPOINT_KEY.match(key)
    name = "" if found is None else found["name"]
    return SHARD_KEY.match(key) is not None or name == MANIFEST_FILE or NOTE_NAME.match(name) is not None


def _is_alive(lineage: Lineage, step: int, found: Committed) -> bool:
    return found.attempt is None or lineage.holds(step, found.attempt)


def nameable(store: Store) -> dict[int, Committed]:
    """Return the committed checkpoints that a reference such as ``latest`` can resolve to, by ascending step.

    Superseded checkpoints (see `Damage.kind`) are excluded. Checkpoints with a damaged, foreign or unreadable
    manifest are included, without an attempt or metrics, so that a reference fails instead of resolving to an older
    checkpoint.
    """
    lineage = read_lineage(store)
    committed = _read_committed(store, begun_steps(store))
    return {step: found for step, found in committed.items() if _is_alive(lineage, step, found)}


def unreadable(committed: Mapping[int, Committed]) -> tuple[int, ...]:
    """Return the steps whose metrics are unknown, in ascending order; any of these steps might be the best."""
    return tuple(sorted(step for step, found in committed.items() if found.attempt is None))


def best_of(committed: Mapping[int, Committed]) -> int | None:
    """Return the step with the lowest evaluation loss, or training loss if no step was evaluated, or None.

    Only checkpoints in the newest checkpoint's `Committed.group` are considered, because other losses are not
    comparable. Steps that `unreadable` returns are skipped, and the caller must report them.
    """
    known = {step: found for step, found in committed.items() if found.attempt is not None}
    if not known:
        return None
    newest = known[max(known)].group
    known = {step: found for step, found in known.items() if found.group == newest}
    best = best_steps(known, known, "eval_loss", 1) or best_steps(known, known, "loss", 1)
    return best[0] if best else None
