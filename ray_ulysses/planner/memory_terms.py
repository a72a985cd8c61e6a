"""One part of the memory of a rank, and when it is alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
FP32_BYTES = 4

Phase = Literal["always", "loss", "layer", "load"]
"""When a term is alive: through a whole step; beside that only in the loss or in one layer's backward pass, which do
not come together; or only while the model is loaded, before all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTerm:
    """One part of the memory of a rank.

    Attributes:
        name: What it is.
        bytes: How much.
        phase: When it is alive.
        source: Where the number comes from, as a sentence.
    """

    name: str
    bytes: int
    phase: Phase
    source: str
