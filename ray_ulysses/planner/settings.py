"""Derives a run's layout and the settings of its data plan from its configuration and its model's shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ray_ulysses.config import Config
from ray_ulysses.config.stages import stage_config
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.segment import PlanSettings, StageLength
from ray_ulysses.data.plan.stages import StagePlan
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.layout import ParallelLayout, automatic_ring_size, row_multiple
from ray_ulysses.parallel.tiles import TileSetting
from ray_ulysses.planner.flops import token_cost


def ring_size(config: Config, shape: ModelShape, sp_size: int | None = None) -> int:
    """Return the ring size of an sp size: the configured one for ``parallel.sp_size``, else an automatic one."""
    size = sp_size or config.parallel.sp_size
    if config.parallel.ring_size is not None and size == config.parallel.sp_size:
        return config.parallel.ring_size
    return automatic_ring_size(size, shape.num_heads)


def run_layout(config: Config, shape: ModelShape, world_size: int | None = None) -> ParallelLayout:
    """Return the layout of a run.

    Args:
        config: The run's configuration.
        shape: The model.
        world_size: Workers; ``None`` for the configured number.
    """
    return ParallelLayout(
        world_size=world_size or config.cluster.workers.max,
        sp_size=config.parallel.sp_size,
        ring_size=ring_size(config, shape),
    )


def mlp_tile(config: Config) -> TileSetting:
    """Return the tile of the MLPs: without gradient checkpointing, speed was chosen over memory."""
    is_chosen = config.memory.mlp_tile != "auto"
    return config.memory.mlp_tile if is_chosen or config.memory.gradient_checkpointing else "off"


def kept_attention(config: Config) -> Literal["both", "kernel", "none"]:
    """Return what is kept of attention; an `auto` that no plan has decided, which a run's never is, keeps the most."""
    return "both" if config.memory.attention_output == "auto" else config.memory.attention_output


def allowed_sp(config: Config, shape: ModelShape) -> tuple[int, ...]:
    """Return the sp sizes that a run may ever use, ascending."""
    own = {config.parallel.sp_size, *(stage.sp_size for stage in config.stages if stage.sp_size is not None)}
    return config.parallel.allowed_sp or tuple(sorted({*shape.level_sp_sizes(), *own}))


def pad_multiple(config: Config, shape: ModelShape) -> int:
    """Return the multiple to which rows are padded during the whole run, which every allowed sp size divides."""
    return math.lcm(*(row_multiple(size, ring_size(config, shape, size)) for size in allowed_sp(config, shape)))


def fits_rows(config: Config, shape: ModelShape, multiple: int) -> bool:
    """Return whether rows of multiples of ``multiple`` tokens can be sharded as configured."""
    return multiple % row_multiple(config.parallel.sp_size, ring_size(config, shape)) == 0


def plan_settings(config: Config, shape: ModelShape, settled: PlanSettings | None = None) -> PlanSettings:
    """Return the settings of a run's data plan.

    Args:
        config: The run's configuration.
        shape: The model.
        settled: Settings of an existing run, whose padding and row costs never change.
    """
    return PlanSettings(
        seed=config.run.seed,
        context_tokens=config.data.context_tokens,
        pad_multiple=settled.pad_multiple if settled else pad_multiple(config, shape),
        rows_per_step=config.data.rows_per_step,
        epochs=config.data.epochs,
        packing=config.data.packing,
        overlong=config.data.overlong,
        balance_steps=config.data.balance_steps,
        token_cost=settled.token_cost if settled else token_cost(shape),
        eval_fraction=config.data.eval_fraction,
        eval_rows=config.data.eval_rows,
        row_order=config.data.row_order,
    )


def stage_plans(config: Config, shape: ModelShape, settled: PlanSettings | None = None) -> tuple[StagePlan, ...]:
    """Return what the plan of each stage is made of; a run without stages is one.

    Args:
        config: The run's configuration.
        shape: The model.
        settled: Settings of an existing run, whose padding and row costs never change.
    """
    run = plan_settings(config, shape, settled)
    if not config.stages:
        return (StagePlan(name="", settings=run, shares=config.data_sources, length=None),)
    stages = []
    for number, stage in enumerate(config.stages):
        own = stage_config(config, number)
        settings = replace(plan_settings(own, shape, settled), pad_multiple=run.pad_multiple)
        length = StageLength(number=number, steps=stage.steps, tokens=stage.tokens)
        stages.append(StagePlan(name=stage.name, settings=settings, shares=own.data_sources, length=length))
    return tuple(stages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage as its attempts train it; a run without stages is one.

    Attributes:
        number: Its number, from 0.
        name: Its name; empty in a run without stages.
        config: The configuration that holds in it.
        plan: The run's plan up to its end.
        first_step: Optimizer steps of the run before its first.
        is_last: Whether no stage follows it.
        schedule_start: Steps of the run before those of its schedule.
        schedule_end: Step of the run at which its schedule ends, if it names no horizon; None for that of the plan.
        begins_anew: Whether it begins with an optimizer without moments.
    """

    number: int
    name: str
    config: Config
    plan: Plan
    first_step: int
    is_last: bool
    schedule_start: int
    schedule_end: int | None
    begins_anew: bool

    @property
    def ends_the_run(self) -> bool:
        """Whether the run stops in it, or with it."""
        stop = self.config.run.stop_step
        return self.is_last or (stop is not None and stop <= self.plan.num_steps)


def stage_at(config: Config, plan: Plan, step: int) -> Stage:
    """Return the stage that a run is in after ``step`` completed steps: that of the next one, or the last.

    Args:
        config: The run's configuration.
        plan: The run's whole plan.
        step: Completed steps.
    """
    if not config.stages:
        return Stage(
            number=0, name="", config=config, plan=plan, first_step=0, is_last=True,
            schedule_start=0, schedule_end=None, begins_anew=False,
        )  # fmt: skip
    number = plan.stage_of_step(step + 1)
    stage, cut, first_step = config.stages[number], plan.through_stage(number), plan.stage_start(number)
    has_own = stage.schedule is not None
    return Stage(
        number=number,
        name=stage.name,
        config=stage_config(config, number),
        plan=cut,
        first_step=first_step,
        is_last=number == len(config.stages) - 1,
        schedule_start=first_step if has_own else 0,
        schedule_end=cut.num_steps if has_own else plan.num_steps,
        begins_anew=stage.optimizer == "reset" and number > 0,
    )


def stages_of(config: Config, plan: Plan) -> Iterator[tuple[Config, Plan]]:
    """Yield the configuration and the plan of each stage of a run, of which one without stages is one."""
    for number in range(max(1, len(config.stages))):
        yield stage_config(config, number), plan.through_stage(number) if config.stages else plan
