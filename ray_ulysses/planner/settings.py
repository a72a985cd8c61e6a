"""Derives the parallel layout and the data plan's settings from a run's configuration and its model's shape."""

from __future__ import annotations

import math
from typing import Literal

from ray_ulysses.config import Config
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.layout import ParallelLayout, TileSetting, automatic_ring_size, row_multiple
from ray_ulysses.planner.flops import token_cost


def ring_size(config: Config, shape: ModelShape, sp_size: int | None = None) -> int:
    """Return the ring size: the configured size if it is set and applies to ``sp_size``, otherwise the default."""
    size = sp_size or config.parallel.sp_size
    if config.parallel.ring_size is not None and size == config.parallel.sp_size:
        return config.parallel.ring_size
    return automatic_ring_size(size, shape.num_heads)


def run_layout(config: Config, shape: ModelShape, world_size: int | None = None) -> ParallelLayout:
    """Return a run's layout, by default on the largest configured number of workers."""
    return ParallelLayout(
        world_size=world_size or config.cluster.workers.max,
        sp_size=config.parallel.sp_size,
        ring_size=ring_size(config, shape),
    )


def secondary_size(config: Config) -> int:
    """Return the number of ranks of a node that share secondary shards of the weights; 1 if there are none.

    Smaller groups, of a world with unevenly used nodes, would need more memory than planned and are not used.
    """
    most, per_node = config.cluster.workers.max, config.cluster.gpus_per_node
    return math.gcd(most, per_node) if config.memory.zero_secondary == "node" and most > per_node else 1


def mlp_tile(config: Config) -> TileSetting:
    """Return the tile setting for MLPs, which is ``off`` if ``auto`` does not tile them."""
    return config.memory.mlp_tile if config.memory.tiles_mlps else "off"


def kept_attention(config: Config) -> Literal["both", "kernel", "none"]:
    """Return the layouts of saved attention outputs. An unresolved ``auto`` is treated as ``both``."""
    return "both" if config.memory.attention_output == "auto" else config.memory.attention_output


def allowed_sp(config: Config, shape: ModelShape) -> tuple[int, ...]:
    """Return all ``sp`` sizes that a run may use, in ascending order."""
    own = {config.parallel.sp_size, *(stage.sp_size for stage in config.stages if stage.sp_size is not None)}
    return config.parallel.allowed_sp or tuple(sorted({*shape.level_sp_sizes(), *own}))


def pad_multiple(config: Config, shape: ModelShape) -> int:
    """Return the unit to which rows are padded: every allowed ``sp`` size can shard a multiple of this number."""
    return math.lcm(*(row_multiple(size, ring_size(config, shape, size)) for size in allowed_sp(config, shape)))


def fits_rows(config: Config, shape: ModelShape, multiple: int) -> bool:
    """Return whether rows whose lengths are multiples of ``multiple`` can be sharded with the configured layout."""
    return multiple % row_multiple(config.parallel.sp_size, ring_size(config, shape)) == 0


def plan_settings(config: Config, shape: ModelShape, settled: PlanSettings | None = None) -> PlanSettings:
    """Return the settings of a run's data plan.

    ``settled`` contains an existing run's stored settings, whose padding and row costs are used unchanged.
    """
    return PlanSettings(
        seed=config.run.seed,
        context_tokens=config.data.context_tokens,
        pad_multiple=settled.pad_multiple if settled else pad_multiple(config, shape),
        rows_per_step=config.data.rows_per_step,
        epochs=config.data.epochs,
        packing=config.data.packing,
        overlong="drop_whole" if config.objective.needs_whole_documents else config.data.overlong,
        balance_steps=config.data.balance_steps,
        token_cost=settled.token_cost if settled else token_cost(shape),
        eval_fraction=config.data.eval_fraction,
        eval_rows=config.data.eval_rows,
        row_order=config.data.row_order,
    )
