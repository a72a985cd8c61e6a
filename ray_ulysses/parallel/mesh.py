"""The sequence-parallel mesh: a process's position on the axes, and its process groups by role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from ray_ulysses.errors import UserError
from ray_ulysses.parallel.layout import ParallelLayout, check_ring_size

Role = Literal["sp", "dp", "loss", "shard", "ulysses", "ring"]
_Parts = tuple[Role, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, kw_only=True)
class SequenceMesh:
    """This process's position in the mesh, and its process groups.

    Use :meth:`from_group` in a training loop that has its own sequence-parallel groups, and :meth:`from_layout` to
    create all groups of a :class:`ParallelLayout`.
    """

    sp_size: int
    """Number of ranks that share a row: ``ulysses_size * ring_size``."""
    sp_rank: int
    """This process's rank in the ``sp`` group."""
    ring_size: int
    """Number of ranks over which keys and values circulate; 1 without a ring."""
    world_size: int
    """Number of ranks in the default process group, over which an engine averages gradients."""
    groups: Mapping[Role, dist.ProcessGroup | None] = field(default_factory=dict, repr=False, compare=False)
    """Process groups by role; see :meth:`group`."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling.

        Raises:
            UserError: The mesh has process groups, which are valid only in this process.
        """
        if self.groups:
            raise UserError(
                "a SequenceMesh, and therefore a batch from shard_batch, contains process groups and can't be pickled "
                "or copied; pass complete rows between processes (for example from DataLoader workers), and call "
                "shard_batch in the training process"
            )
        return vars(self)

    @property
    def ulysses_size(self) -> int:
        """Number of ranks that exchange attention heads."""
        return self.sp_size // self.ring_size

    @property
    def ulysses_rank(self) -> int:
        """This process's rank in the Ulysses group."""
        return self.sp_rank % self.ulysses_size

    @property
    def ring_rank(self) -> int:
        """This process's rank in the ring."""
        return self.sp_rank // self.ulysses_size

    @classmethod
    def from_group(cls, sp_group: dist.ProcessGroup | None, ring_size: int = 1) -> SequenceMesh:
        """Build the mesh of an existing sequence-parallel process group.

        With a ring, all ranks of the group must call this method. If both the ring and Ulysses have several ranks and
        the default process group was initialized with a ``device_id``, all ranks of the world must call this method,
        because NCCL splits the world's communicator.

        Args:
            sp_group: The group whose ranks share a row, including this process. None means a single rank, and is
                refused if the world has several ranks.
            ring_size: Number of ranks in a ring, a divisor of the group's size.

        Raises:
            UserError: This process is not in the group, or the ring size does not divide the group's size.
        """
        if not dist.is_initialized():
            if sp_group is not None:
                raise UserError("sp_group requires torch.distributed; call init_process_group before from_group")
            check_ring_size(1, ring_size)
            return cls(sp_size=1, sp_rank=0, ring_size=1, world_size=1)
        world_size = dist.get_world_size()
        if sp_group is None:
            if world_size > 1:
                raise UserError(
                    f"sp_group=None is ambiguous in a world of {world_size} ranks; pass torch.distributed.group.WORLD "
                    "to shard rows over all ranks, or dist.new_group([rank]) to keep rows whole"
                )
            sp_group = dist.group.WORLD
        if not isinstance(sp_group, dist.ProcessGroup):
            raise UserError(
                f"sp_group={sp_group!r} does not contain rank {dist.get_rank()}; on each rank, pass the group to which "
                "the rank belongs"
            )
        sp_size, sp_rank = dist.get_world_size(sp_group), dist.get_rank(sp_group)
        layout = ParallelLayout(world_size=sp_size, sp_size=sp_size, ring_size=ring_size)
        world = dist.group.WORLD
        groups: dict[Role, dist.ProcessGroup | None] = {"sp": sp_group, "loss": world, "shard": world}
        if ring_size in (1, sp_size):
            groups["ulysses" if ring_size == 1 else "ring"] = sp_group
        else:
            # Only members create these groups, so sp groups need not synchronize. All ranks create Ulysses first.
            _refuse_unequal_names(sp_group)
            members = dist.get_process_group_ranks(sp_group)
            for role, parts in _parts_of_sp(layout):
                part = next(part for part in parts if sp_rank in part)
                groups[role] = dist.new_group([members[place] for place in part], use_local_synchronization=True)
        return cls(
            sp_size=sp_size,
            sp_rank=sp_rank,
            ring_size=ring_size,
            world_size=world_size,
            groups=MappingProxyType(groups),
        )

    @classmethod
    def from_layout(cls, layout: ParallelLayout, timeout: timedelta | None = None) -> SequenceMesh:
        """Create all process groups of a layout. All ranks of the world must call this method.

        ``timeout`` applies to collectives on the new groups. If it is None, torch's default applies.
        """
        rank = dist.get_rank()
        if layout.world_size != dist.get_world_size():
            raise UserError(
                f"the layout has {layout.world_size} ranks, but the default process group has {dist.get_world_size()}; "
                "build the layout for the number of running ranks"
            )
        groups: dict[Role, dist.ProcessGroup | None] = {"loss": dist.group.WORLD, "shard": dist.group.WORLD}
        # If only one of Ulysses and the ring has several ranks, it reuses the sp group.
        within_sp = _parts_of_sp(layout) if layout.ring_size > 1 and layout.ulysses_size > 1 else ()
        # All ranks create the groups in the same order.
        of_roles: tuple[_Parts, ...] = (("sp", layout.sp_groups()), ("dp", layout.dp_groups()), *within_sp)
        for role, parts in of_roles:
            # Each rank creates only its own group of a role. If the world has a `device_id`, NCCL then splits its
            # communicator once per role instead of once per group.
            own = next(ranks for ranks in parts if rank in ranks)
            groups[role] = dist.new_group(list(own), timeout=timeout, use_local_synchronization=True)
        if layout.ring_size == 1:
            groups["ulysses"] = groups["sp"]
        elif layout.ulysses_size == 1:
            groups["ring"] = groups["sp"]
        return cls(
            sp_size=layout.sp_size,
            sp_rank=layout.sp_rank(rank),
            ring_size=layout.ring_size,
            world_size=layout.world_size,
            groups=MappingProxyType(groups),
        )

    def group(self, role: Role) -> dist.ProcessGroup:
        """Return this process's group for a role.

        The ranks of ``sp`` share a row, and the ranks of ``dp`` have the same part of different rows. Token counts are
        summed over ``loss``; ZeRO partitions state over ``shard``. Within ``sp``, heads are exchanged over ``ulysses``,
        and keys and values circulate over ``ring``. If only one of these two has several ranks, the other has no group.
        """
        found = self.groups.get(role)
        if found is None:
            raise UserError(f"this mesh has no group for role {role!r}; use one of {sorted(self.groups)}")
        return found


def _parts_of_sp(layout: ParallelLayout) -> tuple[_Parts, ...]:
    return (("ulysses", layout.ulysses_groups()), ("ring", layout.ring_groups()))


def _refuse_unequal_names(sp_group: dist.ProcessGroup) -> None:
    """Raise if the ranks would name a new group differently, which would make them hang.

    In torch 2.11 to 2.13, the name of a group that only its members create contains the number of groups that the
    creating rank is in.
    """
    counts: list[int] = [0] * dist.get_world_size(sp_group)
    dist.all_gather_object(counts, len(_world.pg_names), group=sp_group)
    if len(set(counts)) > 1:
        raise UserError(
            f"the ranks of sp_group belong to {min(counts)} to {max(counts)} process groups, but a ring requires "
            "the same number on all ranks; create the mesh before groups that have only some of its ranks, or use "
            "SequenceMesh.from_layout"
        )
