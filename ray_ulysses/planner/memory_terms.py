"""One part of the memory of a rank, and the phase in which it is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
FP32_BYTES = 4

Phase = Literal["always", "passes", "loss", "layer", "mlp", "attention", "update", "load"]
"""When a term is allocated: during a whole step; in addition only in the forward and backward passes or in the
optimizer's update, which do not coincide; of the passes, only in the loss or in one layer's backward pass, which do not
coincide either; of the latter, only in that of its MLP or of its attention; or only while the model is loaded, before
all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTerm:
    """One part of the memory of a rank."""

    name: str
    bytes: int
    phase: Phase
    source: str
    """Where the number comes from, as a sentence."""


def always(name: str, size: int, source: str) -> MemoryTerm:
    """Return a term that is allocated during a whole step."""
    return term(name, size, "always", source)


def in_passes(name: str, size: int, source: str) -> MemoryTerm:
    """Return a term that is allocated during the forward and backward passes."""
    return term(name, size, "passes", source)


def term(name: str, size: int, phase: Phase, source: str) -> MemoryTerm:
    """Return a term from its fields in order."""
    return MemoryTerm(name=name, bytes=size, phase=phase, source=source)
