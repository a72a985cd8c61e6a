"""Compares a run's layouts: sequence parallelism within or across nodes, rings, and secondary shards of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from ray_ulysses.config import Config
from ray_ulysses.config.schema import with_settings
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.layout import ParallelLayout
from ray_ulysses.planner.memory import MemoryEstimate, run_memory
from ray_ulysses.planner.search import Settings, chosen_settings, fits_with, layouts
from ray_ulysses.planner.settings import run_layout
from ray_ulysses.planner.throughput import StepTime, configured_time, full_rows, seconds_text


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutChoice:
    """A layout with which the run fits, and its estimates."""

    settings: Settings
    """Changes to the configuration, by dotted path; empty for the configured layout."""
    config: Config
    layout: ParallelLayout
    memory: MemoryEstimate
    time: StepTime
    """Predicted time of a step with one document per row."""

    def options(self) -> str:
        """Return the changes as command line options; empty for the configured layout."""
        return " ".join(f"--set {path}={value}" for path, value in self.settings.items())

    def reason(self, other: LayoutChoice) -> str:
        """Return why this layout is faster than another: the term of the time that it reduces the most."""
        here = {term.name: term.seconds for term in self.time.terms}
        term = max(other.time.terms, key=lambda term: term.seconds - here.get(term.name, 0.0))
        return (
            f"{term.name} {seconds_text(here.get(term.name, 0.0))} instead of {seconds_text(term.seconds)}, the step "
            f"{seconds_text(self.time.seconds)} instead of {seconds_text(other.time.seconds)}"
        )


def compare_layouts(
    config: Config, shape: ModelShape, settled: PlanSettings | None = None, stored: Config | None = None
) -> tuple[LayoutChoice, ...]:
    """Return the layouts that fit on the configured workers, from the fastest to the slowest.

    On several nodes, each layout is compared without and with secondary shards of the weights. With ``memory.plan:
    auto``, the planner chooses the memory settings of each layout. Layouts with the same time are ordered by the number
    of changes, then by memory. The result is empty if nothing fits, or if the device has no known rates. For a run that
    has begun, ``settled`` are the settings of the stored plan, whose padding limits the layouts, and ``stored`` is the
    stored configuration, whose memory settings are kept if they fit.
    """
    cluster = config.cluster
    secondary: list[Settings] = [{}]
    if config.zero_stage == 3 and cluster.workers.max > cluster.gpus_per_node:
        secondary += [{"memory.zero_secondary": "none" if config.memory.zero_secondary == "node" else "node"}]
    found = [
        _choice(config, shape, {**settings, **other}, stored)
        for settings in layouts(config, shape, None if settled is None else settled.pad_multiple)
        for other in secondary
    ]
    return tuple(sorted((choice for choice in found if choice is not None), key=_order))


def _order(choice: LayoutChoice) -> tuple[float, int, int]:
    # The prediction is not more accurate than three digits.
    return float(f"{choice.time.seconds:.3g}"), len(choice.settings), choice.memory.device_bytes


def _choice(config: Config, shape: ModelShape, settings: Settings, stored: Config | None) -> LayoutChoice | None:
    changed, chosen = chosen_settings(with_settings(config, settings), shape, stored)
    planned = {one.path: one.value for one in chosen}
    if not fits_with(config, shape, {**settings, **planned}):
        return None
    time = configured_time(changed, shape, full_rows(changed))
    if time is None:
        return None
    memory = run_memory(changed, shape)
    return LayoutChoice(settings=settings, config=changed, layout=run_layout(changed, shape), memory=memory, time=time)
