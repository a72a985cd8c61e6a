"""Finds settings that are valid but may be unintended."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ray_ulysses.config import Config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.stages import Stage


def plan_notes(config: Config, shape: ModelShape, stage: Stage | None) -> tuple[str, ...]:
    """Return notes on settings of a stage that may be unintended.

    Args:
        config: Its configuration.
        shape: The model.
        stage: The stage as it is planned, the only one of a run without stages; None if there is no corpus yet.
    """
    notes = [*_layout_notes(config), *_start_notes(config)]
    if stage is not None:
        notes += [*_data_notes(config, stage), *_checkpoint_notes(config, stage)]
    if not shape.is_exact:
        notes.append(f"the parameter count of model_type {shape.model_type!r} is an estimate")
    if shape.mixer_layers:
        notes.append(
            f"{shape.mixer_layers} of {shape.num_layers} layers carry state along the sequence: their parameters are "
            "counted, but their activations are estimated as those of attention, and their recurrence is not in FLOPs "
            "and times; measure the peak of memory with `ray-ulysses check`"
        )
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


def _data_notes(config: Config, stage: Stage) -> Iterator[str]:
    plan = stage.plan
    end = plan.num_steps if stage.schedule_end is None else stage.schedule_end
    horizon = config.schedule.horizon_steps or end - stage.schedule_start
    if config.schedule.warmup_steps >= horizon:
        yield (
            f"{stage.schedule}.warmup_steps={config.schedule.warmup_steps} reaches the horizon of {horizon} steps: "
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


def _checkpoint_notes(config: Config, stage: Stage) -> Iterator[str]:
    checkpoint, evaluation = config.checkpoint, config.run.eval_every_steps
    every, last_step = checkpoint.every_steps, stage.plan.num_steps
    last_step = min(config.run.stop_step or last_step, last_step)
    # What is shorter than the interval and saves at its end is fine; a stage that another follows does.
    saves_at_end = checkpoint.save_at_end or not stage.ends_the_run
    is_rare = every is None or (not saves_at_end and last_step // every == stage.first_step // every)
    if checkpoint.every_minutes is None and is_rare:
        what = "stage" if stage.name else "run"
        when = "only at its end" if saves_at_end else "only on demand"
        yield (
            f"checkpoint.every_steps={every if every is not None else 'null'} and checkpoint.every_minutes=null up to "
            f"step {last_step:,}: the {what} saves {when}, and a failure before that loses all progress"
            f"{f' since step {stage.first_step:,}' if stage.first_step else ''}"
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
