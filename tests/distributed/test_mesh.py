"""The groups of a mesh with a ring, made by real ranks: who is in them, and that values go round them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_ulysses.errors import UserError
from ray_ulysses.parallel.layout import ParallelLayout
from ray_ulysses.parallel.mesh import SequenceMesh
from tests.distributed.harness import run_calls, run_ranks

pytestmark = pytest.mark.distributed
ULYSSES = [[0, 1], [0, 1], [2, 3], [2, 3]]
RINGS = [[0, 2], [1, 3], [0, 2], [1, 3]]
Facts = dict[str, list[dict[str, Any]]]


def facts_of(rank: int, world_size: int, source: str, ring_size: int) -> dict[str, object]:
    """Return what a mesh says; each of its groups sums up its ranks."""
    if source == "group":
        mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
    elif source == "part":
        parts = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        mesh = SequenceMesh.from_group(parts[rank // 2], ring_size=ring_size)
    else:
        mesh = SequenceMesh.from_layout(ParallelLayout(world_size=world_size, sp_size=world_size, ring_size=ring_size))
    facts: dict[str, object] = {"place": (mesh.sp_rank, mesh.ulysses_rank, mesh.ring_rank, mesh.ulysses_size)}
    for role in sorted(mesh.groups):
        group = mesh.group(role)
        total = torch.tensor([rank])
        dist.all_reduce(total, group=group)
        facts[role] = members = dist.get_process_group_ranks(group)
        assert total.item() == sum(members)
        assert dist.get_rank(group) == members.index(rank)
    return facts


@pytest.fixture(scope="module")
def facts() -> Facts:
    """What each mesh says, by source and ring size, and rank."""
    kinds = [("group", 2), ("layout", 2), ("group", 1), ("layout", 4), ("part", 2)]
    return run_calls(4, {f"{source}-{ring_size}": (facts_of, source, ring_size) for source, ring_size in kinds})


@pytest.mark.parametrize("source", ["group", "layout"])
def test_ulysses_groups_are_neighbours_and_rings_reach_over_them(facts: Facts, source: str) -> None:
    for rank, mesh in enumerate(facts[f"{source}-2"]):
        assert mesh["place"] == (rank, rank % 2, rank // 2, 2)
        assert (mesh["ulysses"], mesh["ring"]) == (ULYSSES[rank], RINGS[rank])
        assert mesh["sp"] == mesh["loss"] == mesh["shard"] == [0, 1, 2, 3]


def test_a_mesh_of_one_kind_has_no_group_of_the_other(facts: Facts) -> None:
    for rank, (ulysses, ring, part) in enumerate(
        zip(facts["group-1"], facts["layout-4"], facts["part-2"], strict=True)
    ):
        assert ulysses["place"] == (rank, rank, 0, 4) and "ring" not in ulysses
        assert ring["place"] == (rank, 0, rank, 1) and "ulysses" not in ring
        # Each part of the world has a ring of its own.
        assert part["ring"] == part["sp"] == [rank // 2 * 2, rank // 2 * 2 + 1] and "ulysses" not in part


def late_parts(rank: int, world_size: int) -> list[int]:
    """Make the groups of the second half of the world only: the others take no part."""
    parts = [dist.new_group(list(range(first, first + 4))) for first in (0, 4)]
    if rank < 4:
        return []
    mesh = SequenceMesh.from_group(parts[1], ring_size=2)
    return dist.get_process_group_ranks(mesh.group("ring"))


def test_one_sp_group_makes_its_rings_without_the_others() -> None:
    assert run_ranks(late_parts, 8) == [[], [], [], [], [4, 6], [5, 7], [4, 6], [5, 7]]


def refused(rank: int, world_size: int) -> tuple[str, str]:
    """Return how a ring that does not divide the group is refused, and ranks of which one is in fewer groups."""
    texts = []
    for ring_size in (3, 2):
        try:
            SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
        except UserError as error:
            texts.append(str(error))
        dist.new_group([0, 1, 2])
    return texts[0], texts[1]


def test_a_mesh_that_can_not_be_is_refused_before_any_rank_waits() -> None:
    for ring, groups in run_ranks(refused, 4, timeout_s=60):
        assert "parallel.ring_size=3 does not divide parallel.sp_size=4" in ring
        assert "all ranks must belong to equally many; create the mesh before" in groups
