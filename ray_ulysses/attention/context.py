"""What one forward passes down to each layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from ray_ulysses.attention.documents import PackedDocuments, Tables
    from ray_ulysses.attention.kernels import Demand


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """The batch's tables and the settings of every attention layer in one forward."""

    documents: PackedDocuments
    kernel: str
    local_tokens: int
    """Tokens of a row that this rank holds."""
    ulysses: str
    """Name of the group that heads are exchanged over; empty if one rank has all heads."""
    ulysses_rank: int
    ulysses_size: int
    ring: str
    """Name of the ring's group; empty without a ring."""
    chunks: int
    """Number of parts in which the KV heads are exchanged and attended."""
    announce: Callable[[Demand], None]
    """Logs the kernel of each kind of layer once."""
    position_ids_BL: torch.Tensor | None = None
    """Positions in their documents of this rank's tokens; ``None`` if no layer needs them."""
    stretches: Mapping[int, Tables] = field(default_factory=dict)
    """Per number of tokens, the tables of layers that cut documents into stretches of so many."""
