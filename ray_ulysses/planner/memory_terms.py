"""A term of a rank's memory estimate, and the phase of a step in which the memory is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
FP32_BYTES = 4

Phase = Literal["always", "passes", "loss", "layer", "mlp", "attention", "update", "load"]
"""Phase in which a term is allocated. ``load``: during model loading, before training. ``always``: throughout a
step. ``passes``: in the forward and backward passes. ``update``: in the optimizer's update after the passes. ``loss``:
in the loss, within the passes. ``layer``: in one layer's backward pass. ``mlp`` and ``attention``: in that part of a
layer's backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTerm:
    """An amount of memory that a rank allocates, with its name, phase and derivation."""

    name: str
    bytes: int
    phase: Phase
    source: str
    """Derivation of the number of bytes, as text."""


def always(name: str, size: int, source: str) -> MemoryTerm:
    """Return a term that is allocated throughout a step."""
    return term(name, size, "always", source)


def in_passes(name: str, size: int, source: str) -> MemoryTerm:
    """Return a term that is allocated during the forward and backward passes."""
    return term(name, size, "passes", source)


def term(name: str, size: int, phase: Phase, source: str) -> MemoryTerm:
    """Return a term for a given phase."""
    return MemoryTerm(name=name, bytes=size, phase=phase, source=source)
