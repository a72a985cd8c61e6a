"""Compares a run's layouts: sequence parallelism within or across nodes, rings, and secondary shards of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ray_ulysses.config import Config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.layout import ParallelLayout, automatic_ring_size
from ray_ulysses.planner.memory import MemoryEstimate, run_memory
from ray_ulysses.planner.search import Settings, chosen_settings, fits_with, with_settings
from ray_ulysses.planner.settings import allowed_sp, ring_size, run_layout
from ray_ulysses.planner.throughput import StepTime, configured_time, full_rows

_SECONDARY = "memory.zero_secondary"


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
            f"{term.name} {here.get(term.name, 0.0):.1f} s instead of {term.seconds:.1f} s, the step "
            f"{self.time.seconds:.1f} s instead of {other.time.seconds:.1f} s"
        )


def compare_layouts(config: Config, shape: ModelShape) -> tuple[LayoutChoice, ...]:
    """Return all layouts that fit on the configured workers, from the fastest to the slowest.

    With ``memory.plan: auto``, the planner chooses the memory settings of each layout. Layouts with the same time are
    ordered by the number of changes, then by memory. The result is empty if nothing fits, or if the device has no known
    rates.
    """
    found = [choice for settings in _layouts(config, shape) if (choice := _choice(config, shape, settings)) is not None]
    return tuple(sorted(found, key=_order))


def _order(choice: LayoutChoice) -> tuple[float, int, int]:
    # The prediction is not more accurate than three digits.
    return float(f"{choice.time.seconds:.3g}"), len(choice.settings), choice.memory.device_bytes


def _choice(config: Config, shape: ModelShape, settings: Settings) -> LayoutChoice | None:
    changed, chosen = chosen_settings(with_settings(config, settings), shape, None)
    planned = {one.path: one.value for one in chosen}
    if not fits_with(config, shape, {**settings, **planned}):
        return None
    time = configured_time(changed, shape, full_rows(changed))
    if time is None:
        return None
    memory = run_memory(changed, shape)
    return LayoutChoice(settings=settings, config=changed, layout=run_layout(changed, shape), memory=memory, time=time)


def _layouts(config: Config, shape: ModelShape) -> Iterator[Settings]:
    """Yield the changes of each possible layout."""
    cluster = config.cluster
    can_share = config.zero_stage == 3 and cluster.workers.max > cluster.gpus_per_node
    for size in allowed_sp(config, shape):
        if cluster.workers.min % size or cluster.workers.max % size:
            continue
        of_size = {} if size == config.parallel.sp_size else {"parallel.sp_size": size}
        now = ring_size(with_settings(config, of_size), shape)
        # A larger ring may keep the exchange of heads within a node, or avoid copies of KV heads.
        rings = {-(-size // cluster.gpus_per_node), -(-size // shape.num_kv_heads)}
        rings |= {now if not of_size else automatic_ring_size(size, shape.num_heads)}
        for ring in sorted(rings) if not shape.mixer_layers else (1,):
            if size % ring or size // ring > shape.num_heads:
                continue
            of_ring = of_size if ring == now else {**of_size, "parallel.ring_size": ring}
            yield of_ring
            if can_share:
                yield {**of_ring, _SECONDARY: "none" if config.memory.zero_secondary == "node" else "node"}
