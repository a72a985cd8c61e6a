"""From a run's configuration and its model's shape to the settings of the data plan."""

from __future__ import annotations

import math

from ray_ulysses.config import Config
from ray_ulysses.data import PlanSettings
from ray_ulysses.model_shape import ModelShape


def pad_multiple(config: Config, shape: ModelShape) -> int:
    """Return what every row's length is a multiple of, for the whole run.

    The least common multiple of ``parallel.allowed_sp``; without it, of every sp size that the heads allow, so that
    a run may be resumed with any of them.
    """
    return math.lcm(*(config.parallel.allowed_sp or shape.valid_sp_sizes()))


def plan_settings(config: Config, shape: ModelShape) -> PlanSettings:
    """Return what the data plan of a run is made with."""
    return PlanSettings(
        seed=config.run.seed,
        context_tokens=config.data.context_tokens,
        pad_multiple=pad_multiple(config, shape),
        rows_per_step=config.data.rows_per_step,
        epochs=config.data.epochs,
        eval_fraction=config.data.eval_fraction,
        eval_rows=config.data.eval_rows,
    )
