"""Opens a run's stored data: its plan and plan history, its corpora at their current paths, and its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.config import Config
from ray_ulysses.config.schema import with_settings
from ray_ulysses.config.stages import corpus_paths
from ray_ulysses.data.corpus.corpus import Corpus, corpus_exists
from ray_ulysses.data.plan.corpus_set import PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan_if_any
from ray_ulysses.errors import ConfigError, RunError, UlyssesError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.run.checkpoint_store import stored_checkpoints
from ray_ulysses.run.secrets_file import stored_config
from ray_ulysses.run.start_point import commits_that_count, decide_start
from ray_ulysses.run_names import CONFIG_FILE, DIAGNOSTICS_FOLDER, PLAN_FOLDER
from ray_ulysses.storage import Store, current_owner
from ray_ulysses.storage.place import Place, UnnamedServerError, is_file, open_store, refuse_server
from ray_ulysses.tracking.history import RunHistory, build_history, read_history
from ray_ulysses.tracking.journal_reader import Journal, read_journal

_log = get_logger(__name__)

DATA_ERRORS = (UlyssesError, OSError)
"""Errors raised if a plan or a corpus is missing, damaged or unavailable."""


def open_plan(run_dir: Place, argument: str = "RUN") -> Plan:
    """Return a run's data plan.

    Args:
        run_dir: The run's directory.
        argument: Name of the command-line argument that specified the directory, for error messages.

    Raises:
        UserError: The run has no plan yet, or the plan can't be read.
    """
    folder = run_dir / PLAN_FOLDER
    plan = load_plan_if_any(folder)
    if plan is None:
        raise UserError(
            f"{argument}={str(run_dir)!r}: the run has no data plan yet (in {folder}); `ray-ulysses train` writes "
            "the plan before the first step"
        )
    return plan


def plan_if_readable(run_dir: Place) -> Plan | None:
    """Return a run's data plan, or None if there is none or it can't be read."""
    with contextlib.suppress(*DATA_ERRORS):
        return load_plan_if_any(run_dir / PLAN_FOLDER)
    return None


def find_sources(
    run_dir: Place, plan: Plan, given: Sequence[Place] = (), *, trust_run: bool = False
) -> tuple[PlannedSource, ...]:
    """Return the plan's corpora at their current paths.

    Each corpus is searched for in ``given``, then at its planned path, then at the paths in the run's configuration,
    which a resume updates.

    Args:
        run_dir: The run's directory.
        plan: The run's plan.
        given: Corpus directories, identified by their content.
        trust_run: Whether to contact servers that are specified only by the run's files.

    Raises:
        UserError: A directory in ``given`` can't be opened or is not in the plan, or an untrusted run specifies a
            corpus on a server.
    """
    sources = {source.fingerprint: source for source in plan.newest.sources}
    found = {}
    for path in given:
        try:
            fingerprint = Corpus.open(str(path)).fingerprint
        except UserError as error:
            raise UserError(f"--corpus {path}: {error}") from error
        if fingerprint not in sources:
            known = "; ".join(f"{source.path} ({source.fingerprint})" for source in plan.newest.sources)
            raise UserError(
                f"--corpus {path}: contains corpus {fingerprint}, which is not in the plan ({known}); specify the "
                "current directory of a planned corpus"
            )
        found[fingerprint] = str(path)
    refusals = {} if trust_run else {source.path: _refusal(source.path, run_dir) for source in sources.values()}
    missing = {
        name
        for name, source in sources.items()
        if name not in found and (refusals.get(source.path) or not _is_there(source.path))
    }
    for place in _configured(run_dir) if missing else ():
        is_allowed = trust_run or _refusal(place, run_dir) is None
        there = _fingerprint_or_none(place) if is_allowed and _is_there(place) else None
        if there is not None and there in missing:
            found[there] = place
    for name, source in sources.items():
        if name not in found and (refusal := refusals.get(source.path)) is not None:
            raise refusal
    return tuple(replace(source, path=found.get(source.fingerprint, source.path)) for source in plan.newest.sources)


def _refusal(path: str, run_dir: Place) -> UnnamedServerError | None:
    """Return an error if the corpus is on a server that only the run's files specify, otherwise None."""
    try:
        refuse_server(path, f"a corpus of {run_dir / PLAN_FOLDER}", (run_dir,))
    except UnnamedServerError as error:
        return error
    except UserError:
        pass  # Opening the corpus reports this error.
    return None


def _is_there(path: str) -> bool:
    try:
        return corpus_exists(path)
    except (UserError, RunError):
        # Opening the corpus reports this error.
        return True


def _fingerprint_or_none(path: str) -> str | None:
    try:
        return Corpus.open(path).fingerprint
    except (UserError, RunError):
        # This path is only a guess for a missing corpus, which is reported with its planned path.
        return None


def _configured(run_dir: Place) -> tuple[str, ...]:
    """Return the corpus paths in the run's configuration; empty if the configuration can't be read."""
    try:
        return corpus_paths(stored_config(run_dir))
    except ConfigError:
        return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedData:
    """A run's plan, and its corpora at their current paths."""

    plan: Plan
    sources: tuple[PlannedSource, ...]


def planned_data(run_dir: Place, *, trust_run: bool = False) -> PlannedData | None:
    """Return a run's plan and corpora, or None if the run has no plan.

    Raises:
        UserError: The plan can't be read. The message contains no advice.
        UnnamedServerError: See `find_sources`.
    """
    try:
        plan = load_plan_if_any(run_dir / PLAN_FOLDER)
        if plan is None:
            return None
        return PlannedData(plan=plan, sources=find_sources(run_dir, plan, trust_run=trust_run))
    except UnnamedServerError:
        raise
    except DATA_ERRORS as error:
        raise unreadable_plan(error) from error


def with_planned_context(config: Config, run_dir: Place, step: int) -> Config:
    """Set ``data.context_tokens`` to the value that a step was planned with, before any later branch of the plan.

    If there is no readable plan, the configuration is returned unchanged.
    """
    plan = plan_if_readable(run_dir)
    if plan is None or not 1 <= step <= plan.num_steps:
        return config
    context = plan.segments[plan.segment_of_step(step)].settings.context_tokens
    return with_settings(config, {"data.context_tokens": context})


def unreadable_plan(error: Exception) -> UserError:
    """Return an error for a plan that can't be read, without the original advice, which applies to training."""
    if isinstance(error.__cause__, OSError) and error.__cause__.filename:
        error = error.__cause__
    if isinstance(error, OSError):
        reason = f"{error.filename or PLAN_FOLDER}: {error.strerror or error}"
    else:
        text = " ".join(str(error).split())
        reason = text.rpartition("; ")[0] or text
    return UserError(f"the run's data plan can't be read ({reason})")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRecord:
    """A corpus of a plan segment."""

    path: str
    """Path of the corpus when the segment was planned."""
    weight: float | None
    """Weight of the corpus in the data mix; None if all of its tokens are used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRecord:
    """A segment of a data plan."""

    plan_id: str
    """Id of the segment."""
    segment: int
    """Index of the segment, starting at 0."""
    base_step: int
    """Number of completed steps at which the segment begins."""
    base_row: int
    """Index of the segment's first row in the run."""
    context_tokens: int
    """Maximum number of tokens in a row."""
    rows_per_step: int
    """Number of rows in a global batch."""
    packing: str
    """Method that packed the documents into rows (`data.packing`)."""
    sources: tuple[SourceRecord, ...]
    """Corpora of the segment."""
    validation: tuple[str, ...] = ()
    """Paths of the validation corpora when the segment was planned."""
    stage: str | None = None
    """Name of the segment's stage, or its index if the configuration can't be read; None in a run without stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanHistory:
    """The segments of a run's data plan."""

    segments: tuple[SegmentRecord, ...] = ()
    problem: str | None = None
    """Reason why the plan can't be read, or None if it can be read."""

    def to_json(self) -> dict[str, Any]:
        """Return the plan's entries in the output of ``ray-ulysses inspect RUN --json``."""
        fields: dict[str, Any] = {"plan": [asdict(segment) for segment in self.segments]}
        return fields if self.problem is None else {**fields, "plan_problem": self.problem}


def read_plan_history(run_dir: Place) -> PlanHistory:
    """Return the history of a run's data plan. If the plan can't be read, the result has a `problem`."""
    try:
        plan = load_plan_if_any(run_dir / PLAN_FOLDER)
    except (UlyssesError, OSError) as error:
        return PlanHistory(problem=str(error))
    if plan is None:
        return PlanHistory()
    names = {}
    with contextlib.suppress(ConfigError):
        names = {number: stage.name for number, stage in enumerate(stored_config(run_dir).stages)}
    return PlanHistory(
        segments=tuple(
            SegmentRecord(
                plan_id=segment.plan_id,
                segment=number,
                base_step=segment.base_step,
                base_row=segment.base_row,
                context_tokens=segment.settings.context_tokens,
                rows_per_step=segment.settings.rows_per_step,
                packing=segment.settings.packing,
                sources=tuple(SourceRecord(path=source.path, weight=source.weight) for source in segment.sources),
                validation=tuple(source.path for source in segment.validation),
                stage=None if segment.stage is None else names.get(segment.stage_number, str(segment.stage_number)),
            )
            for number, segment in enumerate(plan.segments)
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStorage:
    """A run's checkpoint store and configuration."""

    store: Store
    location: str
    config: Config | None
    """The run's configuration; None if it is missing or can't be read."""


def open_run_storage(run_dir: Place, *, trust_run: bool = False) -> RunStorage:
    """Open a run's checkpoint store.

    If the run's configuration can't be read, log a warning and use the run's directory.

    Args:
        run_dir: The run's directory, which may have been moved together with its checkpoints.
        trust_run: Whether to use the secrets file and the servers that the run's configuration specifies.

    Raises:
        UserError: The configured store can't be opened, or an untrusted run specifies a server.
    """
    config, file = None, run_dir / CONFIG_FILE
    try:
        config = stored_config(run_dir, trust_run=trust_run) if is_file(file) else None
    except ConfigError as error:
        problem = error.problems[0] if error.problems else error
        _log.warning("%s can't be read (%s); looking for checkpoints in the run's directory", file, problem)
    if config is None:
        return RunStorage(store=open_store(run_dir), location=str(run_dir.absolute()), config=None)
    location = stored_checkpoints(config, run_dir, trust_run=trust_run)
    return RunStorage(store=open_store(location), location=location, config=config)


def read_run(run_dir: Place, journal: Journal | None = None, *, trust_run: bool = False) -> RunHistory:
    """Return the history of a run, including its checkpoints.

    Logs a warning if the storage is unavailable, or contains none of the checkpoints that the journal lists.

    Args:
        run_dir: The run's directory.
        journal: The run's journal, if it has already been read.
        trust_run: See `open_run_storage`.

    Raises:
        UserError: The configured store can't be opened.
        OSError: The journal can't be read.
    """
    storage = open_run_storage(run_dir, trust_run=trust_run)
    journal = read_journal(run_dir) if journal is None else journal
    try:
        left = tuple(open_store(run_dir).list(DIAGNOSTICS_FOLDER))
        history = replace(read_history(run_dir, store=storage.store, journal=journal), diagnostics=left)
        if not any(checkpoint.committed for checkpoint in history.checkpoints):
            committed = commits_that_count(journal.entries, read_lineage(storage.store))
            if (lost := decide_start({}, (), committed, storage.location).refusal) is not None:
                _log.warning("%s", lost)
        return history
    except OSError as error:
        _log.warning("the checkpoints in %s can't be listed (%s)", storage.location, error.strerror or error)
        return build_history(name=run_dir.absolute().name, journal=journal, owner=current_owner(run_dir))
