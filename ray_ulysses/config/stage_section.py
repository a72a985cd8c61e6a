"""Settings of a stage of a run, such as those of a context extension."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ray_ulysses.config.learning import RopeSection, ScheduleSection, SourceSection
from ray_ulysses.config.section import PlacePath, Section

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class StageSection(Section):
    """One stage; what it does not set is as in the other sections."""

    name: str = Field(pattern=_NAME, max_length=64)
    """Name of the stage, in reports, the journal and MLflow."""

    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the stage. Every stage but the last needs this or `tokens`. Default null: the last stage
    trains what is left of the planned data."""

    tokens: int | None = Field(default=None, ge=1)
    """Tokens of documents after which the stage ends, with the step that reaches them. Default null."""

    context_tokens: int | None = Field(default=None, ge=2)
    """Maximum length of a row, at most `data.context_tokens`, which is the longest of the run. Default null: that
    one."""

    rows_per_step: int | None = Field(default=None, ge=1, le=65_536)
    """Global batch of one step, in rows. Default null: `data.rows_per_step`."""

    sp_size: int | None = Field(default=None, ge=1)
    """Ranks that share a row: a divisor of `parallel.sp_size`, which is the largest of the run. Default null: that
    one."""

    path: PlacePath | None = None
    """The stage's corpus, in place of `data.path` and `data.sources`. Default null: those."""

    sources: tuple[SourceSection, ...] | None = Field(default=None, strict=False, min_length=1)
    """The stage's corpora and their weights, in place of `data.path` and `data.sources`. Default null: those."""

    rope: RopeSection | Literal["unchanged"] | None = None
    """Rotary positions, as in `model.rope`. Default null: `model.rope`."""

    lr: float | None = Field(default=None, gt=0.0)
    """Peak learning rate. Default null: `optimizer.lr`."""

    schedule: ScheduleSection | None = None
    """A schedule of the stage's own: its steps are counted from the stage's first, and its horizon is the stage's last
    step unless it says another. Default null: the run's `schedule`, which goes on over the stages."""

    optimizer: Literal["keep", "reset"] = "keep"
    """AdamW's moments at the beginning of the stage: those of the stage before, or zero. Default `keep`."""
