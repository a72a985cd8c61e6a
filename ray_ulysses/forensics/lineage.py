"""The lineage of a run's data: the segments of its plan, each an edit of the one before."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ray_ulysses.data.plan.plan_files import has_plan, load_plan
from ray_ulysses.errors import UserError
from ray_ulysses.run_names import PLAN_FOLDER


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRecord:
    """One corpus of a segment.

    Attributes:
        path: Where it was when the segment was planned.
        weight: Its share of an epoch's tokens relative to the others; None where all of it is taken.
    """

    path: str
    weight: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRecord:
    """One segment of a plan.

    Attributes:
        plan_id: Its id.
        segment: Its number, from 0.
        base_step: Steps completed before its first.
        base_row: Rows trained on before its first.
        context_tokens: Longest sequence.
        rows_per_step: Rows of a global batch.
        packing: How rows are filled.
        sources: Its corpora.
    """

    plan_id: str
    segment: int
    base_step: int
    base_row: int
    context_tokens: int
    rows_per_step: int
    packing: str
    sources: tuple[SourceRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """Every segment of a run's plan.

    Attributes:
        segments: In order; empty where there is no plan, or it can't be read.
        problem: Why it can't be read; None where it can, or where there is none.
    """

    segments: tuple[SegmentRecord, ...] = ()
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the keys that it adds to ``ray-ulysses inspect RUN --json``."""
        fields: dict[str, Any] = {"plan": [asdict(segment) for segment in self.segments]}
        return fields if self.problem is None else {**fields, "plan_problem": self.problem}


def read_lineage(run_dir: Path) -> Lineage:
    """Return the lineage of a run's data; a plan that can't be read hides nothing else of the run."""
    try:
        if not has_plan(run_dir / PLAN_FOLDER):
            return Lineage()
        plan = load_plan(run_dir / PLAN_FOLDER)
    except (UserError, OSError) as error:
        return Lineage(problem=str(error))
    return Lineage(
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
            )
            for number, segment in enumerate(plan.segments)
        )
    )
