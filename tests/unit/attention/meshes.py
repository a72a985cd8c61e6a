"""Places of a mesh without process groups: for everything that only asks where it is."""

from __future__ import annotations

from ray_ulysses.parallel.mesh import SequenceMesh


def place(sp_rank: int, sp_size: int, world_size: int | None = None) -> SequenceMesh:
    """Return the mesh of one rank; a collective on it is refused."""
    return SequenceMesh(sp_size=sp_size, sp_rank=sp_rank, ring_size=1, world_size=world_size or sp_size)


ALONE = place(0, 1)
