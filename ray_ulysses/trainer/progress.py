"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: Completed steps.
        digest: Sum of the digests of every row trained on, modulo 2**64.
        tokens: Supervised tokens trained on.
        resumed_from: The checkpoint's folder in the run directory; ``None`` at the beginning.
    """

    step: int = 0
    digest: int = 0
    tokens: int = 0
    resumed_from: str | None = None
