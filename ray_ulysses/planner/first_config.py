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
    """A configuration that fits.

    Attributes:
        tree: Its sections, without what the planner has chosen.
        config: The whole configuration.
        chosen: Settings that the planner has chosen, with reasons.
        memory: Estimated memory of one rank.
        time: Modelled time of a step of whole-context documents; None where it is not modelled.
        trained_positions: Positions that the model was made for; None without rotary positions.
    """

    tree: Mapping[str, Any]
    config: Config
    chosen: tuple[Chosen, ...]
    memory: MemoryEstimate
    time: StepTime | None
    trained_positions: int | None
