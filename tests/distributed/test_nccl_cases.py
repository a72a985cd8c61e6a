"""Points of law 1 and of the self-test that several ranks run over NCCL on one GPU, and over gloo on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.harness import Device, run_calls
from tests.distributed.seam_case import SeamCase, check, run_cases
from tests.distributed.test_seam_parity import LEAN
from tests.distributed.test_self_test import attention_settings, passes, zero_settings

TWO: dict[str, Any] = {"ulysses_size": 2, "zero_stage": 3, "accumulation": 2}
SEAM: dict[int, list[SeamCase]] = {
    # By the number of ranks.
    2: [
        *(SeamCase(architecture="llama", **{**TWO, "zero_stage": stage}) for stage in (1, 2, 3)),
        SeamCase(architecture="llama", ring_size=2, zero_stage=3, accumulation=2),
        SeamCase(architecture="llama", **TWO, kept="both", head_groups=2, has_fused_norms=True),
        SeamCase(architecture="mixtral", **TWO),
        SeamCase(architecture="qwen3_next", **TWO, kept="both"),
        SeamCase(architecture="jamba", ulysses_size=2, accumulation=2),
        SeamCase(architecture="untied", adapter="linear", **TWO, **LEAN),
        SeamCase(architecture="untied", adapter="extension", **{**TWO, "zero_stage": 1}, **LEAN),
    ],
    4: [
        SeamCase(architecture="llama", ulysses_size=4, zero_stage=3, accumulation=2),
        SeamCase(architecture="llama", ring_size=2, **TWO),
        *(SeamCase(architecture="llama", dp_size=2, **{**TWO, "zero_stage": stage}) for stage in (1, 2, 3)),
    ],
}  # fmt: skip
FP32, BF16 = attention_settings(), attention_settings(torch.bfloat16, head_size=128, value_size=128)
SELF_TESTS: dict[int, dict[str, tuple[Any, ...]]] = {
    # By the number of ranks and a name: sp_size, ring_size.
    2: {
        "sp 2, ZeRO 3, bf16": (2, 1, BF16, zero_settings(dtype="bf16", accumulation=2)),
        "ring 2, ZeRO 2": (2, 2, FP32, zero_settings(stage=2, accumulation=2)),
        "head_groups 2, ZeRO 3": (2, 1, attention_settings(head_groups=2), zero_settings(accumulation=2)),
    },
    4: {"sp 4, ring 2, ZeRO 3": (4, 2, FP32, zero_settings(accumulation=2))},
}


def run_all(world_size: int, device: Device) -> dict[str, str]:
    """Run every case of one number of ranks; return what each measured, and raise if one fails.

    The self-test raises by itself, and comes first.
    """
    self_tests = SELF_TESTS[world_size]
    calls: dict[str, tuple[Any, ...]] = {name: (passes, *case, device) for name, case in self_tests.items()}
    calls["seam"] = (run_cases, SEAM[world_size], device)
    ranks = run_calls(world_size, calls, timeout_s=400, device=device)
    found = {name: ranks[name][0].in_words() for name in self_tests}
    for result in ranks["seam"][0]:
        check(result)
        found[result.case.label] = f"loss {result.loss_error:.1e}, gradient {result.gradient_error:.2f} of its bound"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_cases_of_a_gpu_pass_on_cpus(ranks: int) -> None:
    assert len(run_all(ranks, "cpu")) >= 6
