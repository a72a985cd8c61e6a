"""Records the end of a run that its last attempt could not record, and reports it to the tracker."""

from __future__ import annotations

import contextlib
from contextlib import closing
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.clock import SystemClock
from ray_ulysses.errors import RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.checkpoint_store import checkpoint_location, checkpoint_store
from ray_ulysses.run.inventory import open_trackers, take_inventory
from ray_ulysses.run.start_point import committed_step
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.events import AttemptStarted, CommandEvent, RunFailed
from ray_ulysses.tracking.failures import failure_fields, failure_tags, record_failure
from ray_ulysses.tracking.history import finished_step, read_history
from ray_ulysses.tracking.journal import open_journal
from ray_ulysses.tracking.journal_files import attempt_numbers
from ray_ulysses.tracking.journal_reader import read_entries, read_journal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray_ulysses.config import Config
    from ray_ulysses.run.preflight import PreparedRun
    from ray_ulysses.tracking.delivery import RunStatus
    from ray_ulysses.tracking.events import EndEvent
    from ray_ulysses.tracking.history import RunHistory

_log = get_logger(__name__)
_WRITER = "command"
_MOST_DAMAGED = 5


def settle_completed(prepared: PreparedRun) -> RunHistory | None:
    """Return a run's history if nothing is left to do up to its last step, else ``None``.

    An attempt may have died or been stopped after it saved the last step and before it recorded that the run is
    finished: that is recorded here, and reported to the tracker with everything that an outage of the tracker kept from
    it. The caller holds the run.

    Raises:
        RunError: The storage of the checkpoints does not answer, or holds nothing whole although it should.
    """
    config = prepared.config
    last_step = prepared.last_step
    if prepared.branched is not None and last_step > prepared.branched.branch.step:
        # Steps that were trained beyond the branch, with the data as they were, do not count.
        return None
    journal = read_journal(config.run_dir, ends_only=True)
    if not journal.entries and not prepared.stored.has_begun:
        return None
    for record in journal.damaged[:_MOST_DAMAGED]:
        _log.warning("%s; `ray-ulysses inspect` lists every damaged record", record)
    recorded = finished_step(journal.entries)
    if recorded is None or recorded < last_step:
        # Only now: whoever has exported a finished run may have deleted its checkpoints.
        saved = committed_step(prepared.run)
        if saved < last_step:
            return None
    # First the tracker, whose record outlives this command, and only then the journal, which ends the reports to it.
    if _catch_up_tracking(config, status="finished" if recorded is None else None) and recorded is None:
        started = [event.attempt for event in journal.entries if isinstance(event, AttemptStarted)]
        if started:
            with closing(open_journal(config.run_dir, started[-1], writer=_WRITER)) as last:
                last.append({"event": "run_finished", "step": saved})
    # Nobody is training it now, although it is held: by the caller.
    return read_history(config.run_dir, is_held=False, store=prepared.run.store)


def settle_failed(config: Config, failure: EndEvent) -> None:
    """Record in the journal and with the tracker that a failure has ended the run.

    The workers are gone, and the caller holds the run. A storage or a tracker that does not answer causes only a
    warning: the failure itself is being reported to the person.
    """
    try:
        attempt = max(attempt_numbers(config.run_dir), default=1)
        started, fields = failure.command_started, failure_fields(failure)
        ended = RunFailed(time=SystemClock().now(), attempt=attempt, command_started=started, **fields)
        record_failure(config.run_dir, ended, writer=_WRITER)
    except OSError as error:
        _log.warning("the end of run %s could not be recorded in the journal (%s)", config.run.name, error)
    _catch_up_tracking(config, status="failed", tags=failure_tags(failure))


def record_command_ended(run_dir: Place, session: str) -> None:
    """Record in the journal that a command with an attempt has ended, for the account of its time.

    A failure to write it is ignored: the command has ended all the same.
    """
    with contextlib.suppress(OSError):
        own = [
            one
            for one in read_entries(run_dir, ends_only=True)
            if isinstance(one, CommandEvent) and one.session == session
        ]
        if own:
            with closing(open_journal(run_dir, own[-1].attempt, writer=_WRITER)) as journal:
                journal.append({"event": "command_ended", "session": session})


def _catch_up_tracking(config: Config, *, status: RunStatus | None, tags: Mapping[str, str] | None = None) -> bool:
    """Report to the tracker what it has not received; takes a bounded time, and an outage is only a warning.

    Returns whether all of it is reported, or is spooled on disk to be. The status and the tags are of a run whose last
    attempt did not report how it ended.
    """
    trackers = open_trackers(config)
    if not trackers:
        return True
    try:
        if status is not None:
            store = checkpoint_store(config)
            next_attempt = read_lineage(store).newest_attempt + 1
            inventory = take_inventory(store, checkpoint_location(config), next_attempt)
            trackers.catch_up(inventory, status=status, tags=tags)
        else:
            trackers.catch_up()
    except (OSError, RunError) as error:
        _log.warning("the trackers did not receive everything of run %s (%s)", config.run.name, error)
        return False
    return True
