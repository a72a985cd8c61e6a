"""Chooses the checkpoint that an attempt starts from, and resolves the checkpoints that commands refer to.

A run that has committed a checkpoint never restarts from step 0 automatically. `decide_start` makes the decision. Other
functions read the inputs of the decision from storage, peer memory and the journal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ray_ulysses.checkpoint import CheckpointError, Choice, Damage, Manifest, newest_committed
from ray_ulysses.checkpoint.choice import any_is_committed, committed_steps, examine, read_committed
from ray_ulysses.checkpoint.fence import Lineage, read_lineage
from ray_ulysses.checkpoint.retention import nameable, unreadable
from ray_ulysses.checkpoint.state import StateDescription, begun_anew
from ray_ulysses.config import Config
from ray_ulysses.config.reference_to_checkpoint import SETTING, Which
from ray_ulysses.config.resume import resume_fingerprint, settings_that_differ
from ray_ulysses.config.stages import stage_config
from ray_ulysses.data.plan.plan import Cursor, Plan
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.checkpoint_store import storage_answers, stored_checkpoints
from ray_ulysses.run.origin import check_origin, choose_step, listed, pinned_origin
from ray_ulysses.run.settings import ResolvedRun
from ray_ulysses.run_names import CHECKPOINT_FOLDER, CONFIG_FILE, manifest_key
from ray_ulysses.storage import Store
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.storage.retry import RetryPolicy
from ray_ulysses.tracking.events import CheckpointCommitted, CheckpointSetAside, InheritedSteps
from ray_ulysses.tracking.journal_reader import read_entries, read_journal
from ray_ulysses.tracking.steps import Entry

_log = get_logger(__name__)

Source = Literal["peer memory", "storage", "another run"]
"""Location of a training state: peer memory, the run's own storage, or another run's storage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The starting point of an attempt."""

    source: Source | None = None
    """Source of the run's own state to start from, or None if the run has no usable state."""
    resumes_from: int | None = None
    """Step of the state to start from."""
    unless: tuple[int, ...] = ()
    """Newer steps that are currently unreadable. If one becomes readable, the newest such step is used instead."""
    refusal: str | None = None
    """Reason why the attempt must not start, or None if it may start."""


def decide_start(
    whole: Mapping[Source, int], passed: Sequence[Damage], committed: Sequence[int], location: str
) -> Start:
    """Decide which of a run's own states an attempt starts from.

    Refuse a start from step 0 if a checkpoint exists or existed, since the run would lose its progress.

    Args:
        whole: Step of the newest intact state in each source, in order of preference.
        passed: Newer unusable checkpoints, newest first.
        committed: Steps recorded as committed in the journal, ascending. Required only if no state is intact.
        location: Path or URI of the checkpoint store's root.
    """
    foreign, unread, damaged = (
        [damage for damage in passed if damage.kind == kind] for kind in ("foreign", "unreadable", "damaged")
    )
    unless = tuple(sorted(damage.step for damage in unread))
    folder = f"{location}/{CHECKPOINT_FOLDER}"
    refusal = None
    if foreign:
        return Start(refusal=f"{foreign[0]}; the storage was not changed")
    if whole:
        # For equal steps, max() returns the first source, which is the preferred one.
        source = max(whole, key=whole.__getitem__)
        return Start(source=source, resumes_from=whole[source], unless=unless)
    if unread:
        refusal = f"none of the run's checkpoints can be read: {unread[0]}; repair the storage, then start again"
    elif damaged:
        refusal = (
            "every checkpoint of the run is damaged, and the run does not restart from step 0 automatically: "
            f"{'; '.join(map(str, damaged))}. Restore the files in {folder}, or start a new run under another run.name "
            "(model.resume_from starts it from another run's checkpoint)"
        )
    elif committed:
        refusal = (
            f"the journal records a checkpoint at step {max(committed)}, but {folder} does not contain it; mount the "
            "run's storage, correct checkpoint.storage, or start a new run under another run.name"
        )
    return Start(unless=unless, refusal=refusal)


def commits_that_count(events: Iterable[Entry], lineage: Lineage) -> tuple[int, ...]:
    """Return the steps of journaled commits that are still part of the run and were not set aside, ascending.

    Args:
        events: The journal's events, in order.
        lineage: The run's attempts, read from the checkpoint store; empty if the store was lost.
    """
    attempts: dict[int, int] = {}
    for event in events:
        if isinstance(event, CheckpointCommitted):
            attempts[event.step] = event.attempt
        elif isinstance(event, CheckpointSetAside):
            attempts.pop(event.step, None)
    return tuple(sorted(step for step, attempt in attempts.items() if lineage.holds(step, attempt)))


def start_of(run: ResolvedRun, whole: Mapping[Source, int], passed: Sequence[Damage]) -> Start:
    """Call `decide_start` with the commits recorded in the run's journal.

    Raises:
        OSError: The store can't be listed.
    """
    committed = () if whole else commits_that_count(read_entries(run.config.run_dir), read_lineage(run.store))
    return decide_start(whole, passed, committed, run.location)


def committed_step(run: ResolvedRun) -> int:
    """Return the step of the run's newest intact checkpoint, or 0 if none was ever committed.

    Raises:
        RunError: The storage does not respond, a newer checkpoint was written by another version of ray-ulysses, or
            no committed checkpoint is intact.
    """
    with storage_answers(run.location):
        choice = newest_committed(run.store, "sizes")
        start = start_of(run, {} if choice.manifest is None else {"storage": choice.manifest.step}, choice.damaged)
    if start.refusal is not None:
        raise RunError(f"run {run.config.run.name!r}: {start.refusal}")
    return start.resumes_from or 0


def known_step(store: Store) -> int | None:
    """Return the step of the newest intact checkpoint, 0 if there is none, or None if the storage does not respond."""
    try:
        manifest = newest_committed(store, "sizes").manifest
    except (OSError, RunError):
        return None
    return manifest.step if manifest is not None else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPosition:
    """A run's training progress."""

    step: int = 0
    """Number of completed steps."""
    digest: int = 0
    """Sum of the digests of all trained rows, modulo 2**64."""
    tokens: int = 0
    """Number of supervised tokens trained."""
    resumed_from: str | None = None
    """Display name of the state that was loaded, or None at step 0."""
    inherited: InheritedSteps | None = None
    """Progress of another run that this run continues, or None."""
    unsaved: Mapping[str, float] | None = None
    """Metrics of the state's step if the attempt resumed from peer memory, whose state may not be on storage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A complete state from which an attempt can start."""

    source: Source
    store: Store
    """The store that contains the state's shards."""
    manifest: Manifest
    state: StateDescription
    """The part of the state to load."""
    position: RunPosition
    """The run's progress after the state is loaded."""

    @property
    def step(self) -> int:
        """Number of completed steps in the state."""
        return self.manifest.step


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverySources:
    """The sources of states from which an attempt can start.

    Rank 0 calls `choose` and sends the result to all ranks. Every rank then calls `open` with this result.
    """

    run: ResolvedRun
    plan: Plan
    memory: Store | None
    """The store in peer memory, or None if peer memory is not used.

    The run's attempts are read only from its storage. A damaged state in memory never prevents the use of another
    source, or the start of the run."""
    retry: RetryPolicy
    """Policy for retrying an unreadable checkpoint before an older checkpoint is used."""
    passed: list[Damage] = field(default_factory=list)
    """The run's unusable checkpoints in storage, which are set aside once the attempt has a state to start from."""
    unusable: set[int] = field(default_factory=set)
    """Steps of unusable states in peer memory."""

    def choose(self) -> tuple[Source, str, Manifest] | None:
        """Return the source, location and manifest of the state to start from, or None to start at step 0.

        Raises:
            CheckpointError: The run's storage can't be read, or all of its committed checkpoints are unusable.
            RunError: The other run's storage can't be read.
            UserError: The state was saved with different settings, or the other run's checkpoint is unusable.
        """
        config = self.run.config
        while True:
            try:
                offered = self._own_states()
                start = start_of(self.run, {source: one.step for source, one in offered.items()}, self.passed)
            except OSError as error:
                raise CheckpointError(
                    f"can't read the run's checkpoints ({error}); repair the storage, then start again"
                ) from error
            if start.refusal is not None:
                raise CheckpointError(start.refusal)
            if start.source is None:
                break
            manifest = offered[start.source]
            try:
                _check_own(manifest, config, self.plan)
                return start.source, self.run.location, manifest
            except UserError as error:
                if start.source != "peer memory":
                    raise
                self._pass_over_memory(manifest.step, str(error))
        if config.model.resume_from is None:
            return None
        if (origin := pinned_origin(config)) is None:
            raise UserError(f"{SETTING}={config.model.resume_from!r} was not looked up yet; start the run with `train`")
        return "another run", origin.location, check_origin(origin, config, self.plan)

    def open(self, source: Source, location: str, manifest: Manifest) -> Candidate:
        """Return the state that `choose` selected. ``model.resume_state`` limits what is loaded from another run."""
        step, meta, state = manifest.step, manifest.meta, manifest.state
        own = {"storage": manifest.ref.folder, "peer memory": f"peer memory, step {step}"}
        name = own.get(source, f"{location}@{step}")
        unsaved = meta.metrics if source == "peer memory" else None
        position = RunPosition(
            step=step, digest=int(meta.digest, 16), tokens=meta.tokens, resumed_from=name, unsaved=unsaved
        )
        store = self.memory if source == "peer memory" else self.run.store
        if source == "another run":
            store, resume_state = open_store(location), self.run.config.model.resume_state
            if resume_state == "all":
                rows = int(meta.cursor["next_row"])
                done = InheritedSteps(step=step, tokens=meta.tokens, rows=rows, digest=position.digest, origin=name)
                position = replace(position, inherited=done)
            else:
                state = begun_anew(state, with_optimizer=resume_state == "optimizer")
                position = RunPosition(resumed_from=name)
        assert store is not None
        return Candidate(source=source, store=store, manifest=manifest, state=state, position=position)

    def pass_over(self, damage: Damage) -> None:
        """Exclude an unusable checkpoint in the run's storage."""
        self.passed.append(damage)
        _log.warning("%s", damage)

    def give_up_memory(self, step: int, reason: str) -> None:
        """Exclude and delete a state in peer memory that was found to be damaged during loading."""
        assert self.memory is not None
        self._pass_over_memory(step, reason)
        with contextlib.suppress(OSError):
            self.memory.delete(manifest_key(step))

    def _pass_over_memory(self, step: int, reason: str) -> None:
        self.unusable.add(step)
        _log.warning("not using the state of step %d in peer memory: %s", step, reason)

    def _own_states(self) -> dict[Source, Manifest]:
        """Return the newest state with correct file sizes of each source, in order of preference."""
        offered: dict[Source, Manifest] = {}
        if self.memory is not None:
            lineage = read_lineage(self.run.store)
            try:
                kept = newest_committed(self.memory, "sizes", unless=self.unusable, lineage=lineage)
            except OSError as error:
                _log.warning("can't read peer memory (%s); using the checkpoints in storage", error)
                kept = Choice(manifest=None)
            for damage in kept.damaged:
                self._pass_over_memory(damage.step, damage.reason)
            if kept.manifest is not None:
                offered["peer memory"] = kept.manifest
        waiting = self.retry.begin()
        while True:
            stored = newest_committed(self.run.store, "sizes", unless=[damage.step for damage in self.passed])
            unread = [damage for damage in stored.damaged if damage.kind == "unreadable"]
            if not unread or not waiting.goes_on:
                break
            _log.warning("%s; trying again", unread[0])
            waiting.pause()
        for damage in stored.damaged:
            self.pass_over(damage)
        if stored.manifest is not None:
            offered["storage"] = stored.manifest
        return offered


def _check_own(manifest: Manifest, config: Config, plan: Plan) -> None:
    """Refuse a state that the run saved with different settings."""
    meta = manifest.meta
    if config.stages:
        # Compare with the settings of the stage that trained the state's last step.
        config = stage_config(config, plan.stage_of_step(max(manifest.step, 1)))
    if meta.config_fingerprint != resume_fingerprint(config):
        differences = settings_that_differ(meta.extra.get("settings", {}), config)
        raise UserError(
            f"the checkpoint of step {manifest.step} was written with a configuration that differs from "
            f"{config.run_dir / CONFIG_FILE} ({differences}); restore that file, or start a new run under another "
            "run.name"
        )
    plan.check_cursor(Cursor.from_json(dict(meta.cursor)))


def find_checkpoint(config: Config, run_dir: Place, which: Which, *, trust_run: bool = False) -> tuple[Store, Manifest]:
    """Return a run's checkpoint store and the manifest of the requested checkpoint.

    Raises:
        UserError: The checkpoint does not exist, or its server is specified only by the run's files.
        RunError: The checkpoint is unusable, the storage does not respond, or all committed checkpoints are missing.
    """
    location = stored_checkpoints(config, run_dir, trust_run=trust_run)
    store = open_store(location)
    with storage_answers(location):
        if any_is_committed(store):
            return store, choose_checkpoint(store, which)
        lineage = read_lineage(store)
    raise _none_committed(run_dir, location, lineage)


def choose_checkpoint(store: Store, which: Which) -> Manifest:
    """Return the manifest of the requested checkpoint after checking its file sizes, without reading tensors.

    A damaged or unreadable checkpoint is never skipped silently. For ``latest``, the error recommends the newest intact
    checkpoint. For ``best``, the error reports an unreadable checkpoint that may be the best.

    Args:
        store: The run's checkpoint store, which contains at least one checkpoint.
        which: A step, ``latest``, or ``best`` for the lowest evaluation loss, or training loss without evaluations.

    Raises:
        UserError: The checkpoint does not exist.
        RunError: The checkpoint is unusable.
        OSError: The storage does not respond.
    """
    if which == "latest":
        choice = newest_committed(store, "sizes")
        # A late commit of a superseded attempt was never part of the run, so it is not reported.
        passed = [damage for damage in choice.damaged if damage.kind != "superseded"]
        if passed:
            newest = choice.manifest
            hint = f"use --step {newest.step}, which is intact" if newest else "no other checkpoint is intact"
            raise RunError(f"{passed[0]}; {hint}")
        if choice.manifest is None:
            raise UserError("RUN has no committed checkpoint; continue the run with `ray-ulysses train`")
        return choice.manifest
    steps = committed_steps(store)
    if which == "best":
        committed = nameable(store)
        if unread := unreadable(committed):
            which = unread[-1]
            found = read_committed(store, which)
            why = str(found)
            if not isinstance(found, Damage):
                why = f"the checkpoint of step {which} was temporarily unreadable"
            raise RunError(
                f"--step=best: {why}. This checkpoint may be the best: make it readable and try again, or use another "
                f"step: {_others(steps, which)}"
            )
        which = choose_step(committed, "best", "--step=best")
    if which not in steps:
        raise UserError(f"--step={which} is not a committed step of this run; use one of {listed(steps)}")
    found = examine(store, which, "sizes")
    if isinstance(found, Damage):
        raise RunError(f"{found}; use another step with --step: {_others(steps, which)}")
    return found


def _others(steps: Sequence[int], step: int) -> str:
    return listed([other for other in steps if other != step]) or "none"


def _none_committed(run_dir: Place, location: str, lineage: Lineage) -> UserError | RunError:
    """Return the error for storage without checkpoints: none was ever saved, or the saved checkpoints are missing."""
    none = f"{location} contains no committed checkpoint of the run, and the run's journal"
    try:
        journal = read_journal(run_dir)
    except OSError as error:
        return RunError(f"{none}, which would record one, can't be read ({error.strerror or error})")
    if steps := commits_that_count(journal.entries, lineage):
        return RunError(
            f"{none} records {len(steps)} (newest: step {steps[-1]}); check that the storage is mounted and "
            "checkpoint.storage is unchanged, then try again"
        )
    if journal.damaged:
        return RunError(
            f"{none}, which would record one, is damaged ({journal.damaged[0]}); check that the storage is mounted, "
            "then try again"
        )
    return UserError(
        f"RUN has no committed checkpoint in {location}; `ray-ulysses train` commits one every checkpoint.every_steps"
    )
