"""Compares the memory that a step ran out of with the plan's, and finds settings that need less."""

from __future__ import annotations

from ray_ulysses.config import Config
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.configured import configured_memory
from ray_ulysses.planner.fit import nearest, with_settings
from ray_ulysses.planner.memory_terms import GIB

_LESS = 0.9
"""Share of the planned memory that settings may take, where the plan was too low: a tenth less makes a difference."""


def shortage(config: Config, shape: ModelShape, peak_gib: float, what: str, *, is_on_host: bool = False) -> str:
    """Return what was planned and measured, the largest terms, and the nearest settings that need less (pure).

    What was measured is all that there was. Settings have to fit into that, and where the plan was lower than that,
    need a tenth less than was planned.

    Args:
        config: The configuration.
        shape: The model.
        peak_gib: Measured peak of the process before it failed, in GiB.
        what: What is measured, such as ``allocated``.
        is_on_host: Whether the host's memory ran out beside a device.
    """
    memory = configured_memory(config, shape)
    found, needed = (memory.host, memory.host_bytes) if is_on_host else (memory.device, memory.device_bytes)
    planned_gib = needed / GIB
    largest = sorted((term for term in found if term.phase != "load"), key=lambda one: -one.bytes)[:3]
    terms = ", ".join(f"{one.name} {one.bytes / GIB:.3g}" for one in largest)
    limited = "memory.host_gib" if is_on_host else "memory.device_gib"
    limit = with_settings(config, {limited: min(peak_gib, _LESS * planned_gib)})
    near = nearest(limit, shape)
    way_out = "use a smaller data.context_tokens or a smaller model, for no setting needs a tenth less"
    if near is not None:
        way_out = f"the nearest settings that need less: {near.options()}"
    return f"{peak_gib:.3g} GiB were {what} at its peak, {planned_gib:.3g} planned (largest: {terms} GiB); {way_out}"
