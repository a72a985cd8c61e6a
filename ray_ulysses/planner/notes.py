"""Finds settings that are valid but may be unintended."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ray_ulysses.config import Config
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.model_shape import ModelShape


def plan_notes(config: Config, shape: ModelShape, plan: Plan | None) -> tuple[str, ...]:
    """Return notes on settings of a run that may be unintended.

    Args:
        config: The run's configuration.
        shape: The model.
        plan: Its data plan; None if there is no corpus yet.
    """
    notes = [*_layout_notes(config), *_start_notes(config)]
    if plan is not None:
        notes += [*_data_notes(config, plan), *_checkpoint_notes(config, plan)]
    if not shape.is_exact:
        notes.append(f"the parameter count of model_type {shape.model_type!r} is an estimate")
    return tuple(notes)


def _layout_notes(config: Config) -> Iterator[str]:
    rows, dp_size = config.data.rows_per_step, config.dp_size
    if rows % dp_size:
        slots = -(-rows // dp_size) * dp_size
        yield (
            f"{dp_size} data-parallel groups do not divide data.rows_per_step={rows}: {slots - rows} of "
            f"{slots} row slots per step are idle; the loss is the same"
        )


def _start_notes(config: Config) -> Iterator[str]:
    model = config.model
    if model.resume_from is None and model.resume_state != "all":
        yield (
            f"model.resume_state={model.resume_state} is ignored, since model.resume_from is null: the run starts from "
            f"what model.init={model.init} gives"
        )


def _data_notes(config: Config, plan: Plan) -> Iterator[str]:
    horizon = config.schedule.horizon_steps or plan.num_steps
    if config.schedule.warmup_steps >= horizon:
        yield (
            f"schedule.warmup_steps={config.schedule.warmup_steps} reaches the horizon of {horizon} steps: "
            "the learning rate never decays after its warm-up"
        )
    num_empty = plan.newest.unsupervised_steps()
    if num_empty:
        yield (
            f"{num_empty} steps have no supervised token: they only apply momentum and decay; use more "
            "data.rows_per_step, or leave documents with long prompts out"
        )
    if plan.newest.branch is not None and plan.newest.stage is None and config.schedule.horizon_steps is None:
        before = plan.segments[-2].end_step
        yield (
            f"schedule.horizon_steps is null, so the learning rate's horizon moves from step {before:,} to "
            f"{plan.num_steps:,} at step {plan.newest.base_step:,}, and the rate jumps with it"
        )


def _checkpoint_notes(config: Config, plan: Plan) -> Iterator[str]:
    checkpoint, evaluation = config.checkpoint, config.run.eval_every_steps
    every = checkpoint.every_steps
    last_step = min(config.run.stop_step or plan.num_steps, plan.num_steps)
    # A run that is shorter than its interval and saves at its end is fine.
    is_rare = every is None if checkpoint.save_at_end else every is None or every > last_step
    if checkpoint.every_minutes is None and is_rare:
        when = "only at its end" if checkpoint.save_at_end else "only on demand"
        yield (
            f"checkpoint.every_steps={every if every is not None else 'null'} and checkpoint.every_minutes=null up to "
            f"step {last_step:,}: the run saves {when}, and a failure before that loses all progress"
        )
    if checkpoint.keep_best == 0 or checkpoint.best_metric != "eval_loss" or evaluation is None:
        return
    if every is None or (every % evaluation and evaluation % every):
        meet = "only by chance" if every is None else f"every {math.lcm(every, evaluation):,} steps"
        yield (
            f"run.eval_every_steps={evaluation} and checkpoint.every_steps={every if every is not None else 'null'} "
            f"fall on one step {meet}: checkpoint.keep_best={checkpoint.keep_best} chooses among those checkpoints "
            "alone; let one divide the other"
        )
