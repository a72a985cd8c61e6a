"""One part of a rank's memory, and the phase in which it is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
FP32_BYTES = 4

Phase = Literal["always", "passes", "loss", "layer", "mlp", "attention", "update", "load"]
"""When a term is allocated: ``always`` during a whole step; ``passes`` only in the forward and backward passes, and
``update`` only in the optimizer's update, which follows; within the passes, ``loss`` only in the loss, and ``layer``
only in one layer's backward pass; within that, ``mlp`` or ``attention`` only in that part; ``load`` only while the
model is loaded, before all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTerm:
    """One part of a rank's memory."""

    name: str
    bytes: int
    phase: Phase
    source: str
    """How the number is computed, as text."""


def always(name: str, size: int, source: str) -> MemoryTerm:
    """Return a term that is allocated during a whole step."""
    return term(name, size, "always", source)


def in_passes(name: str, size: int, source: str) -> MemoryTerm:
    """Return a term that is allocated during the forward and backward passes."""
    return term(name, size, "passes", source)


def term(name: str, size: int, phase: Phase, source: str) -> MemoryTerm:
    """Return a term, with positional arguments."""
    return MemoryTerm(name=name, bytes=size, phase=phase, source=source)
