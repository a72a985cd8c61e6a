"""Derives the stages of a run from its configuration and data plan, for the planner and for training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ray_ulysses.config import Config
from ray_ulysses.config.stages import stage_config
from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.segment import PlanSettings, StageLength
from ray_ulysses.data.plan.stages import StagePlan
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.settings import plan_settings

_STAND_IN_STEPS = 20
_MOST_DOCUMENTS = 1_000_000
_SHORTEST, _LONGEST = 1 / 64, 2.0
_MOST_TOKENS = 2**32 - 1


def stage_plans(config: Config, shape: ModelShape, settled: PlanSettings | None = None) -> tuple[StagePlan, ...]:
    """Return the inputs of each stage's data plan. A run without stages is treated as a single stage.

    For ``settled``, see `plan_settings`.
    """
    run = plan_settings(config, shape, settled)
    if not config.stages:
        shares, validation = config.data_sources, config.data.validation
        return (StagePlan(name="", settings=run, shares=shares, length=None, validation=validation),)
    stages = []
    for number, stage in enumerate(config.stages):
        own = stage_config(config, number)
        settings = replace(plan_settings(own, shape, settled), pad_multiple=run.pad_multiple)
        length = StageLength(number=number, steps=stage.steps, tokens=stage.tokens)
        shares, validation = own.data_sources, config.data.validation
        stages.append(
            StagePlan(name=stage.name, settings=settings, shares=shares, length=length, validation=validation)
        )
    return tuple(stages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of a run, with the steps in which it is trained. A run without stages has a single stage."""

    number: int
    name: str
    """Name of the stage; empty in a run without stages."""
    config: Config
    """Configuration that applies in the stage."""
    run_config: Config
    plan: Plan
    """Data plan of the run up to the end of the stage."""
    first_step: int
    """Number of the run's optimizer steps before the stage."""
    run_plan: Plan
    is_last: bool
    schedule: str
    """Path of the section that defines the stage's learning rate schedule."""
    schedule_start: int
    """Number of the run's steps before the schedule starts."""
    begins_anew: bool
    """Whether the optimizer's moments are reset at the start of the stage."""

    def schedule_end(self, step: int) -> int:
        """Return the step at which the schedule ends, for a schedule without a horizon.

        The result is the end that was planned when ``step`` was trained, even if a branch changed the plan later.
        """
        is_shared = self.schedule == "schedule"
        return self.run_plan.run_end(step) if is_shared else self.plan.stage_end(step)

    @property
    def ends_the_run(self) -> bool:
        """Whether the run stops in this stage or at the end of this stage."""
        stop = self.config.run.stop_step
        return self.is_last or (stop is not None and stop <= self.plan.num_steps)

    @property
    def run_last_step(self) -> int | None:
        """Last step of the run if the run stops in a later stage, or None otherwise."""
        stop = self.config.run.stop_step
        return None if self.ends_the_run else min(stop or self.run_plan.num_steps, self.run_plan.num_steps)


def stage_at(config: Config, plan: Plan, step: int) -> Stage:
    """Return the stage of the step that follows ``step`` completed steps, or the last stage if the run is complete."""
    return _stage(config, plan, plan.stage_of_step(step + 1) if config.stages else 0)


def stages_of(config: Config, plan: Plan) -> Iterator[Stage]:
    """Yield the stages of a run. A run without stages is treated as a single stage."""
    for number in range(max(1, len(config.stages))):
        yield _stage(config, plan, number)


def _stage(config: Config, plan: Plan, number: int) -> Stage:
    if not config.stages:
        return Stage(
            number=0, name="", config=config, run_config=config, plan=plan, first_step=0, run_plan=plan,
            is_last=True, schedule="schedule", schedule_start=0, begins_anew=False,
        )  # fmt: skip
    stage, so_far, first_step = config.stages[number], plan.through_stage(number), plan.stage_start(number)
    has_own = stage.schedule is not None
    return Stage(
        number=number,
        name=stage.name,
        config=stage_config(config, number),
        run_config=config,
        plan=so_far,
        first_step=first_step,
        run_plan=plan,
        is_last=number == len(config.stages) - 1,
        schedule=f"stages.{number}.schedule" if has_own else "schedule",
        schedule_start=first_step if has_own else 0,
        begins_anew=stage.optimizer == "reset" and number > 0,
    )


def stand_in_documents(settings: PlanSettings) -> PlanInput:
    """Return synthetic documents for about `_STAND_IN_STEPS` steps, to plan a run without a prepared corpus.

    The lengths are log-uniform between a 64th of the context and twice the context, so there are rows with many
    documents, rows with a single document, and split documents. The documents depend only on the settings.
    """
    context = settings.context_tokens
    low, high = max(2, int(context * _SHORTEST)), min(int(context * _LONGEST), _MOST_TOKENS)
    mean = (high - low) / np.log(high / low) if high > low else high
    number = int(_STAND_IN_STEPS * settings.rows_per_step * settings.capacity / mean) + settings.rows_per_step
    number = min(number, _MOST_DOCUMENTS)
    drawn = np.exp(np.random.default_rng(settings.seed).uniform(np.log(low), np.log(high), number))
    source = PlannedSource(path="", fingerprint="made-up lengths", num_documents=number)
    return PlanInput(sources=(source,), lengths=drawn.astype(np.uint32), spans=None)
