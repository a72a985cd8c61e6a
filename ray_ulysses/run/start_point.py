"""Decides which checkpoint a run starts from, and which checkpoint a command means.

A run that has saved a state never restarts from step 0 automatically. `decide_start` is pure; the functions below it
read its inputs from the run's storage, peer memory and the journal.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from ray_ulysses.checkpoint import CheckpointError, Choice, Damage, newest_committed
from ray_ulysses.checkpoint.choice import committed_steps, examine, read_committed
from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.checkpoint.retention import nameable, unreadable
from ray_ulysses.checkpoint.state import begun_anew
from ray_ulysses.config.reference_to_checkpoint import SETTING
from ray_ulysses.config.resume import resume_fingerprint, settings_that_differ
from ray_ulysses.config.stages import stage_config
from ray_ulysses.data.plan.plan import Cursor
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.checkpoint_store import storage_answers, stored_checkpoints
from ray_ulysses.run.origin import check_origin, choose_step, listed, pinned_origin
from ray_ulysses.run_names import CHECKPOINT_FOLDER, CONFIG_FILE, manifest_key
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.tracking.events import CheckpointCommitted, CheckpointSetAside, InheritedSteps
from ray_ulysses.tracking.journal_reader import read_entries, read_journal
from ray_ulysses.tracking.steps import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ray_ulysses.checkpoint import Manifest
    from ray_ulysses.checkpoint.fence import Lineage
    from ray_ulysses.checkpoint.state import StateDescription
    from ray_ulysses.config import Config
    from ray_ulysses.config.reference_to_checkpoint import Which
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.run.settings import ResolvedRun
    from ray_ulysses.storage import Store
    from ray_ulysses.storage.retry import RetryPolicy

_log = get_logger(__name__)

Source = Literal["peer memory", "storage", "another run"]
"""Where a state is: in peer memory, on the run's own storage, or on the storage of another run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The starting point of an attempt."""

    source: Source | None = None
    """Location of the run's own state to start from; None without one."""
    resumes_from: int | None = None
    """The step of that state."""
    unless: tuple[int, ...] = ()
    """Newer steps that can't be read now; the newest of them that becomes readable is used instead."""
    refusal: str | None = None
    """Why the attempt may not start; None if it may."""


def decide_start(
    whole: Mapping[Source, int], passed: Sequence[Damage], committed: Sequence[int], location: str
) -> Start:
    """Decide which of its own states a run starts from (pure).

    A start from step 0 would discard a run whose state exists or can be restored.

    Args:
        whole: Step of the newest whole state of each source, the nearest source first.
        passed: Newer checkpoints that can't be used, newest first.
        committed: Steps that the journal records as committed, ascending; needed if no state is whole.
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
        # The nearest of equal ones.
        source = max(whole, key=whole.__getitem__)
        return Start(source=source, resumes_from=whole[source], unless=unless)
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


def commits_that_count(events: Iterable[Entry], lineage: Lineage) -> tuple[int, ...]:
    """Return the committed steps that a journal records, still part of the run and not set aside (pure).

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


def start_of(run: ResolvedRun, whole: Mapping[Source, int], passed: Sequence[Damage]) -> Start:
    """Call `decide_start` with the commits that the run's journal records.

    Raises:
        OSError: The store can't be listed.
    """
    committed = () if whole else commits_that_count(read_entries(run.config.run_dir), read_lineage(run.store))
    return decide_start(whole, passed, committed, run.location)


def committed_step(run: ResolvedRun) -> int:
    """Return the step of the newest checkpoint that is committed, whole and part of the run; 0 if there is none.

    Raises:
        RunError: The storage does not answer, a newer checkpoint is of another version of ray-ulysses, or no
            checkpoint is whole although one was committed.
    """
    with storage_answers(run.location):
        choice = newest_committed(run.store, "sizes")
        start = start_of(run, {} if choice.manifest is None else {"storage": choice.manifest.step}, choice.damaged)
    if start.refusal is not None:
        raise RunError(f"run {run.config.run.name!r}: {start.refusal}")
    return start.resumes_from or 0


def known_step(store: Store) -> int | None:
    """Return the step of the newest whole checkpoint, 0 if there is none; ``None`` if the storage does not answer."""
    try:
        manifest = newest_committed(store, "sizes").manifest
    except (OSError, RunError):
        return None
    return manifest.step if manifest is not None else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPosition:
    """The position of a run in its training."""

    step: int = 0
    """Completed steps."""
    digest: int = 0
    """Sum of the digests of every row trained on, modulo 2**64."""
    tokens: int = 0
    """Supervised tokens trained on."""
    resumed_from: str | None = None
    """The checkpoint's folder in the run directory, another run's, or the step in peer memory; None at step 0."""
    inherited: InheritedSteps | None = None
    """What another run had trained before this run's own steps, if this run continues it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A whole state from which an attempt may start."""

    source: Source
    store: Store
    """The store that holds its shards."""
    manifest: Manifest
    state: StateDescription
    """The part of it that is loaded."""
    position: RunPosition
    """Position of the run in its training once it is loaded."""

    @property
    def step(self) -> int:
        """Completed steps."""
        return self.manifest.step


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverySources:
    """The states from which an attempt may start, without unusable ones.

    Rank 0 chooses one; every rank opens it by its source, its location and the manifest that rank 0 has read.
    """

    run: ResolvedRun
    plan: Plan
    memory: Store | None
    """The store over peer memory, if there is any.

    Only the run's storage determines which attempts belong to the run. A bad state in memory affects no other source,
    and never keeps the run from starting."""
    retry: RetryPolicy
    """How long to wait for an unreadable checkpoint before taking an older one."""
    passed: list[Damage] = field(default_factory=list)
    """Checkpoints of the run that can't be used. They are set aside once the attempt has a state to start from."""
    unusable: set[int] = field(default_factory=set)
    """Steps whose state in memory can't be used."""

    def choose(self) -> tuple[Source, str, Manifest] | None:
        """Return the source, the location and the manifest of the state to start from; None for a start at step 0.

        Raises:
            CheckpointError: The run's storage can't be read, or there is nothing whole where there should be.
            RunError: The other run's storage can't be read.
            UserError: The state was saved under other settings, or that of another run can't be used.
        """
        config = self.run.config
        while True:
            try:
                offered = self._own_states()
                start = start_of(self.run, {source: one.step for source, one in offered.items()}, self.passed)
            except OSError as error:
                raise CheckpointError(
                    f"the checkpoints of the run can't be read ({error}); repair the storage, then start again"
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
        origin = pinned_origin(config)
        if origin is None:
            raise UserError(f"{SETTING}={config.model.resume_from!r} was not looked up; start the run with `train`")
        return "another run", origin.location, check_origin(origin, config, self.plan)

    def open(self, source: Source, location: str, manifest: Manifest) -> Candidate:
        """Return a chosen state; of another run's, only the part that ``model.resume_state`` selects."""
        step, meta, state = manifest.step, manifest.meta, manifest.state
        own = {"storage": manifest.ref.folder, "peer memory": f"peer memory, step {step}"}
        name = own.get(source, f"{location}@{step}")
        position = RunPosition(step=step, digest=int(meta.digest, 16), tokens=meta.tokens, resumed_from=name)
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
        """Note that a checkpoint on the run's storage can't be used."""
        self.passed.append(damage)
        _log.warning("%s", damage)

    def give_up_memory(self, step: int, reason: str) -> None:
        """Drop a state in memory that was found damaged during loading."""
        assert self.memory is not None
        self._pass_over_memory(step, reason)
        with contextlib.suppress(OSError):
            self.memory.delete(manifest_key(step))

    def _pass_over_memory(self, step: int, reason: str) -> None:
        self.unusable.add(step)
        _log.warning("the state of step %d in peer memory is not used: %s", step, reason)

    def _own_states(self) -> dict[Source, Manifest]:
        """Return the newest whole state, judged by sizes, in memory and on storage, the nearest first."""
        offered: dict[Source, Manifest] = {}
        if self.memory is not None:
            lineage = read_lineage(self.run.store)
            try:
                kept = newest_committed(self.memory, "sizes", unless=self.unusable, lineage=lineage)
            except OSError as error:
                _log.warning("the peer memory can't be read (%s); the checkpoints on storage are used", error)
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
    """Refuse a state of the run that was saved under other settings."""
    meta = manifest.meta
    if config.stages:
        # The settings of the stage whose last step the state holds.
        config = stage_config(config, plan.stage_of_step(max(manifest.step, 1)))
    if meta.config_fingerprint != resume_fingerprint(config):
        differences = settings_that_differ(meta.extra.get("settings", {}), config)
        raise UserError(
            f"the checkpoint of step {manifest.step} was written under another configuration than "
            f"{config.run_dir / CONFIG_FILE} ({differences}); "
            "restore that file, or start a new run under another run.name"
        )
    plan.check_cursor(Cursor.from_json(dict(meta.cursor)))


def find_checkpoint(config: Config, run_dir: Place, which: Which, *, trust_run: bool = False) -> tuple[Store, Manifest]:
    """Return the checkpoint store of a run, and the manifest of the checkpoint that a command names.

    Raises:
        UserError: There is no such checkpoint, or it is on a server that only the run names.
        RunError: It can't be used, or the storage does not answer or has lost all checkpoints.
    """
    location = stored_checkpoints(config, run_dir, trust_run=trust_run)
    store = open_store(location)
    with storage_answers(location):
        if committed_steps(store):
            return store, choose_checkpoint(store, which)
        lineage = read_lineage(store)
    raise _none_committed(run_dir, location, lineage)


def choose_checkpoint(store: Store, which: Which) -> Manifest:
    """Return the manifest of the checkpoint that a command names; only sizes are compared, no tensor is read.

    A damaged or unreadable checkpoint is never skipped silently: the error names the newest intact one for ``latest``,
    and the checkpoint that may have been the best for ``best``.

    Args:
        store: The run's checkpoint store, with at least one checkpoint.
        which: A step, ``latest``, or ``best``: the lowest evaluation loss, or training loss if none was evaluated.

    Raises:
        UserError: There is no such checkpoint.
        RunError: It can't be used.
        OSError: The storage does not answer.
    """
    if which == "latest":
        choice = newest_committed(store, "sizes")
        # A dead attempt's late commit never was the run's newest; any other skipped checkpoint is reported.
        passed = [damage for damage in choice.damaged if damage.kind != "superseded"]
        if passed:
            newest = choice.manifest
            hint = f"give --step {newest.step}, which is intact" if newest else "no other one is intact"
            raise RunError(f"{passed[0]}; {hint}")
        if choice.manifest is None:
            raise UserError(
                "RUN: has no committed checkpoint that is part of the run; continue it with ray-ulysses train"
            )
        return choice.manifest
    steps = committed_steps(store)
    if which == "best":
        committed = nameable(store)
        if unread := unreadable(committed):
            which = unread[-1]
            found = read_committed(store, which)
            why = str(found)
            if not isinstance(found, Damage):
                why = f"the checkpoint of step {which} could not be read just now"
            raise RunError(
                f"--step=best: {why}. It may be the best one: make it readable and try again, or give another step: "
                f"{_others(steps, which)}"
            )
        which = choose_step(committed, "best", "--step=best")
    if which not in steps:
        raise UserError(f"--step={which}: is not a committed step of this run; give one of {listed(steps)}")
    found = examine(store, which, "sizes")
    if isinstance(found, Damage):
        raise RunError(f"{found}; give another step with --step: {_others(steps, which)}")
    return found


def _others(steps: Sequence[int], step: int) -> str:
    return listed([other for other in steps if other != step]) or "none"


def _none_committed(run_dir: Place, location: str, lineage: Lineage) -> UserError | RunError:
    """Return the error for a storage without checkpoints: the run has saved none, or they are missing."""
    none = f"{location} holds no committed checkpoint of the run, and its journal"
    try:
        journal = read_journal(run_dir)
    except OSError as error:
        return RunError(f"{none}, which would record one, can't be read ({error.strerror or error})")
    steps = commits_that_count(journal.entries, lineage)
    if steps:
        return RunError(
            f"{none} records {len(steps)}, the newest of step {steps[-1]}; check that the storage is mounted and "
            "checkpoint.storage is unchanged, then try again"
        )
    if journal.damaged:
        return RunError(
            f"{none}, which would record one, is damaged ({journal.damaged[0]}); check that the storage is mounted, "
            "then try again"
        )
    return UserError(
        f"RUN: has no committed checkpoint in {location}; `ray-ulysses train` commits one every checkpoint.every_steps"
    )
