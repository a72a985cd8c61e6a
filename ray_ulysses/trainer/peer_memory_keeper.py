"""Saves the newest state to peer memory in the background. Failures never end training."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any

from ray_ulysses.checkpoint.background import BackgroundSaver, Saved
from ray_ulysses.checkpoint.errors import CheckpointError
from ray_ulysses.checkpoint.fence import is_overtaken, lineage_of
from ray_ulysses.checkpoint.staging import Staging
from ray_ulysses.checkpoint.state import HeldInterval
from ray_ulysses.data.plan.plan import Cursor
from ray_ulysses.elastic.causes import is_consequence
from ray_ulysses.engine.zero_state import StateReader
from ray_ulysses.logging import get_logger
from ray_ulysses.peer_memory import PeerMemoryStore
from ray_ulysses.run_names import ATTEMPT_FOLDER, CHECKPOINT_FOLDER, CHECKPOINT_KEY, claim_key, start_key, step_folder
from ray_ulysses.storage import Store
from ray_ulysses.trainer.context import AttemptContext
from ray_ulysses.trainer.record import Recorder
from ray_ulysses.trainer.saving import (
    ABANDON_TIMEOUT_S,
    CLOSE_TIMEOUT_S,
    StepOutcome,
    checkpoint_meta,
    is_final,
    steps_apart,
    unwritten_journal,
)
from ray_ulysses.trainer.step import Flags

_log = get_logger(__name__)
_STALLS = 5
_AGAIN_S = 60.0


class PeerMemoryKeeper:
    """Saves the state to peer memory after every step, unless the previous save is still in progress.

    The previous state is dropped after the next one is committed. Every rank creates a keeper and calls the same
    methods after the same steps. Without peer memory, the methods do nothing. Rank 0 decides when a save is due.
    """

    def __init__(self, context: AttemptContext, recorder: Recorder) -> None:
        self._context, self._recorder, self._worker = context, recorder, context.worker
        self._peer_memory = context.peer_memory
        self._is_ready = self._is_warned = False
        self._has_saved = False
        # Use the shortest of several stalls, so that a brief load on the CPU does not make saves less frequent.
        self._stalls_s = deque([0.0], maxlen=_STALLS)
        self._num_steps = 0
        # Steps that this attempt knows to have data in peer memory; rank 0 drops the data.
        self._held: set[int] = set()
        self._started_from = self._kept = self._num_readmitted = 0
        self._stepped_at = context.worker.clock.monotonic()
        self._step_s = 0.0
        self._reader: StateReader | None = None
        self._intervals: tuple[HeldInterval, ...] = ()
        # Time of the next reservation attempt after a failure, or 0 if no reservation has failed.
        self._reserve_at = 0.0
        self._staging: Staging | None = None
        self._saver: BackgroundSaver | None = None
        if self._peer_memory is not None:
            # Use one buffer if states are sent to the agent, or two if they alternate in memory lent by the agent.
            worker, lent = context.worker, self._peer_memory.lent
            self._staging = Staging(1, worker.device) if lent is None else Staging(2, worker.device, lend=lent.make)
            self._saver = BackgroundSaver(
                self._peer_memory.store,
                attempt=context.attempt,
                rank=worker.rank,
                world_size=worker.world_size,
                messenger=self._peer_memory.messenger,
                staging=self._staging,
                clock=worker.clock,
                on_saved=self._on_saved,
                on_failed=self._on_failed,
                # Agents verify the states that they store.
                read_back=False,
            )

    def resumed(self, step: int, engine: Any) -> None:
        """Prepare peer memory for an attempt that starts from a step.

        After a recovery, memory is reserved immediately, so that the state is saved after the first step (or a later
        step, if reserving takes longer): a lost node may have stored the second copy of some parts. Rank 0 writes the
        attempt's claim and starting step, which fence earlier attempts even while the storage is unreachable, and drops
        all states except the starting state.
        """
        if self._peer_memory is None:
            return
        if step > 0 and (source := self._read(engine).source()).description.optimizer_step > 0:
            self._intervals = source.intervals
            self._prepare()
        if self._worker.rank != 0:
            return
        self._started_from = self._kept = step
        try:
            self._take_over(self._peer_memory.store, self._listed(self._peer_memory.store))
            self._is_ready = True
        except OSError as error:
            _log.warning("this attempt does not use peer memory: %s", error)

    def flags(self, own: Flags) -> Flags:
        """Return ``own`` with this rank's peer-memory flags set."""
        if self._saver is None or self._staging is None:
            return own
        self._num_steps += 1
        failure = self._saver.failure
        if failure is not None:
            # Training continues, so the state saved earlier becomes stale.
            self._has_saved = False
        if self._is_ready and is_final(failure):
            self._is_ready = False
            _log.warning("this attempt no longer uses peer memory: %s", failure)
        apart = steps_apart(self._step_s, min(self._stalls_s), self._saver.failures)
        is_due = self._worker.rank == 0 and self._is_ready and self._num_steps >= apart
        return replace(own, memory_due=is_due, memory_busy=not (self._saver.is_idle and self._staging.is_ready))

    def before_update(self) -> None:
        """Make the next weight update wait for state copies that are in progress."""
        if self._staging is not None:
            self._staging.before_update()

    def after_step(self, engine: Any, outcome: StepOutcome, cursor: Cursor) -> None:
        """Save the state if a save is due and none is in progress. All ranks must call this method after every step."""
        if self._staging is None or self._saver is None:
            return
        begun = self._worker.clock.monotonic()
        self._step_s, self._stepped_at = begun - self._stepped_at, begun
        reader = self._read(engine)
        if self._saver.is_idle and not self._staging.is_ready:
            # If no moments were loaded, the first step has created them by now.
            self._intervals = self._intervals or reader.source().intervals
            self._prepare()
        if not outcome.flags.memory_due or outcome.flags.memory_busy:
            return
        step, self._num_steps = outcome.position.step, 0
        if self._worker.rank == 0:
            self._held.add(step)
        meta = checkpoint_meta(self._context, self._recorder, outcome, cursor, "memory")
        obstacle = partial(unwritten_journal, self._context, self._recorder)
        self._saver.save(step, reader.source(), meta, timeout_s=CLOSE_TIMEOUT_S, obstacle=obstacle)
        self._stalls_s.append(self._worker.clock.monotonic() - begun)
        self._worker.on_event("memory", step)

    def close(self, *, failed: bool = False) -> None:
        """Wait for a save in progress (only briefly if the attempt has failed), and close peer memory."""
        if self._peer_memory is not None and self._saver is not None:
            self._saver.close(ABANDON_TIMEOUT_S if failed else CLOSE_TIMEOUT_S)
            self._peer_memory.store.close()

    @property
    def has_saved(self) -> bool:
        """Whether this attempt's newest state is in peer memory.

        If the newest save failed because another rank died, the previous state is still in peer memory and is
        considered the newest.
        """
        failure = None if self._saver is None else self._saver.failure
        return self._has_saved and (failure is None or is_consequence(failure))

    def _read(self, engine: Any) -> StateReader:
        """Return the state reader, which is created only once because finding the model's tensors is slow."""
        self._reader = self._reader or StateReader(engine)
        return self._reader

    def _prepare(self) -> None:
        assert self._saver is not None
        if self._worker.clock.monotonic() >= self._reserve_at:
            self._saver.prepare(self._reserve)

    def _reserve(self) -> None:
        """Reserve memory for the next copy. Until then, the rank reports that memory is busy, and no rank saves."""
        assert self._staging is not None
        now = self._worker.clock.monotonic()
        if now < self._reserve_at:
            return
        try:
            self._staging.reserve(self._intervals)
        except CheckpointError as error:
            if not self._reserve_at:
                _log.warning("peer memory is not used: %s. The reservation is retried once a minute", error)
            self._reserve_at = now + _AGAIN_S

    def _on_saved(self, saved: Saved) -> None:
        """Record a commit. Rank 0 drops earlier states, unless a newer attempt has taken over the run."""
        self._has_saved = True
        if self._peer_memory is not None and self._worker.rank == 0:
            self._kept, self._is_warned = saved.ref.step, False
            # A readmitted agent does not know this attempt's claim, and may still store states dropped elsewhere.
            is_known = self._num_readmitted == self._peer_memory.store.num_readmitted
            self._clear(self._peer_memory.store, is_known=is_known)
        # Reserve memory now, because dropping states has just freed some.
        self._reserve()
        self._worker.on_event("in memory", saved.ref.step)

    def _clear(self, store: PeerMemoryStore, *, is_known: bool) -> None:
        """Drop states that are no longer needed. If dropping fails, it is retried after the next save."""
        with contextlib.suppress(OSError):
            # List states before checking for a newer attempt, so that its states can't be in the list.
            listed = None if is_known else self._listed(store)
            if is_overtaken(store, self._context.attempt):
                return
            if listed is None:
                self._drop_the_others(store)
            else:
                self._take_over(store, listed)

    def _listed(self, store: PeerMemoryStore) -> tuple[int, set[int]]:
        """Return the number of readmitted agents so far, and the steps that have data in peer memory."""
        num_readmitted = store.num_readmitted
        matches = (CHECKPOINT_KEY.match(key) for key in store.list(CHECKPOINT_FOLDER))
        return num_readmitted, {int(match["step"]) for match in matches if match}

    def _take_over(self, store: PeerMemoryStore, listed: tuple[int, set[int]]) -> None:
        """Drop all states except the current one, freeing memory, and write this attempt's claim and starting step."""
        num_readmitted, steps = listed
        self._held = {self._kept, *steps}
        self._drop_the_others(store)
        for key in (claim_key(self._context.attempt), start_key(self._context.attempt, self._started_from)):
            store.replace(key, [b"\n"])
        # This claim fences all earlier attempts, so their files would only use up the agents' file descriptors.
        for key in store.list(ATTEMPT_FOLDER):
            if lineage_of([key]).newest_attempt < self._context.attempt:
                store.delete(key)
        self._num_readmitted = num_readmitted

    def _drop_the_others(self, store: Store) -> None:
        for step in sorted(self._held - {self._kept}):
            store.delete(step_folder(step))
            self._held.remove(step)

    def _on_failed(self, step: int, error: CheckpointError) -> None:
        if self._peer_memory is None or self._worker.rank != 0:
            return
        # An agent may be full, because it was unreachable when states were dropped.
        self._clear(self._peer_memory.store, is_known=False)
        if not self._is_warned:
            self._is_warned = True
            _log.warning(
                "the state of step %d can't be saved to peer memory (%s); training continues, and later steps retry. "
                "Until a save succeeds, losing a node loses all steps since the newest checkpoint on storage",
                step,
                error.reason or error,
            )
