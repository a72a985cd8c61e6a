"""The mesh of one process; worlds of several ranks are played by torch's fake process group."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _process_group_color
from torch.testing._internal.distributed.fake_pg import FakeStore

from ray_ulysses.errors import UserError
from ray_ulysses.parallel import mesh as module
from ray_ulysses.parallel.layout import ParallelLayout
from ray_ulysses.parallel.mesh import Role, SequenceMesh

WorldMaker = Callable[[int, int], None]
LEVEL = ParallelLayout(world_size=6, sp_size=3)
RING = ParallelLayout(world_size=12, sp_size=6, ring_size=2)


@pytest.fixture
def world() -> Iterator[WorldMaker]:
    """Be one rank of a world whose other ranks do not exist."""

    def start(rank: int, world_size: int) -> None:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def test_only_a_mesh_without_groups_goes_to_another_process(world: WorldMaker) -> None:
    alone = SequenceMesh.from_group(None)
    assert pickle.loads(pickle.dumps(alone)) == alone
    world(1, 2)
    with pytest.raises(UserError, match=r"contains process groups and can't be pickled .* call shard_batch in the"):
        pickle.dumps(SequenceMesh.from_group(dist.group.WORLD))


def test_impossible_meshes_are_refused(world: WorldMaker) -> None:
    with pytest.raises(UserError, match=r"sp_group requires torch\.distributed; call init_process_group"):
        SequenceMesh.from_group(object())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"parallel\.ring_size=2 does not divide parallel\.sp_size=1; use 1, or remove"):
        SequenceMesh.from_group(None, ring_size=2)
    world(1, 6)
    refused: list[tuple[str, Callable[[], object]]] = [
        (r"ring_size=0 .* use 1, 2, 3, 6, or", lambda: SequenceMesh.from_group(dist.group.WORLD, ring_size=0)),
        (r"ring_size=4 .* use 1, 2, 3, 6, or", lambda: SequenceMesh.from_group(dist.group.WORLD, ring_size=4)),
        (r"sp_group=None is ambiguous .* 6 ranks; pass .*WORLD .* or dist\.", lambda: SequenceMesh.from_group(None)),
        ("does not contain rank 1; ", lambda: SequenceMesh.from_group(dist.new_group([2, 3]))),
        ("the layout has 12 ranks, .* has 6", lambda: SequenceMesh.from_layout(RING)),
    ]
    for text, make in refused:
        with pytest.raises(UserError, match=text):
            make()


def test_no_group_in_a_world_of_one_is_the_world(world: WorldMaker) -> None:
    world(0, 1)
    assert SequenceMesh.from_group(None).group("sp") is dist.group.WORLD


@pytest.mark.parametrize(("layout", "rank"), [(LEVEL, 0), (LEVEL, 4), (RING, 0), (RING, 8), (RING, 11)])
def test_each_rank_of_a_layout_gets_its_own_groups(world: WorldMaker, layout: ParallelLayout, rank: int) -> None:
    world(rank, layout.world_size)
    mesh = SequenceMesh.from_layout(layout)
    assert (mesh.sp_size, mesh.ring_size, mesh.world_size) == (layout.sp_size, layout.ring_size, layout.world_size)
    assert (mesh.sp_rank, mesh.ulysses_rank, mesh.ring_rank) == (
        rank % layout.sp_size,
        rank % 3,
        rank % layout.sp_size // 3,
    )
    groups = {"sp": layout.sp_groups(), "dp": layout.dp_groups(), "ulysses": layout.ulysses_groups()}
    if layout.ring_size > 1:
        groups["ring"] = layout.ring_groups()
    for role, every in groups.items():
        (own,) = (group for group in every if rank in group)
        assert tuple(dist.get_process_group_ranks(mesh.group(role))) == own  # type: ignore[arg-type]
    assert mesh.group("loss") is mesh.group("shard") is dist.group.WORLD
    # The seam builds the same mesh from a group that a loop of one's own has made.
    if layout.ring_size == 1:
        assert SequenceMesh.from_group(mesh.group("sp")) == mesh


def test_a_rank_of_a_large_world_makes_each_group_in_one_call(
    world: WorldMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL splits the world for each call, on every rank: a call per group would be 336 splits here, at each start."""
    world(777, 1024)
    calls: list[list[int]] = []
    make = dist.new_group
    monkeypatch.setattr(
        module.dist, "new_group", lambda ranks, **options: calls.append(ranks) or make(ranks, **options)
    )
    SequenceMesh.from_layout(ParallelLayout(world_size=1024, sp_size=16, ring_size=4))
    assert len(calls) == 4 and all(777 in ranks for ranks in calls)


@pytest.mark.parametrize("world_size", [8, 96, 256, 1024])
def test_groups_that_are_split_at_once_have_colours_of_their_own(world_size: int) -> None:
    """A colour is a hash of the ranks: two groups of the same one would be one communicator."""
    for sp_size in (size for size in range(1, world_size + 1) if world_size % size == 0):
        layout = ParallelLayout(world_size=world_size, sp_size=sp_size)
        for parts in (layout.sp_groups(), layout.dp_groups()):
            assert len({_process_group_color(list(part)) for part in parts}) == len(parts)


@pytest.mark.parametrize(("ring_size", "only", "other"), [(1, "ulysses", "ring"), (3, "ring", "ulysses")])
def test_a_mesh_of_one_kind_makes_no_group_of_its_own(
    world: WorldMaker, ring_size: int, only: Role, other: Role
) -> None:
    world(1, 3)
    of_layout = SequenceMesh.from_layout(ParallelLayout(world_size=3, sp_size=3, ring_size=ring_size))
    of_group = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
    for mesh in (of_layout, of_group):
        assert mesh.group(only) is mesh.group("sp")
        with pytest.raises(UserError, match=f"no group for role '{other}'"):
            mesh.group(other)
