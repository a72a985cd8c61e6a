"""The position of a run in its training."""

from __future__ import annotations

from dataclasses import dataclass

from ray_ulysses.tracking.inherited_steps import InheritedSteps


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPosition:
    """The position of a run in its training.

    Attributes:
        step: Completed steps.
        digest: Sum of the digests of every row trained on, modulo 2**64.
        tokens: Supervised tokens trained on.
        resumed_from: The checkpoint's folder in the run directory, another run's, or the step in peer memory; None at
            step 0.
        inherited: What another run had trained before this run's own steps, if this run continues it.
    """

    step: int = 0
    digest: int = 0
    tokens: int = 0
    resumed_from: str | None = None
    inherited: InheritedSteps | None = None
