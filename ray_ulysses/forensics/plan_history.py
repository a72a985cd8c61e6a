"""The history of a run's data plan: its segments, each an edit of the previous one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ray_ulysses.data.plan.plan_files import load_plan_if_any
from ray_ulysses.errors import ConfigError, UlyssesError
from ray_ulysses.run.secrets_file import stored_config
from ray_ulysses.run_names import PLAN_FOLDER
from ray_ulysses.storage.place import Place


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRecord:
    """One corpus of a segment."""

    path: str
    weight: float | None
    """Its share of an epoch's tokens relative to the others; None if all of it is used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRecord:
    """One segment of a plan."""

    plan_id: str
    segment: int
    base_step: int
    """Steps completed before its first."""
    base_row: int
    """Rows trained on before its first."""
    context_tokens: int
    rows_per_step: int
    packing: str
    sources: tuple[SourceRecord, ...]
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
    names = _stage_names(run_dir)
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


def _stage_names(run_dir: Place) -> dict[int, str]:
    """Return the names of a run's stages by their numbers; none if its configuration can't be read."""
    try:
        return {number: stage.name for number, stage in enumerate(stored_config(run_dir).stages)}
    except ConfigError:
        return {}
