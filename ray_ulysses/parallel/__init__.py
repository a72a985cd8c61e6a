"""Layout arithmetic, the sequence-parallel mesh, and its collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_ulysses.parallel.layout import ParallelLayout

if TYPE_CHECKING:
    from ray_ulysses.parallel.mesh import SequenceMesh

__all__ = ["ParallelLayout", "SequenceMesh"]


def __getattr__(name: str) -> object:
    """Import the mesh on first use, so that the data plane can use the layout arithmetic without torch."""
    if name == "SequenceMesh":
        from ray_ulysses.parallel.mesh import SequenceMesh

        return SequenceMesh
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
