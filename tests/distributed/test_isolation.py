"""No token value of one document changes a bit of another's, whatever the kernel and the ring."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ulysses.attention.kernels import KERNELS
from tests.breadth import fast_cases
from tests.distributed.harness import run_ranks
from tests.distributed.isolation_case import dense_leaks, leaks

pytestmark = pytest.mark.distributed

ON_CPU = [entry.name for entry in KERNELS if entry.runs_on("cpu")]
LAYOUTS = {"ulysses2": (2, 1), "ring2": (2, 2), "ulysses2-ring2": (4, 2)}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}


@pytest.mark.parametrize(("world_size", "ring_size"), fast_cases(LAYOUTS, "ulysses2", "ulysses2-ring2"))
def test_logits_of_a_dense_model_are_bitwise_alone(world_size: int, ring_size: int) -> None:
    for found in run_ranks(dense_leaks, world_size, ring_size, ON_CPU):
        assert not any(found.values()), found
        assert len(found) == 2 * len(ON_CPU)


@pytest.mark.parametrize(("world_size", "ring_size"), fast_cases(LAYOUTS, "ulysses2-ring2"))
def test_attention_of_a_mixture_is_bitwise_alone_and_its_logits_within_law_1(world_size: int, ring_size: int) -> None:
    """An expert's batch holds other documents' tokens, which changes the order of its sums."""
    for found, error in run_ranks(leaks, world_size, ring_size, "mixtral", "auto", EXPERTS):
        assert "attention" not in found
        assert error <= 1e-5


def test_every_kernel_of_the_table_is_either_probed_here_or_on_a_gpu() -> None:
    assert ON_CPU == ["sdpa", "math"]
    assert {entry.name for entry in KERNELS} - set(ON_CPU) == {"flash_attn_3", "flash_attn", "cudnn", "varlen"}
