"""Law 1 for heads: at every layout, they give what one process gives that sees each document alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.heads_case import HeadCase, run_head_cases

MATRIX: dict[int, list[HeadCase]] = {}
for ulysses, ring, dp, stage, accumulation, kind in product(
    (1, 2, 4), (1, 2), (1, 2), (1, 3), (1, 3), ("class", "first", "last", "mean")
):
    if ulysses * ring * dp <= 4:
        MATRIX.setdefault(ulysses * ring * dp, []).append(
            HeadCase(
                kind=kind, ulysses_size=ulysses, ring_size=ring, dp_size=dp, zero_stage=stage,
                accumulation=accumulation,
            )
        )  # fmt: skip


for architecture, kind, (ulysses, ring), stage in product(
    ("bert", "roberta", "modernbert-cls", "modernbert-mean", "eurobert-bos", "eurobert-mean"),
    ("class", "mean"),
    ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2)),
    (1, 3),
):
    MATRIX.setdefault(ulysses * ring, []).append(
        HeadCase(
            kind=kind, architecture=architecture, ulysses_size=ulysses, ring_size=ring, zero_stage=stage,
            accumulation=2,
        )
    )  # fmt: skip


def hold(cases: list[HeadCase], timeout_s: float = 200) -> None:
    (world_size,) = {case.world_size for case in cases}
    for results in run_ranks(run_head_cases, world_size, cases, timeout_s=timeout_s):
        assert [result.case for result in results] == cases
        for result in results:
            result.check()


def test_a_step_on_documents_equals_that_of_one_process() -> None:
    some: list[dict[str, Any]] = [
        {"kind": "class", "ulysses_size": 2, "zero_stage": 3, "accumulation": 3},
        {"kind": "class", "ring_size": 2, "zero_stage": 1, "accumulation": 1},
        {"kind": "mean", "ulysses_size": 2, "zero_stage": 3, "accumulation": 2},
        {"kind": "last", "ring_size": 2, "zero_stage": 1, "accumulation": 3},
        {"kind": "mean", "dp_size": 2, "zero_stage": 3, "accumulation": 2},
        # A pooler inside the encoder, and a mean in front of the head.
        {"kind": "class", "architecture": "bert", "ulysses_size": 2, "zero_stage": 3, "accumulation": 2},
        {"kind": "class", "architecture": "modernbert-mean", "ring_size": 2, "zero_stage": 1, "accumulation": 2},
    ]
    hold([HeadCase(**one) for one in some])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", sorted(MATRIX))
def test_the_matrix_of_heads(world_size: int) -> None:
    hold(MATRIX[world_size], timeout_s=3000)
