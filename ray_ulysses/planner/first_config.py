"""A configuration that `init` proposes, with the planner's estimates for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_ulysses.config import Config
from ray_ulysses.planner.choice import Chosen
from ray_ulysses.planner.memory import MemoryEstimate
from ray_ulysses.planner.throughput import StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstConfig:
    """A configuration that fits."""

    tree: Mapping[str, Any]
    """Its sections, without what the planner has chosen."""
    config: Config
    """The whole configuration."""
    chosen: tuple[Chosen, ...]
    """Settings that the planner has chosen, with reasons."""
    memory: MemoryEstimate
    """Estimated memory of one rank."""
    time: StepTime | None
    """Modelled time of a step of whole-context documents; None where it is not modelled."""
    trained_positions: int | None
    """Positions that the model was made for; None without rotary positions."""
