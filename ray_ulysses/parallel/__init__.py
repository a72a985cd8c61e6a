"""Layout arithmetic, the sequence-parallel mesh and the collectives that run on it."""

from ray_ulysses.parallel.layout import ParallelLayout
from ray_ulysses.parallel.mesh import SequenceMesh

__all__ = ["ParallelLayout", "SequenceMesh"]
