"""Opens the data of a run: its plan with its history, and its corpora at their current paths."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ray_ulysses.config import Config
from ray_ulysses.config.stages import corpus_paths
from ray_ulysses.data.corpus.corpus import Corpus, corpus_exists
from ray_ulysses.data.plan.corpus_set import PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan_if_any
from ray_ulysses.errors import ConfigError, RunError, UlyssesError, UserError
from ray_ulysses.run.secrets_file import stored_config
from ray_ulysses.run_names import PLAN_FOLDER
from ray_ulysses.storage.place import Place, UnnamedServerError, refuse_server

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
