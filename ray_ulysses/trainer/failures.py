"""How a failure of the workers is judged and told: cause, cost and what is done about it, in the journal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint import newest_committed
from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.elastic.budget import PastFailure, failures_that_count
from ray_ulysses.errors import RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.checkpoint_store import checkpoint_store
from ray_ulysses.tracking.events import AttemptEnded
from ray_ulysses.tracking.failures import Failure, failures_of, newest_attempt, tell_failure
from ray_ulysses.tracking.journal_reader import read_beside

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.elastic.causes import Cause
    from ray_ulysses.tracking.failures import NewestAttempt

_log = get_logger(__name__)
CONTROLLER, COMMAND = "controller", "command"
"""Who writes failures into the journal, each into a segment of its own: what supervises the workers, and the driver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureBook:
    """Judges the failures of a command, and writes them down; it keeps nothing that is not in the journal.

    Attributes:
        config: The run's configuration.
        session: The command's name.
        first_attempt: Attempts from this number on are the command's.
        writer: `CONTROLLER` or `COMMAND`.
        clock: Time.
    """

    config: Config
    session: str
    first_attempt: int
    writer: str
    clock: Clock = field(default_factory=SystemClock)

    def judge(self, cause: Cause) -> Failure:
        """Decide whether the workers are started again after a failure, and write it down."""
        newest = newest_attempt(self.config.run_dir)
        own = newest if newest is not None and newest.attempt >= self.first_attempt else None
        failure = self._failure(cause, own)
        try:
            tell_failure(
                self.config.run_dir,
                failure,
                attempt=newest.attempt if newest is not None else 1,
                has_begun=own is not None and own.session is not None and not self._is_told(own.attempt),
                writer=self.writer,
                clock=self.clock,
            )
        except OSError as error:
            _log.warning("the journal could not be told of a failure (%s): %s", error, failure.in_words())
        return failure

    def failures(self) -> list[tuple[float, Failure]]:
        """Return the command's failures up to now, with their times."""
        return failures_of(read_beside(self.config.run_dir), self.session)

    def _failure(self, cause: Cause, attempt: NewestAttempt | None) -> Failure:
        elastic = self.config.elastic
        step = self._committed_step()
        past = [
            PastFailure(time=time, step=failure.committed_step)
            for time, failure in self.failures()
            if failure.failure is not None
        ]
        number = None
        if cause.kind != "preempted" and not cause.is_final:
            window_s = elastic.failure_window_s
            number = 1 + failures_that_count(past, now=self.clock.now(), step=step, window_s=window_s)
        last_step = attempt.last_step if attempt is not None else None
        nodes = attempt.nodes if attempt is not None else ()
        return Failure(
            session=self.session,
            kind=cause.kind,
            reason=cause.reason,
            rank=cause.rank,
            node=nodes[cause.rank] if cause.rank is not None and cause.rank < len(nodes) else None,
            committed_step=step,
            lost_steps=None if step is None or last_step is None else max(0, last_step - step),
            way_out=cause.way_out,
            failure=number,
            max_failures=elastic.max_failures,
            restarts=not cause.is_final and (number is None or number <= elastic.max_failures),
        )

    def _is_told(self, attempt: int) -> bool:
        told = read_beside(self.config.run_dir)
        return any(isinstance(event, AttemptEnded) and event.attempt == attempt for event in told)

    def _committed_step(self) -> int | None:
        """Return the newest committed step; ``None`` where the storage does not say."""
        try:
            manifest = newest_committed(checkpoint_store(self.config), "sizes").manifest
        except (OSError, RunError):
            return None
        return manifest.step if manifest is not None else 0
