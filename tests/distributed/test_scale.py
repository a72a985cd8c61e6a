"""The gradient's scale, as a scale: SGD and active clipping show every factor that Adam would hide."""

from __future__ import annotations

import pytest

from tests.breadth import fast_cases
from tests.distributed.harness import run_ranks
from tests.distributed.scale_case import ratios_of_stages

pytestmark = pytest.mark.distributed

# (world size, sp size, ring size)
LAYOUTS = {"sp2": (2, 2, 1), "sp2-ring2-dp2": (4, 2, 2), "sp4-ring2": (4, 4, 2)}
CLIP = 0.5


@pytest.mark.parametrize(("world_size", "sp_size", "ring_size"), fast_cases(LAYOUTS, "sp2-ring2-dp2"))
def test_an_sgd_step_is_that_of_one_process_for_every_zero_stage_and_clipping(
    world_size: int, sp_size: int, ring_size: int
) -> None:
    for ratios in run_ranks(ratios_of_stages, world_size, ring_size, sp_size, CLIP, timeout_s=180):
        assert len(ratios) == 6
        for case, (update, worst, norm, true_norm) in ratios.items():
            assert true_norm > 2 * CLIP, "clipping must be active where it is asked for"
            assert update == pytest.approx(1.0, abs=5e-4), case
            assert norm == pytest.approx(1.0, abs=5e-4), case
            assert worst <= 1, case
