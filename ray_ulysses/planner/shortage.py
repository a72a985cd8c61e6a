"""Compares the memory that a step ran out of with the plan's, and finds settings that need less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ray_ulysses.config import Config
from ray_ulysses.config.stages import stage_config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.memory import MemoryEstimate, at_peak, configured_memory, fits
from ray_ulysses.planner.memory_terms import GIB, MemoryTerm
from ray_ulysses.planner.problems import WORKER_BYTES, entry
from ray_ulysses.planner.search import cheapest, found, is_allowed, leaner, with_settings
from ray_ulysses.planner.settings import allowed_sp, pad_multiple

_LESS = 0.9
"""Share of the planned memory that settings may take, where the plan was too low: a tenth less makes a difference."""

Place = Literal["device", "host", "process"]
"""Where memory ran out: on a device, on the host beside one, or in a process that trains on the host."""


def shortage(
    config: Config, shape: ModelShape, peak_gib: float, what: str, *, stage: int = 0, place: Place = "device"
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
        place: Where the memory ran out.
    """
    terms, needed = _needed(configured_memory(stage_config(config, stage), shape), place)
    planned_gib = needed / GIB
    largest = sorted(terms, key=lambda one: -one.bytes)[:3]
    said = ", ".join(f"{one.name} {one.bytes / GIB:.3g}" for one in largest)
    most_bytes = min(peak_gib, _LESS * planned_gib) * GIB
    search = _Search(shape=shape, stage=stage, place=place, most_bytes=most_bytes)
    return (
        f"{peak_gib:.3g} GiB were {what} at its peak, {planned_gib:.3g} planned (largest: {said} GiB); "
        f"{search.way_out(config)}"
    )


def _needed(memory: MemoryEstimate, place: Place) -> tuple[tuple[MemoryTerm, ...], int]:
    """Return the terms that are allocated at the peak of a place, and the bytes of all that is measured there."""
    if place == "device":
        return at_peak(memory.device), memory.device_bytes
    if place == "host":
        return at_peak(memory.host), memory.host_bytes
    # As `local_bytes` counts it.
    return (*at_peak(memory.device), *at_peak(memory.host)), WORKER_BYTES + memory.device_bytes + memory.host_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Search:
    """Searches settings of a whole run with which the stage that failed needs less, on the configured workers."""

    shape: ModelShape
    stage: int
    """Number of the stage, from 0."""
    place: Place
    """Where the memory ran out."""
    most_bytes: float
    """The most that it may take there."""

    def way_out(self, config: Config) -> str:
        """Return the nearest settings, with more ranks per row of the stage where nothing else helps."""
        options = self._nearest(config)
        if options is not None:
            return f"the nearest settings that need less: {options}"
        where = entry(config, self.stage)
        for size, wider in self._wider(config):
            options = self._nearest(wider)
            if options is not None:
                options = f"--set {where}.sp_size={size} {options}".rstrip()
                return f"the nearest settings that need less, on a branch of the run (--branch): {options}"
        return (
            f"use more workers, a smaller {where}.context_tokens or a smaller model, for no setting needs a tenth less "
            "on these workers"
        )

    def _nearest(self, config: Config) -> str | None:
        """Return the options of the cheapest changes with which the stage fits; None if none do."""
        # Where the host is full, what is on it may come back to the device.
        candidates = leaner(config, self.shape, is_host_full=None if self.place == "device" else True)
        settings = cheapest(candidates, lambda one: self._fits(config, with_settings(config, one)))
        return None if settings is None else found(config, self.shape, settings).options()

    def _fits(self, config: Config, changed: Config) -> bool:
        own = stage_config(changed, self.stage)
        memory = configured_memory(own, self.shape)
        is_enough = fits(own, memory) and _needed(memory, self.place)[1] <= self.most_bytes
        return is_enough and is_allowed(config, changed)

    def _wider(self, config: Config) -> Iterator[tuple[int, Config]]:
        """Yield each larger sp size that a stage with one of its own may have without another data plan, ascending."""
        own = config.stages[self.stage].sp_size if config.stages else None
        for size in allowed_sp(config, self.shape):
            if own is None or size <= own:
                continue
            wider = config.stages[self.stage].model_copy(update={"sp_size": size})
            stages = tuple(wider if number == self.stage else one for number, one in enumerate(config.stages))
            changed = config.model_copy(update={"stages": stages})
            is_same_plan = pad_multiple(changed, self.shape) == pad_multiple(config, self.shape)
            if is_same_plan and is_allowed(config, changed):
                yield size, changed
