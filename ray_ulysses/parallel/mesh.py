"""The sequence-parallel mesh of one process: its position on the axes, and its process groups by role."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from ray_ulysses.errors import UserError
from ray_ulysses.parallel.layout import ParallelLayout, check_ring_size

if TYPE_CHECKING:
    from collections.abc import Mapping

Role = Literal["sp", "dp", "loss", "shard", "ulysses", "ring"]
_Parts = tuple[Role, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, kw_only=True)
class SequenceMesh:
    """This process's position in the mesh and its process groups.

    Build it with :meth:`from_group`, for a training loop that has its own sequence-parallel groups, or with
    :meth:`from_layout`, which creates the groups of a whole :class:`ParallelLayout`.
    """

    sp_size: int
    """Ranks that share one row: ``ulysses_size * ring_size``."""
    sp_rank: int
    """This process's rank in its ``sp`` group."""
    ring_size: int
    """Ranks of ``sp`` over which keys and values circulate; 1 without a ring."""
    world_size: int
    """Ranks over which an engine averages gradients (the default process group)."""
    groups: Mapping[Role, dist.ProcessGroup | None] = field(default_factory=dict, repr=False, compare=False)
    """The process groups by role."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling; refused if there are process groups, which mean nothing elsewhere.

        Raises:
            UserError: The mesh has process groups.
        """
        if self.groups:
            raise UserError(
                "a SequenceMesh, and so a batch of shard_batch, holds process groups and can't be pickled or copied; "
                "pass whole rows between processes (such as from a DataLoader's workers), and call shard_batch in the "
                "process that trains"
            )
        return vars(self)

    @property
    def ulysses_size(self) -> int:
        """Ranks that exchange attention heads."""
        return self.sp_size // self.ring_size

    @property
    def ulysses_rank(self) -> int:
        """This process's rank in its Ulysses group."""
        return self.sp_rank % self.ulysses_size

    @property
    def ring_rank(self) -> int:
        """This process's rank in its ring."""
        return self.sp_rank // self.ulysses_size

    @classmethod
    def from_group(cls, sp_group: dist.ProcessGroup | None, ring_size: int = 1) -> SequenceMesh:
        """Wrap an existing sequence-parallel process group; with a ring, every rank of the group must call.

        If the world was initialized with a ``device_id`` and both the ring and Ulysses have several ranks, every rank
        of the world must call, since NCCL splits its communicator.

        Args:
            sp_group: The group whose ranks share a row, including this process. ``None`` is for a process that trains
                alone, and is refused in a world of several ranks.
            ring_size: Ranks of a ring within the group, a divisor of the group's size.

        Raises:
            UserError: This process is not in the group, or the ring size does not divide the group's size.
        """
        if not dist.is_initialized():
            if sp_group is not None:
                raise UserError("sp_group was given but torch.distributed is not initialised; initialise it first")
            check_ring_size(1, ring_size)
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
        sp_size, sp_rank = dist.get_world_size(sp_group), dist.get_rank(sp_group)
        layout = ParallelLayout(world_size=sp_size, sp_size=sp_size, ring_size=ring_size)
        world = dist.group.WORLD
        groups: dict[Role, dist.ProcessGroup | None] = {"sp": sp_group, "loss": world, "shard": world}
        if ring_size in (1, sp_size):
            groups["ulysses" if ring_size == 1 else "ring"] = sp_group
        else:
            # Only members take part, so that sp groups need not do this together; Ulysses comes first on every rank.
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
        """Create the groups of a whole layout; every rank of the world must call.

        ``timeout`` applies to collectives on the new groups; ``None`` for torch's default.
        """
        rank = dist.get_rank()
        if layout.world_size != dist.get_world_size():
            raise UserError(
                f"a layout of {layout.world_size} ranks does not fit a process group of {dist.get_world_size()}"
            )
        groups: dict[Role, dist.ProcessGroup | None] = {"loss": dist.group.WORLD, "shard": dist.group.WORLD}
        for role, parts in _parts(layout):
            # Every rank creates its own part at the same time: in a world that was given a `device_id`, NCCL then
            # splits its communicator once per role. Creating each part on all ranks would split it once per part.
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
        """Return the process group of a role.

        ``sp`` shares a row, ``dp`` holds the same part of different rows, ``loss`` sums token counts, and ZeRO
        partitions over ``shard``. Within ``sp``, ``ulysses`` exchanges heads and ``ring`` circulates keys and values; a
        mesh without a ring has no ``ring``, and a mesh that is only a ring has no ``ulysses``.
        """
        found = self.groups.get(role)
        if found is None:
            raise UserError(f"this mesh has no group for role {role!r}; it has {sorted(self.groups)}")
        return found


def _parts(layout: ParallelLayout) -> tuple[_Parts, ...]:
    """Return the groups to create, in the same order on every rank."""
    parts: tuple[_Parts, ...] = (("sp", layout.sp_groups()), ("dp", layout.dp_groups()))
    # If only one of them has several ranks, it uses the sp group.
    return (*parts, *_parts_of_sp(layout)) if layout.ring_size > 1 and layout.ulysses_size > 1 else parts


def _parts_of_sp(layout: ParallelLayout) -> tuple[_Parts, ...]:
    return (("ulysses", layout.ulysses_groups()), ("ring", layout.ring_groups()))


def _refuse_unequal_names(sp_group: dist.ProcessGroup) -> None:
    """Raise if ranks would give the new groups different names and hang.

    torch 2.11 to 2.13 name a group that only its members create by its ranks and the creating rank's number of groups.
    """
    counts: list[int] = [0] * dist.get_world_size(sp_group)
    dist.all_gather_object(counts, len(_world.pg_names), group=sp_group)
    if len(set(counts)) > 1:
        raise UserError(
            f"the ranks of sp_group are in {min(counts)} to {max(counts)} process groups, and a ring needs groups that "
            "all ranks name alike: make the mesh before groups that only some of its ranks are in, or use "
            "SequenceMesh.from_layout"
        )
