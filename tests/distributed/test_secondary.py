"""Law 1 with secondary shards of the weights within nodes, in steps that come after other steps and forward passes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.seam_case import SeamCase, check, run_cases

COMMON: dict[str, Any] = {"zero_stage": 3, "steps_before": 2}
MODELS: tuple[dict[str, Any], ...] = (
    {"architecture": "llama"},
    {"architecture": "mistral"},
    {"architecture": "mixtral", "has_router_loss": True},
    {"architecture": "gpt_oss"},
    {"architecture": "untied", "adapter": "linear"},
    {"architecture": "tied", "adapter": "extension"},
    {"architecture": "modernbert"},
)
MATRIX: dict[str, list[SeamCase]] = {}
"""By the number of ranks and the ranks of a node: every size of groups within 8 ranks."""
for (world_size, node), model, accumulation, kept in product(
    ((4, 2), (6, 3), (6, 2), (8, 4), (8, 2)), MODELS, (1, 2), (None, "both")
):
    MATRIX.setdefault(f"{world_size} ranks on nodes of {node}", []).extend(
        SeamCase(
            ulysses_size=sp, dp_size=world_size // sp, accumulation=accumulation, kept=kept, secondary_size=node,
            **COMMON, **model,
        )
        for sp in (1, 2, 4)
        if world_size % sp == 0
    )  # fmt: skip


def hold(cases: list[SeamCase], timeout_s: float = 200) -> None:
    (world_size,) = {case.world_size for case in cases}
    results = run_ranks(run_cases, world_size, cases, timeout_s=timeout_s)[0]
    assert [result.case for result in results] == cases
    for result in results:
        check(result)


def test_a_later_step_on_two_nodes_equals_one_process() -> None:
    hold([
        SeamCase(architecture="llama", dp_size=4, accumulation=1, secondary_size=2, **COMMON),
        SeamCase(architecture="mixtral", ulysses_size=2, dp_size=2, accumulation=2, secondary_size=2, **COMMON),
        SeamCase(
            architecture="tied", adapter="linear", dp_size=4, accumulation=2, kept="both", secondary_size=2, **COMMON
        ),
    ])  # fmt: skip


def test_a_later_step_on_two_nodes_of_four_equals_one_process() -> None:
    hold([SeamCase(architecture="llama", ulysses_size=4, dp_size=2, accumulation=2, secondary_size=4, **COMMON)])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", MATRIX)
def test_the_matrix_of_nodes(world: str) -> None:
    hold(MATRIX[world], timeout_s=3000)
