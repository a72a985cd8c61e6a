"""Settles a run that has nothing left to do: records the end that its last attempt died before recording."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.clock import SystemClock
from ray_ulysses.errors import RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.checkpoint_store import checkpoint_location, checkpoint_store
from ray_ulysses.run.inventory import take_inventory
from ray_ulysses.run.planning import committed_step
from ray_ulysses.tracking.events import AttemptStarted, OfCommand, RunFailed
from ray_ulysses.tracking.failures import failure_fields, failure_tags, tell_failure
from ray_ulysses.tracking.history import finished_step, read_history
from ray_ulysses.tracking.journal import AttemptJournal, attempt_numbers
from ray_ulysses.tracking.journal_reader import index_journal, read_entries, read_journal
from ray_ulysses.tracking.mlflow_tracker import MlflowTracker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ray_ulysses.config import Config
    from ray_ulysses.run.preflight import PreparedRun
    from ray_ulysses.tracking.events import EndEvent
    from ray_ulysses.tracking.history import RunHistory
    from ray_ulysses.tracking.tracker import RunStatus

_log = get_logger(__name__)
_WRITER = "command"
_MOST_DAMAGED = 5


def settle_completed(prepared: PreparedRun) -> RunHistory | None:
    """Return a run's history if there is nothing left to do up to its last step, else ``None``.

    An attempt may have died, or was stopped, after it had saved the last step and before it said that the run is
    finished: that is said here, in the journal and to the tracker, and so is whatever an outage of the tracker has
    left unsaid. The caller holds the run's lock.

    Raises:
        RunError: The storage of the checkpoints does not answer, or holds nothing whole although it should.
    """
    config = prepared.config
    last_step = prepared.last_step
    if prepared.remainder is not None and last_step > prepared.remainder.branch.step:
        # What was trained beyond the branch, with the data as they were, does not count.
        return None
    index_journal(config.run_dir)
    journal = read_journal(config.run_dir)
    for record in journal.damaged[:_MOST_DAMAGED]:
        _log.warning("%s; `ray-ulysses inspect` names every damaged record", record)
    said = finished_step(journal.entries)
    if said is None or said < last_step:
        # Asked only now: who has exported a finished run may have deleted its checkpoints.
        saved = committed_step(config)
        if saved < last_step:
            return None
    # First the tracker, whose news outlive this command, and only then what keeps them from being told again.
    if _catch_up_tracking(config, status="finished" if said is None else None) and said is None:
        _say_finished(config, saved)
    # Nobody is training it now, whatever the lock says: it is the caller's.
    return read_history(config.run_dir, is_held=False, store=checkpoint_store(config))


def settle_failed(config: Config, failure: EndEvent) -> None:
    """Say in the journal and to the tracker that a failure has ended the run.

    The workers are gone, and the caller holds the run's lock. A storage or a tracker that does not answer is warned of:
    the failure itself is on its way to the person.
    """
    try:
        attempt = max(attempt_numbers(config.run_dir), default=1)
        ended = RunFailed(time=SystemClock().now(), attempt=attempt, **failure_fields(failure))
        tell_failure(config.run_dir, ended, writer=_WRITER)
    except OSError as error:
        _log.warning("the journal could not be told how run %s ended (%s)", config.run.name, error)
    _catch_up_tracking(config, status="failed", tags=failure_tags(failure))


def _say_finished(config: Config, step: int) -> None:
    """Write into the journal of the last attempt what it did not live to write."""
    started = [event.attempt for event in read_entries(config.run_dir) if isinstance(event, AttemptStarted)]
    if not started:
        return
    journal = AttemptJournal.open(config.run_dir, started[-1], writer=_WRITER)
    try:
        journal.append({"event": "run_finished", "step": step})
    finally:
        journal.close()


def say_command_ended(run_dir: Path, session: str) -> None:
    """Write into the journal that a command is at its end, for the account of its time; one without attempts is none.

    Whatever the journal's disk says to it: the command has ended all the same.
    """
    with contextlib.suppress(OSError):
        own = [one for one in read_entries(run_dir) if isinstance(one, OfCommand) and one.session == session]
        if own:
            journal = AttemptJournal.open(run_dir, own[-1].attempt, writer=_WRITER)
            journal.append({"event": "command_ended", "session": session})
            journal.close()


def _catch_up_tracking(config: Config, *, status: RunStatus | None, tags: Mapping[str, str] | None = None) -> bool:
    """Tell the tracker what it has not been told; takes a bounded time, and an outage is no error of a run.

    Returns:
        Whether all of it is told, or waits on disk to be.

    Args:
        config: The run's configuration.
        status: How the run ended, if its last attempt did not say it, and perhaps not what it had committed.
        tags: What is said of that end.
    """
    if config.tracking_uri is None:
        return True
    tracker = MlflowTracker(
        uri=config.tracking_uri,
        experiment=config.tracking.experiment,
        run_name=config.run.name,
        run_dir=config.run_dir,
    )
    try:
        if status is not None:
            store = checkpoint_store(config)
            next_attempt = read_lineage(store).newest_attempt + 1
            inventory = take_inventory(store, checkpoint_location(config), next_attempt)
            tracker.catch_up(inventory, status=status, tags=tags)
        else:
            tracker.catch_up()
    except (OSError, RunError) as error:
        _log.warning("MLflow was not told everything of run %s (%s)", config.run.name, error)
        return False
    return True
