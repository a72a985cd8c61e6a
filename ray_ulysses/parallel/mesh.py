"""The mesh of one process: its place on the axes and the process groups, asked for by role."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from ray_ulysses.errors import UserError
from ray_ulysses.parallel.layout import ParallelLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

Role = Literal["sp", "dp", "loss", "shard"]


@dataclass(frozen=True, kw_only=True)
class SequenceMesh:
    """This process's place in the mesh and the groups that it belongs to.

    Build one with :meth:`from_group` (any training loop that has its own sequence-parallel groups) or
    :meth:`from_layout` (groups are made for a whole :class:`ParallelLayout`).

    Attributes:
        sp_size: Ranks that share one row: ``ulysses_size * ring_size``.
        sp_rank: This process's part of the row.
        ring_size: Ring degree; 1 in this version.
        world_size: Ranks that the loss is averaged over by an engine (the default process group).
    """

    sp_size: int
    sp_rank: int
    ring_size: int
    world_size: int
    groups: Mapping[Role, dist.ProcessGroup | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ulysses_size(self) -> int:
        """Ranks that the attention heads are exchanged over."""
        return self.sp_size // self.ring_size

    @classmethod
    def from_group(cls, sp_group: dist.ProcessGroup | None, ring_size: int = 1) -> SequenceMesh:
        """Wrap an existing sequence-parallel process group.

        Args:
            sp_group: The group whose ranks share a row, this process among them. ``None`` stands for a
                process that trains alone and is refused in a world of several ranks.
            ring_size: Ring degree within the group; only 1 in this version.

        Raises:
            UserError: The group is not this process's, or the ring degree can't be had.
        """
        if ring_size != 1:
            raise UserError(
                f"parallel.ring_size={ring_size}: this version has no ring attention; use 1 and an sp_size that "
                "divides the model's attention heads"
            )
        if not dist.is_initialized():
            if sp_group is not None:
                raise UserError("sp_group was given but torch.distributed is not initialised; initialise it first")
            return cls(sp_size=1, sp_rank=0, ring_size=1, world_size=1)
        world_size = dist.get_world_size()
        if sp_group is None:
            if world_size > 1:
                raise UserError(
                    f"sp_group=None in a world of {world_size} ranks is ambiguous; pass torch.distributed.group.WORLD "
                    "to share every row over all ranks, or dist.new_group([rank]) for sp_size 1"
                )
            sp_group = dist.group.WORLD
        if not isinstance(sp_group, dist.ProcessGroup):
            raise UserError(
                f"sp_group={sp_group!r} does not hold rank {dist.get_rank()}; each rank must pass the group it is in"
            )
        groups: dict[Role, dist.ProcessGroup | None] = {
            "sp": sp_group,
            "loss": dist.group.WORLD,
            "shard": dist.group.WORLD,
        }
        return cls(
            sp_size=dist.get_world_size(sp_group),
            sp_rank=dist.get_rank(sp_group),
            ring_size=1,
            world_size=world_size,
            groups=MappingProxyType(groups),
        )

    @classmethod
    def from_layout(cls, layout: ParallelLayout, timeout: timedelta | None = None) -> SequenceMesh:
        """Make the groups of a whole layout; every rank of the world must call.

        Args:
            layout: Layout of the default process group.
            timeout: Bound of a collective on the new groups; None takes torch's default.
        """
        rank = dist.get_rank()
        if layout.world_size != dist.get_world_size():
            raise UserError(
                f"a layout of {layout.world_size} ranks does not fit a process group of {dist.get_world_size()}"
            )
        groups: dict[Role, dist.ProcessGroup | None] = {"loss": dist.group.WORLD, "shard": dist.group.WORLD}
        for ranks in layout.sp_groups():
            group = dist.new_group(list(ranks), timeout=timeout)
            if rank in ranks:
                groups["sp"] = group
        for ranks in layout.dp_groups():
            group = dist.new_group(list(ranks), timeout=timeout)
            if rank in ranks:
                groups["dp"] = group
        return cls(
            sp_size=layout.sp_size,
            sp_rank=layout.sp_rank(rank),
            ring_size=1,
            world_size=layout.world_size,
            groups=MappingProxyType(groups),
        )

    def group(self, role: Role) -> dist.ProcessGroup:
        """Return the process group of a role.

        ``sp`` shares a row, ``dp`` holds the same part of different rows, ``loss`` is what token counts are
        summed over, ``shard`` is what ZeRO partitions over.
        """
        found = self.groups.get(role)
        if found is None:
            raise UserError(f"this mesh has no group for role {role!r}; it has {sorted(self.groups)}")
        return found
