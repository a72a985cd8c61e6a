"""Records the end of a run or command, including the end of a run whose last attempt died before recording it."""

from __future__ import annotations

import contextlib
from contextlib import closing
from typing import TYPE_CHECKING

from ray_ulysses.clock import SystemClock
from ray_ulysses.errors import RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.checkpoint_store import checkpoint_store, found_fields
from ray_ulysses.run.early_stopping import early_stop
from ray_ulysses.run.start_point import committed_step
from ray_ulysses.run.trackers import tracked
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.events import AttemptStarted, CommandEvent, EndEvent, RunFailed
from ray_ulysses.tracking.failures import failure_fields, record_failure
from ray_ulysses.tracking.history import RunHistory, finished_step, read_history
from ray_ulysses.tracking.journal import open_journal
from ray_ulysses.tracking.journal_files import attempt_numbers
from ray_ulysses.tracking.journal_reader import read_entries, read_journal

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.run.preflight import PreparedRun

_log = get_logger(__name__)
_WRITER = "command"
_MOST_DAMAGED = 5


def record_completion(prepared: PreparedRun) -> RunHistory | None:
    """Return a run's history if all steps have been trained and saved, or None otherwise.

    If the last attempt ended after saving the last step but before recording the end of the run, this function records
    the end. Undelivered records are sent to the trackers. The caller must hold the run's claim.

    Raises:
        RunError: The checkpoint storage does not respond, or contains no intact checkpoint although one was committed.
    """
    config = prepared.config
    last_step = prepared.last_step
    early = early_stop(config, prepared.plan)
    last_step = last_step if early is None else min(last_step, early.step)
    if prepared.branched is not None and last_step > prepared.branched.branch.step:
        # Steps after the branch point were trained on the old data, and the branch trains them again.
        return None
    journal = read_journal(config.run_dir, ends_only=True)
    if not journal.entries and not prepared.stored.has_begun:
        return None
    for record in journal.damaged[:_MOST_DAMAGED]:
        _log.warning("%s; `ray-ulysses inspect` lists every damaged record", record)
    recorded = finished_step(journal.entries)
    if recorded is None or recorded < last_step:
        # Skip this check for a run recorded as finished, since its checkpoints may have been deleted after an export.
        saved = committed_step(prepared.run)
        if saved < last_step:
            return None
    started = [event.attempt for event in journal.entries if isinstance(event, AttemptStarted)]
    if recorded is None and started:
        _record_found(config, started[-1])
        with closing(open_journal(config.run_dir, started[-1], writer=_WRITER)) as last:
            last.append({"event": "run_finished", "step": saved})
    with tracked(config):
        pass
    # The caller holds the claim, so the run is not being trained.
    return read_history(config.run_dir, is_held=False, store=prepared.run.store)


def record_run_failed(config: Config, failure: EndEvent) -> None:
    """Record in the journal that a failure has ended the run.

    All workers must have ended, and the caller must hold the run's claim. If the storage fails, only log a warning,
    because the caller also reports the run's failure.
    """
    try:
        attempt = max(attempt_numbers(config.run_dir), default=1)
        _record_found(config, attempt)
        started, fields = failure.command_started, failure_fields(failure)
        ended = RunFailed(time=SystemClock().now(), attempt=attempt, command_started=started, **fields)
        record_failure(config.run_dir, ended, writer=_WRITER)
    except OSError as error:
        _log.warning("can't record the end of run %s in the journal (%s)", config.run.name, error)


def record_command_ended(run_dir: Place, session: str) -> None:
    """Record the end of a command in the journal, for time accounting, if the command has started an attempt.

    Storage errors are ignored.
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


def _record_found(config: Config, attempt: int) -> None:
    """Record the committed checkpoints, because the last attempt may have died before recording a commit."""
    with contextlib.suppress(OSError, RunError):
        if (found := found_fields(checkpoint_store(config))) is not None:
            with closing(open_journal(config.run_dir, attempt, writer=_WRITER)) as journal:
                journal.append({"event": "checkpoints_found", **found})
