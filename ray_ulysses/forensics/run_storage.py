"""Opens the checkpoint store of a run, which is its directory or the one named by its configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.errors import ConfigError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.checkpoint_store import stored_checkpoints
from ray_ulysses.run.secrets_file import stored_config
from ray_ulysses.run.start_point import commits_that_count, decide_start
from ray_ulysses.run_names import CONFIG_FILE, DIAGNOSTICS_FOLDER
from ray_ulysses.storage import current_owner
from ray_ulysses.storage.place import Place, is_file, open_store
from ray_ulysses.tracking.history import build_history, read_history
from ray_ulysses.tracking.journal_reader import Journal, read_journal

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.storage import Store
    from ray_ulysses.tracking.history import RunHistory

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStorage:
    """The checkpoint store of a run."""

    store: Store
    location: str
    config: Config | None
    """The run's configuration; None if its directory has none that can be read."""


def read_run(run_dir: Place, journal: Journal | None = None, *, trust_run: bool = False) -> RunHistory:
    """Return the history of a run, including its checkpoints.

    Args:
        run_dir: Its directory.
        journal: Its journal, if it has been read already.
        trust_run: As of `open_run_storage`.

    Logs a warning if the storage does not answer, or lacks all checkpoints that the journal records.

    Raises:
        UserError: The configuration names a store that can't be opened.
        OSError: The journal can't be read.
    """
    storage = open_run_storage(run_dir, trust_run=trust_run)
    journal = read_journal(run_dir) if journal is None else journal
    try:
        left = tuple(open_store(run_dir).list(DIAGNOSTICS_FOLDER))
        history = replace(read_history(run_dir, store=storage.store, journal=journal), diagnostics=left)
        if not any(checkpoint.committed for checkpoint in history.checkpoints):
            committed = commits_that_count(journal.entries, read_lineage(storage.store))
            lost = decide_start({}, (), committed, storage.location).refusal
            if lost is not None:
                _log.warning("%s", lost)
        return history
    except OSError as error:
        _log.warning("the checkpoints in %s can't be listed (%s)", storage.location, error.strerror or error)
        return build_history(name=run_dir.absolute().name, journal=journal, owner=current_owner(run_dir))


def open_run_storage(run_dir: Place, *, trust_run: bool = False) -> RunStorage:
    """Return the checkpoint store of a run; checkpoints in its directory move with it.

    If its configuration can't be read, a warning is logged, and the store is the run's directory.

    Args:
        run_dir: The run's directory.
        trust_run: Whether its file of secrets and its servers are used.

    Raises:
        UserError: The configuration names a store that can't be opened, or on a server that only it names.
    """
    config, file = None, run_dir / CONFIG_FILE
    try:
        config = stored_config(run_dir, trust_run=trust_run) if is_file(file) else None
    except ConfigError as error:
        problem = error.problems[0] if error.problems else error
        _log.warning("%s can't be read (%s): checkpoints are searched in its folder", file, problem)
    if config is None:
        return RunStorage(store=open_store(run_dir), location=str(run_dir.absolute()), config=None)
    location = stored_checkpoints(config, run_dir, trust_run=trust_run)
    return RunStorage(store=open_store(location), location=location, config=config)
