"""Law 1 for losses of pairs: at every layout, they are those of one process that sees each answer alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.distributed.seam_case import PREFERENCES, SeamCase
from tests.distributed.test_seam_parity import hold

MATRIX: dict[int, list[SeamCase]] = {}
for ulysses, ring, stage, accumulation, tile, kind in product(
    (1, 2, 4), (1, 2), (1, 2, 3), (1, 3), ("auto", 5), PREFERENCES
):
    if ulysses * ring <= 4:
        MATRIX.setdefault(ulysses * ring, []).append(
            SeamCase(
                architecture="llama", ulysses_size=ulysses, ring_size=ring, zero_stage=stage,
                accumulation=accumulation, tile=tile, rows="pairs", preference=kind,
            )
        )  # fmt: skip


def test_a_step_on_pairs_equals_that_of_one_process() -> None:
    some: list[dict[str, Any]] = [
        {"ulysses_size": 2, "zero_stage": 3, "tile": 5, "preference": "dpo", "accumulation": 3},
        {"ulysses_size": 2, "zero_stage": 1, "tile": "off", "preference": "ipo", "accumulation": 2},
        {"ring_size": 2, "zero_stage": 2, "tile": 5, "preference": "orpo", "accumulation": 1},
        {"ulysses_size": 2, "zero_stage": 0, "tile": "auto", "preference": "simpo", "accumulation": 4},
        {"dp_size": 2, "zero_stage": 3, "tile": 5, "preference": "dpo", "accumulation": 2, "kept": "both"},
        {"ulysses_size": 2, "zero_stage": 3, "preference": "dpo", "adapter": "linear", "accumulation": 2},
    ]
    hold([SeamCase(**{"architecture": "llama", "rows": "pairs", **one}) for one in some])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", sorted(MATRIX))
def test_the_matrix_of_pairs(world_size: int) -> None:
    hold(MATRIX[world_size], timeout_s=3000)
