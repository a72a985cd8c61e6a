"""Sources of states from which an attempt may start: peer memory, the run's own checkpoints, and another run's."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from ray_ulysses.checkpoint import newest_committed
from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.checkpoint.state import begun_anew
from ray_ulysses.config.reference_to_checkpoint import SETTING
from ray_ulysses.errors import UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.origin import check_origin, pinned_origin
from ray_ulysses.run_names import manifest_key
from ray_ulysses.storage.patience import Patience
from ray_ulysses.storage.place import open_store
from ray_ulysses.tracking.events import InheritedSteps

if TYPE_CHECKING:
    from ray_ulysses.checkpoint import Damage, Manifest
    from ray_ulysses.checkpoint.state import StateDescription
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.run.settings import ResolvedRun
    from ray_ulysses.storage import Store

_log = get_logger(__name__)


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

    source: str
    """Name of the source that offers it."""
    location: str
    """Root of its store, a path or a URI."""
    store: Store
    """The store that holds its shards."""
    manifest: Manifest
    state: StateDescription
    """What is loaded of it."""
    position: RunPosition
    """Where in its training the run is once that is loaded."""

    @property
    def step(self) -> int:
        """Completed steps that it holds."""
        return self.manifest.step


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnCheckpoints:
    """The run's own checkpoints on its storage."""

    name: ClassVar[str] = "storage"
    run: ResolvedRun
    patience: Patience
    """How long a checkpoint that can't be read is waited for before an older one is taken."""

    def candidates(self, unless: Collection[int]) -> tuple[Sequence[Candidate], Sequence[Damage]]:
        """Return the newest whole checkpoint, as far as sizes tell, and newer ones that can't be used, newest first.

        Raises:
            OSError: The run's storage can't be read.
        """
        waiting = self.patience.begin()
        while True:
            choice = newest_committed(self.run.store, "sizes", unless=unless)
            unread = [damage for damage in choice.damaged if damage.kind == "unreadable"]
            if not unread or not waiting.goes_on:
                break
            _log.warning("%s; trying again", unread[0])
            waiting.pause()
        whole = [] if choice.manifest is None else [self.open(self.run.location, choice.manifest)]
        return whole, choice.damaged

    def open(self, location: str, manifest: Manifest) -> Candidate:
        """Return the candidate of a checkpoint of the run."""
        return Candidate(
            source=self.name,
            location=location,
            store=self.run.store,
            manifest=manifest,
            state=manifest.state,
            position=_position(manifest, manifest.ref.folder),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerMemory:
    """The newest state in the memory of the run's nodes.

    The run's storage alone says which attempts belong to the run. What is wrong with a state in memory concerns no
    other source, and never keeps the run from starting.
    """

    name: ClassVar[str] = "peer memory"
    run: ResolvedRun
    store: Store
    """The store over the nodes' memory."""
    unusable: set[int] = field(default_factory=set)
    """Steps whose state there can't be used."""

    def candidates(self, unless: Collection[int]) -> tuple[Sequence[Candidate], Sequence[Damage]]:
        """Return the newest whole state in memory, as far as sizes tell; the steps that storage lacks do not matter."""
        lineage = read_lineage(self.run.store)
        try:
            choice = newest_committed(self.store, "sizes", unless=self.unusable, lineage=lineage)
        except OSError as error:
            _log.warning("the peer memory can't be read (%s); the checkpoints on storage are used", error)
            return [], []
        for damage in choice.damaged:
            self.pass_over(damage.step, damage.reason)
        return [] if choice.manifest is None else [self.open(self.name, choice.manifest)], []

    def pass_over(self, step: int, reason: str) -> None:
        """Note that the state of a step can't be used; it is offered no more."""
        self.unusable.add(step)
        _log.warning("the state of step %d in peer memory is not used: %s", step, reason)

    def give_up(self, step: int, reason: str) -> None:
        """Drop the state of a step that turned out not to be whole while it was loaded."""
        self.pass_over(step, reason)
        with contextlib.suppress(OSError):
            self.store.delete(manifest_key(step))

    def open(self, location: str, manifest: Manifest) -> Candidate:
        """Return the candidate of a state in memory."""
        return Candidate(
            source=self.name,
            location=location,
            store=self.store,
            manifest=manifest,
            state=manifest.state,
            position=_position(manifest, f"{self.name}, step {manifest.step}"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherRun:
    """The checkpoint of another run that ``model.resume_from`` names, for a run without a state of its own."""

    name: ClassVar[str] = "another run"
    run: ResolvedRun
    plan: Plan

    def candidates(self, unless: Collection[int]) -> tuple[Sequence[Candidate], Sequence[Damage]]:
        """Return the checkpoint that the driver has looked up, if the setting names one.

        Raises:
            UserError: It can't be used.
            RunError: The storage of the other run can't be read.
        """
        config = self.run.config
        if config.model.resume_from is None:
            return [], []
        origin = pinned_origin(config)
        if origin is None:
            raise UserError(f"{SETTING}={config.model.resume_from!r} was not looked up; start the run with `train`")
        return [self.open(origin.location, check_origin(origin, config, self.plan))], []

    def open(self, location: str, manifest: Manifest) -> Candidate:
        """Return the candidate of a checkpoint of another run, and what ``model.resume_state`` takes of it."""
        resume_state, state = self.run.config.model.resume_state, manifest.state
        origin = f"{location}@{manifest.step}"
        if resume_state == "all":
            position = _position(manifest, origin)
            rows = int(manifest.meta.cursor["next_row"])
            done = InheritedSteps(
                step=position.step, tokens=position.tokens, rows=rows, digest=position.digest, origin=origin
            )
            position = replace(position, inherited=done)
        else:
            state = begun_anew(state, with_optimizer=resume_state == "optimizer")
            position = RunPosition(resumed_from=origin)
        store = open_store(location)
        return Candidate(
            source=self.name, location=location, store=store, manifest=manifest, state=state, position=position
        )


RecoverySource = OwnCheckpoints | PeerMemory | OtherRun
"""Offers states from which an attempt may start, without those of steps that are known not to be whole.

Rank 0 asks for candidates, of which `start_point.decide_start` chooses one; then every rank opens that one by its
location and the manifest that rank 0 has read. Candidates refer to the source by its name."""


def _position(manifest: Manifest, resumed_from: str) -> RunPosition:
    meta = manifest.meta
    return RunPosition(step=manifest.step, digest=int(meta.digest, 16), tokens=meta.tokens, resumed_from=resumed_from)
