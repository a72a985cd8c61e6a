"""Opens what a run has stored: its plan with its history, its corpora at their current paths, and its checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ray_ulysses.checkpoint.fence import read_lineage
from ray_ulysses.config import Config
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
from ray_ulysses.storage import current_owner
from ray_ulysses.storage.place import Place, UnnamedServerError, is_file, open_store, refuse_server
from ray_ulysses.tracking.history import build_history, read_history
from ray_ulysses.tracking.journal_reader import Journal, read_journal

if TYPE_CHECKING:
    from ray_ulysses.storage import Store
    from ray_ulysses.tracking.history import RunHistory

_log = get_logger(__name__)

DATA_ERRORS = (UlyssesError, OSError)
"""Raised for a plan or a corpus that is missing, damaged or away."""


def open_plan(run_dir: Place, argument: str = "RUN") -> Plan:
    """Return the plan of a run.

    Args:
        run_dir: The run's directory.
        argument: Its name on the command line, for the text of an error.

    Raises:
        UserError: There is none yet, or it can't be read.
    """
    folder = run_dir / PLAN_FOLDER
    plan = load_plan_if_any(folder)
    if plan is None:
        raise UserError(
            f"{argument}={str(run_dir)!r}: has no data plan yet ({folder} holds none); `ray-ulysses train` writes "
            "it before the first step"
        )
    return plan


def find_sources(
    run_dir: Place, plan: Plan, given: Sequence[Place] = (), *, trust_run: bool = False
) -> tuple[PlannedSource, ...]:
    """Return the plan's corpora at their current paths.

    A corpus is searched in ``given``, then at its planned path, then at the paths in the run's configuration, which a
    resume keeps up to date.

    Args:
        run_dir: The run's directory.
        plan: Its plan.
        given: Directories of corpora, identified by their content.
        trust_run: Whether corpora are looked for on servers that only the run names.

    Raises:
        UserError: One of ``given`` can't be opened, or is not in the plan; or only the run names a corpus's server.
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
                f"--corpus {path}: holds corpus {fingerprint}, which is not in the plan: {known}; give the "
                "current directory of one of those"
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
    """Return the error for a corpus on a server that only the run names."""
    try:
        refuse_server(path, f"a corpus of {run_dir / PLAN_FOLDER}", (run_dir,))
    except UnnamedServerError as error:
        return error
    except UserError:
        pass  # Reported where it is opened.
    return None


def _is_there(path: str) -> bool:
    try:
        return corpus_exists(path)
    except (UserError, RunError):
        # Reported where it is opened.
        return True


def _fingerprint_or_none(path: str) -> str | None:
    try:
        return Corpus.open(path).fingerprint
    except (UserError, RunError):
        # Not a missing corpus; those are reported by their own paths.
        return None


def _configured(run_dir: Place) -> tuple[str, ...]:
    """Return the corpora in the run's configuration; none if it can't be read."""
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
    """Return the data of a run; None if it has no plan.

    Raises:
        UserError: The plan can't be read; the text is only the reason.
        UnnamedServerError: As of `find_sources`.
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
    """Return a configuration with the context that a step was planned with, which a branch may have changed since.

    It is returned as it is if there is no plan that can be read.
    """
    try:
        plan = load_plan_if_any(run_dir / PLAN_FOLDER)
    except DATA_ERRORS:
        plan = None
    if plan is None or not 1 <= step <= plan.num_steps:
        return config
    context = plan.segments[plan.segment_of_step(step)].settings.context_tokens
    return config.model_copy(update={"data": config.data.model_copy(update={"context_tokens": context})})


def unreadable_plan(error: Exception) -> UserError:
    """Return the error for a plan that can't be read, without the hint, which is for training."""
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
    """One corpus of a segment."""

    path: str
    """Its path when the segment was planned."""
    weight: float | None
    """Its share of an epoch's tokens relative to the others; None if all of it is used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRecord:
    """One segment of a plan."""

    plan_id: str
    """Id of the segment."""
    segment: int
    """Its number, from 0."""
    base_step: int
    """Steps completed before its first."""
    base_row: int
    """Rows trained on before its first."""
    context_tokens: int
    """Tokens of the longest row."""
    rows_per_step: int
    """Rows of a global batch."""
    packing: str
    """The packing method."""
    sources: tuple[SourceRecord, ...]
    """Its corpora."""
    stage: str | None = None
    """Name of its stage, or the stage's number from 0 where the configuration does not tell; None in a run without
    stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanHistory:
    """Every segment of a run's plan."""

    segments: tuple[SegmentRecord, ...] = ()
    problem: str | None = None
    """Why it can't be read; None otherwise."""

    def to_json(self) -> dict[str, Any]:
        """Return its keys in ``ray-ulysses inspect RUN --json``."""
        fields: dict[str, Any] = {"plan": [asdict(segment) for segment in self.segments]}
        return fields if self.problem is None else {**fields, "plan_problem": self.problem}


def read_plan_history(run_dir: Place) -> PlanHistory:
    """Return the history of a run's data plan; a plan that can't be read is reported as its problem."""
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
                stage=None if segment.stage is None else names.get(segment.stage_number, str(segment.stage_number)),
            )
            for number, segment in enumerate(plan.segments)
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStorage:
    """The checkpoint store of a run."""

    store: Store
    location: str
    config: Config | None
    """The run's configuration; None if its directory has none that can be read."""


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
