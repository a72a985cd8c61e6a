"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass

from ray_ulysses.tracking.events import TakenOver


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: Completed steps.
        digest: Sum of the digests of every row trained on, modulo 2**64.
        tokens: Supervised tokens trained on.
        resumed_from: The checkpoint's folder in the run directory, or another run's; ``None`` at the beginning.
        taken_over: What was trained before this run's own steps, if it goes on with another's.
    """

    step: int = 0
    digest: int = 0
    tokens: int = 0
    resumed_from: str | None = None
    taken_over: TakenOver | None = None
