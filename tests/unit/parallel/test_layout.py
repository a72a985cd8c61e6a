from __future__ import annotations

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.parallel.layout import ParallelLayout, largest_node_group


def test_ranks_that_share_a_row_are_contiguous() -> None:
    layout = ParallelLayout(world_size=6, sp_size=3)
    assert layout.sp_groups() == ((0, 1, 2), (3, 4, 5))
    assert layout.dp_groups() == ((0, 3), (1, 4), (2, 5))


@pytest.mark.parametrize(
    ("world_size", "sp_size", "text"),
    [
        (16, 6, "cluster.workers=16 is not a multiple of parallel.sp_size=6; use 12 or 18 workers, or an sp_size that"),
        (2, 4, "cluster.workers=2 is not a multiple of parallel.sp_size=4; use 4 workers, or an sp_size that divides"),
        (0, 1, "cluster.workers=0 is not a multiple of parallel.sp_size=1; use 1 workers"),
        (4, 0, "parallel.sp_size=0 must be at least 1"),
    ],
)
def test_a_world_of_incomplete_groups_is_refused(world_size: int, sp_size: int, text: str) -> None:
    with pytest.raises(UserError, match=text.replace(".", r"\.")):
        ParallelLayout(world_size=world_size, sp_size=sp_size)


@pytest.mark.parametrize(
    ("nodes", "size"),
    [("aaaabbbb", 4), ("aaaa", 4), ("aaab", 1), ("aaaabb", 2), ("aaaaaabbbb", 2), ("aabbaa", 2), ("abab", 1), ("a", 1)],
)
def test_groups_within_nodes_are_as_large_as_all_nodes_allow(nodes: str, size: int) -> None:
    assert largest_node_group(nodes) == size
