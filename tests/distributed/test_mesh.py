"""The groups of a mesh with a ring, made by real ranks: who is in them, and that values go round them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.harness import run_calls, run_ranks

ULYSSES = [[0, 1], [0, 1], [2, 3], [2, 3]]
RINGS = [[0, 2], [1, 3], [0, 2], [1, 3]]
WORLD = [[0, 1, 2, 3]] * 4
Facts = dict[str, list[list[dict[str, Any]]]]


def facts_of(rank: int, world_size: int, source: str, ring_size: int, times: int = 1) -> list[dict[str, object]]:
    import torch
    import torch.distributed as dist

    from ray_ulysses.parallel.layout import ParallelLayout
    from ray_ulysses.parallel.mesh import SequenceMesh

    found: list[dict[str, object]] = []
    for _ in range(times):
        if source == "group":
            mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
        elif source == "part":
            parts = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
            mesh = SequenceMesh.from_group(parts[rank // 2], ring_size=ring_size)
        else:
            layout = ParallelLayout(world_size=world_size, sp_size=world_size, ring_size=ring_size)
            mesh = SequenceMesh.from_layout(layout)
        facts: dict[str, object] = {"place": (mesh.sp_rank, mesh.ulysses_rank, mesh.ring_rank, mesh.ulysses_size)}
        for role in sorted(mesh.groups):
            group = mesh.group(role)
            total = torch.tensor([rank])
            dist.all_reduce(total, group=group)
            members = dist.get_process_group_ranks(group)
            assert total.item() == sum(members)
            assert dist.get_rank(group) == members.index(rank)
            facts[role] = members
            facts[f"{role} is sp"] = group is mesh.group("sp")
        found.append(facts)
    return found


@pytest.fixture(scope="module")
def facts() -> Facts:
    """What each mesh says, by source and ring size, and rank."""
    kinds = [("group", 2), ("layout", 2), ("group", 1), ("layout", 1), ("group", 4), ("layout", 4), ("part", 2)]
    calls = {f"{source}-{ring_size}": (facts_of, source, ring_size) for source, ring_size in kinds}
    return run_calls(4, {**calls, "twice": (facts_of, "group", 2, 2)})


@pytest.mark.parametrize("source", ["group", "layout"])
def test_ulysses_groups_are_neighbours_and_rings_reach_over_them(facts: Facts, source: str) -> None:
    for rank, (mesh,) in enumerate(facts[f"{source}-2"]):
        assert mesh["place"] == (rank, rank % 2, rank // 2, 2)
        assert mesh["ulysses"] == ULYSSES[rank]
        assert mesh["ring"] == RINGS[rank]
        assert mesh["sp"] == mesh["loss"] == mesh["shard"] == WORLD[rank]


@pytest.mark.parametrize("source", ["group", "layout"])
@pytest.mark.parametrize(("ring_size", "only", "other"), [(1, "ulysses", "ring"), (4, "ring", "ulysses")])
def test_a_mesh_of_one_kind_uses_the_group_it_has(
    facts: Facts, source: str, ring_size: int, only: str, other: str
) -> None:
    for rank, (mesh,) in enumerate(facts[f"{source}-{ring_size}"]):
        assert mesh[f"{only} is sp"] is True
        assert other not in mesh
        assert mesh["place"] == (rank, *((rank, 0, 4) if ring_size == 1 else (0, rank, 1)))


def test_a_group_is_wrapped_as_often_as_one_likes(facts: Facts) -> None:
    for rank, meshes in enumerate(facts["twice"]):
        assert [(mesh["ulysses"], mesh["ring"]) for mesh in meshes] == [(ULYSSES[rank], RINGS[rank])] * 2


def test_each_part_of_the_world_has_a_ring_of_its_own(facts: Facts) -> None:
    for rank, (mesh,) in enumerate(facts["part-2"]):
        assert mesh["ring"] == mesh["sp"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert "ulysses" not in mesh


def late_parts(rank: int, world_size: int) -> list[int]:
    """Make the groups of the second half of the world only: the others take no part."""
    import torch.distributed as dist

    from ray_ulysses.parallel.mesh import SequenceMesh

    parts = [dist.new_group(list(range(first, first + 4))) for first in (0, 4)]
    if rank < 4:
        return []
    mesh = SequenceMesh.from_group(parts[1], ring_size=2)
    return dist.get_process_group_ranks(mesh.group("ring"))


def test_one_sp_group_makes_its_rings_without_the_others() -> None:
    assert run_ranks(late_parts, 8) == [[], [], [], [], [4, 6], [5, 7], [4, 6], [5, 7]]


def refused(rank: int, world_size: int) -> str:
    import torch.distributed as dist

    from ray_ulysses.errors import UserError
    from ray_ulysses.parallel.mesh import SequenceMesh

    try:
        SequenceMesh.from_group(dist.group.WORLD, ring_size=3)
    except UserError as error:
        return str(error)
    return "accepted"


def test_a_ring_that_does_not_divide_the_group_is_refused_before_any_rank_waits() -> None:
    text = (
        "parallel.ring_size=3 does not divide parallel.sp_size=2; use 1, 2, or leave it out to choose it automatically"
    )
    assert run_ranks(refused, 2) == [text] * 2


def unequal_groups(rank: int, world_size: int) -> str:
    """Make a ring's groups where one rank is in fewer groups than the others."""
    import torch.distributed as dist

    from ray_ulysses.errors import UserError
    from ray_ulysses.parallel.mesh import SequenceMesh

    dist.new_group([0, 1, 2])
    try:
        SequenceMesh.from_group(dist.group.WORLD, ring_size=2)
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_would_wait_for_each_other_without_end_are_told_so() -> None:
    for text in run_ranks(unequal_groups, 4, timeout_s=60):
        assert "make the mesh before groups that only some of its ranks are in" in text
