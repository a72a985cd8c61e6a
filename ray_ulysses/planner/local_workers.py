"""Checks whether one machine's memory holds all workers, by the measured size of a process and the plan's estimate."""

from __future__ import annotations

from ray_ulysses.config import Config
from ray_ulysses.config.running import WorkerLimits
from ray_ulysses.config.stages import stage_configs
from ray_ulysses.errors import Problem
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.memory import configured_memory
from ray_ulysses.planner.memory_terms import GIB

RAY_BYTES = 2 * GIB
"""Ray's own processes, those of Ray Train and of the data stream: 2.0 GiB of unshared pages with Ray 2.60."""
WORKER_BYTES = GIB // 2
"""A worker's process with its libraries and a tiny model: 0.50 GiB of unshared pages with torch 2.13 on a CPU."""


def local_bytes(config: Config, shape: ModelShape) -> int:
    """Return the memory of a local Ray with all workers of a run on this machine, in the stage that takes the most."""
    has_gpu = config.cluster.gpus_per_worker > 0
    memories = [configured_memory(own, shape) for own in stage_configs(config)]
    most = max(memory.host_bytes + (0 if has_gpu else memory.device_bytes) for memory in memories)
    return RAY_BYTES + config.cluster.workers.max * (WORKER_BYTES + most)


def local_problem(config: Config, shape: ModelShape, free_bytes: int) -> Problem | None:
    """Return the problem of a machine that can't hold a run's workers; ``None`` if it can.

    Args:
        config: The run's configuration.
        shape: The model's shape.
        free_bytes: Memory that the run may take.
    """
    needed, workers = local_bytes(config, shape), config.cluster.workers.max
    if needed <= free_bytes:
        return None
    each = (needed - RAY_BYTES) / workers
    rule = (
        f"takes {needed / GIB:.1f} GiB of this machine's memory, of which {max(0, free_bytes) / GIB:.1f} GiB are free: "
        f"{RAY_BYTES / GIB:.1f} for Ray and {each / GIB:.2f} for each worker, by the plan's estimate"
    )
    fitting = _most_that_fit(config, shape, free_bytes)
    if fitting:
        hint = f"use {fitting}, which fits (a run can resume with any number), or a cluster (cluster.address)"
    else:
        hint = "free memory, use a smaller model or context, or a cluster (cluster.address)"
    return Problem(path="cluster.workers", value=workers, rule=rule, hint=hint)


def gpu_problem(config: Config, num_gpus: int) -> Problem | None:
    """Return the problem of a machine with too few GPUs for a run's workers; ``None`` if it has enough."""
    least, sp_size = config.cluster.workers.min, config.parallel.sp_size
    if config.cluster.gpus_per_worker == 0 or least <= num_gpus:
        return None
    fitting = num_gpus // sp_size * sp_size
    fewer = f"use cluster.workers={fitting} (a run can resume with any number)," if fitting else "set 0 for CPUs,"
    return Problem(
        path="cluster.gpus_per_worker",
        value=config.cluster.gpus_per_worker,
        rule=f"takes {least} GPUs for cluster.workers={least}, and torch finds {num_gpus} on this machine",
        hint=f"{fewer} or use a cluster (cluster.address)",
    )


def _most_that_fit(config: Config, shape: ModelShape, free_bytes: int) -> int:
    """Return the largest number of workers that fits, a multiple of ``parallel.sp_size``; 0 if there is none."""
    sp_size = config.parallel.sp_size
    # More processes than this do not fit even without a model.
    most = min(config.cluster.workers.max - 1, max(0, free_bytes - RAY_BYTES) // WORKER_BYTES)
    for workers in range(most // sp_size * sp_size, 0, -sp_size):
        limits = WorkerLimits(min=workers, max=workers)
        fewer = config.model_copy(update={"cluster": config.cluster.model_copy(update={"workers": limits})})
        if local_bytes(fewer, shape) <= free_bytes:
            return workers
    return 0
