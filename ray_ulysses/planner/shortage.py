"""Compares the memory that a step ran out of with the plan's, and finds settings that need less."""

from __future__ import annotations

from collections.abc import Iterator

from ray_ulysses.config import Config
from ray_ulysses.config.stages import stage_config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.configured import configured_memory, fits
from ray_ulysses.planner.fit import found, is_allowed, leaner, with_settings
from ray_ulysses.planner.memory_terms import GIB
from ray_ulysses.planner.problems import entry
from ray_ulysses.planner.settings import allowed_sp, pad_multiple

_LESS = 0.9
"""Share of the planned memory that settings may take, where the plan was too low: a tenth less makes a difference."""


def shortage(
    config: Config, shape: ModelShape, peak_gib: float, what: str, *, stage: int = 0, is_on_host: bool = False
) -> str:
    """Return what was planned and measured, the largest terms, and the nearest settings that need less (pure).

    What was measured is all that there was. Settings have to fit into that, and where the plan was lower than that,
    need a tenth less than was planned. Only the stage that failed is held against it.

    Args:
        config: The configuration of the whole run, which is what options change.
        shape: The model.
        peak_gib: Measured peak of the process before it failed, in GiB.
        what: What is measured, such as ``allocated``.
        stage: Number of the stage that failed, from 0.
        is_on_host: Whether the host's memory ran out beside a device.
    """
    memory = configured_memory(stage_config(config, stage), shape)
    terms, needed = (memory.host, memory.host_bytes) if is_on_host else (memory.device, memory.device_bytes)
    planned_gib = needed / GIB
    largest = sorted((term for term in terms if term.phase != "load"), key=lambda one: -one.bytes)[:3]
    said = ", ".join(f"{one.name} {one.bytes / GIB:.3g}" for one in largest)
    limited = "memory.host_gib" if is_on_host else "memory.device_gib"
    limit = with_settings(config, {limited: min(peak_gib, _LESS * planned_gib)})
    return (
        f"{peak_gib:.3g} GiB were {what} at its peak, {planned_gib:.3g} planned (largest: {said} GiB); "
        f"{_way_out(limit, shape, stage)}"
    )


def _way_out(limit: Config, shape: ModelShape, stage: int) -> str:
    """Return the nearest settings that need less, with more ranks per row of the stage where nothing else helps."""
    options = _nearest(limit, shape, stage)
    if options is not None:
        return f"the nearest settings that need less: {options}"
    for size, wider in _wider(limit, shape, stage):
        options = _nearest(wider, shape, stage)
        if options is not None:
            options = f"--set {entry(limit, stage)}.sp_size={size} {options}".rstrip()
            return f"the nearest settings that need less, on a branch of the run (--branch): {options}"
    return (
        f"use more workers, a smaller {entry(limit, stage)}.context_tokens or a smaller model, for no setting needs a "
        "tenth less on these workers"
    )


def _nearest(limit: Config, shape: ModelShape, stage: int) -> str | None:
    """Return the options of the cheapest changes with which a stage fits on the configured workers; None if none do."""
    for candidate in sorted(leaner(limit, shape), key=lambda one: one.cost):
        changed = with_settings(limit, candidate.settings)
        own = stage_config(changed, stage)
        if fits(own, configured_memory(own, shape)) and is_allowed(limit, changed):
            return found(limit, shape, candidate.settings).options()
    return None


def _wider(config: Config, shape: ModelShape, number: int) -> Iterator[tuple[int, Config]]:
    """Yield each larger sp size that a stage with one of its own may have without another data plan, ascending."""
    own = config.stages[number].sp_size if config.stages else None
    for size in allowed_sp(config, shape):
        if own is None or size <= own:
            continue
        wider = config.stages[number].model_copy(update={"sp_size": size})
        stages = tuple(wider if place == number else stage for place, stage in enumerate(config.stages))
        changed = config.model_copy(update={"stages": stages})
        if is_allowed(config, changed) and pad_multiple(changed, shape) == pad_multiple(config, shape):
            yield size, changed
