"""bf16 gradients of the micro-batches of a step are added up in fp32, in every stage."""

from __future__ import annotations

import pytest
import torch

from tests.breadth import fast_only
from tests.distributed.accumulation_case import first_moments
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed

NUM_MICRO_BATCHES = 16


@pytest.mark.parametrize("offload", fast_only(["none", "cpu"], "none"))
def test_equal_micro_batches_add_up_to_the_gradient_of_one_in_every_stage(offload: str) -> None:
    """A sixteenth of a bf16 value is exact, and so are sums of sixteenths in fp32; in bf16 they are not."""
    cases = [(stage, offload) for stage in (1, 2, 3)]
    for moments in run_ranks(first_moments, 2, cases, [1, NUM_MICRO_BATCHES], timeout_s=120):
        for stage in (1, 2, 3):
            one, many = moments[stage, offload, 1], moments[stage, offload, NUM_MICRO_BATCHES]
            assert one.keys() == many.keys() and any(tensor.any() for tensor in one.values())
            for key, tensor in one.items():
                error = float((many[key] - tensor).norm() / tensor.norm()) if tensor.any() else 0.0
                assert error <= 1e-6, f"ZeRO-{stage}, offload {offload}: {key} is off by {error:.1e}"


def test_the_sum_in_bf16_would_show() -> None:
    part = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16() / NUM_MICRO_BATCHES
    total = torch.zeros_like(part)
    for _ in range(NUM_MICRO_BATCHES):
        total += part
    wanted = NUM_MICRO_BATCHES * part.float()
    assert float((total.float() - wanted).norm() / wanted.norm()) > 1e-3
