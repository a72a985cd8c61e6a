from __future__ import annotations

import pytest

from ray_ulysses.cluster.capacity import Node
from ray_ulysses.cluster.reference_job import group_size
from ray_ulysses.errors import UserError


@pytest.mark.parametrize(
    ("nodes", "sp_size", "expected"),
    [
        ([(8, 8), (8, 8), (4, 0)], None, (8, 2, True)),
        ([(8, 8), (8, 4)], None, (4, 3, True)),
        ([(8, 8), (8, 4)], 1, (1, 12, True)),
        ([(8, 8), (8, 4)], 8, (8, 1, True)),
        ([(4, 0), (2, 0)], None, (1, 6, False)),
        ([(4, 0), (3, 0)], 2, (2, 3, False)),
    ],
)
def test_a_group_stays_on_a_node(
    nodes: list[tuple[int, int]], sp_size: int | None, expected: tuple[int, int, bool]
) -> None:
    assert group_size(tuple(Node(cpus=cpus, gpus=gpus) for cpus, gpus in nodes), sp_size) == expected


def test_a_group_that_no_node_holds_is_refused() -> None:
    with pytest.raises(UserError, match=r"--sp-size=16: no node .* GPUs; use at most 8"):
        group_size((Node(cpus=64, gpus=8), Node(cpus=64, gpus=8)), 16)
