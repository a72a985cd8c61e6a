"""The cases of law 1 and of the self-test that several ranks run over NCCL on one GPU, and over gloo on CPUs."""

from __future__ import annotations

from typing import Any

import torch

from ray_ulysses.engine.self_test_attention import AttentionSettings
from ray_ulysses.engine.zero import ZeroSettings
from tests.distributed import adapter_case, seam_case, test_self_test
from tests.distributed.adapter_case import AdapterCase
from tests.distributed.harness import Device, run_calls
from tests.distributed.seam_case import SeamCase
from tests.distributed.test_adapter import check as check_adapter
from tests.distributed.test_seam_parity import check as check_seam

SEAM: dict[int, list[SeamCase]] = {
    # By the number of ranks.
    2: [
        *(SeamCase(architecture="llama", ulysses_size=2, zero_stage=stage, accumulation=2) for stage in (1, 2, 3)),
        SeamCase(architecture="llama", ring_size=2, zero_stage=3, accumulation=2),
        SeamCase(architecture="llama", ulysses_size=2, zero_stage=3, accumulation=2, kept="both", head_groups=2),
        SeamCase(architecture="mixtral", ulysses_size=2, zero_stage=3, accumulation=2),
        SeamCase(architecture="qwen3_next", ulysses_size=2, zero_stage=3, accumulation=2, kept="both"),
        SeamCase(architecture="jamba", ulysses_size=2, accumulation=2),
    ],
    4: [
        SeamCase(architecture="llama", ulysses_size=4, zero_stage=3, accumulation=2),
        SeamCase(architecture="llama", ulysses_size=2, ring_size=2, zero_stage=3, accumulation=2),
        *(SeamCase(architecture="llama", ulysses_size=2, dp_size=2, zero_stage=n, accumulation=2) for n in (1, 2, 3)),
    ],
}  # fmt: skip
ADAPTERS: dict[int, list[AdapterCase]] = {
    2: [
        AdapterCase(adapter="linear", ulysses_size=2),
        AdapterCase(adapter="extension", ulysses_size=2, zero_stage=1),
        AdapterCase(adapter="mlp", ring_size=2, zero_stage=2, is_lean=False),
    ],
    4: [],
}


def _attention(dtype: torch.dtype, head_size: int, head_groups: int = 1) -> AttentionSettings:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": head_size, "value_size": head_size}
    return AttentionSettings(dtype=dtype, head_groups=head_groups, **sizes)


def _zero(stage: Any, dtype: Any, accumulation: int = 2) -> ZeroSettings:
    return ZeroSettings(
        stage=stage, dtype=dtype, accumulation=accumulation, max_grad_norm=1.0, learning_rate=1e-3, betas=(0.9, 0.95),
        eps=1e-8, weight_decay=0.1,
    )  # fmt: skip


FP32, BF16 = _attention(torch.float32, 16), _attention(torch.bfloat16, 128)
SELF_TESTS: dict[int, dict[str, tuple[int, int, AttentionSettings, ZeroSettings]]] = {
    # By the number of ranks and a name: sp_size, ring_size.
    2: {
        "self-test, sp 2, ZeRO 1": (2, 1, FP32, _zero(1, "fp32")),
        "self-test, sp 2, ZeRO 3, bf16": (2, 1, BF16, _zero(3, "bf16")),
        "self-test, ring 2, ZeRO 2": (2, 2, FP32, _zero(2, "fp32")),
        "self-test, head_groups 2, ZeRO 3": (2, 1, _attention(torch.float32, 16, 2), _zero(3, "fp32")),
    },
    4: {
        "self-test, sp 4, ZeRO 3, bf16": (4, 1, BF16, _zero(3, "bf16")),
        "self-test, sp 4, ring 2, ZeRO 3": (4, 2, FP32, _zero(3, "fp32")),
    },
}


def run_all(world_size: int, device: Device, every: int = 1) -> dict[str, str]:
    """Run every case, or every nth, of one number of ranks; return what each measured, and raise if one fails.

    The self-test raises by itself, and comes first.
    """
    self_tests = dict(list(SELF_TESTS[world_size].items())[::every])
    calls: dict[str, tuple[Any, ...]] = {
        name: (test_self_test.passes, *case, device) for name, case in self_tests.items()
    }
    calls["seam"] = (seam_case.run_cases, SEAM[world_size][::every], device)
    calls["adapters"] = (adapter_case.run_cases, ADAPTERS[world_size][::every], device)
    ranks = run_calls(world_size, calls, timeout_s=400, device=device)
    found = {name: ranks[name][0].in_words() for name in self_tests}
    failures: list[str] = []
    for name, check in (("seam", check_seam), ("adapters", check_adapter)):
        for result in ranks[name][0]:
            words = f"loss {result.loss_error:.1e}, worst gradient {result.gradient_error:.2f} of its bound"
            found[f"{name}, {result.case.label}"] = words
            try:
                check(result)
            except AssertionError as error:
                failures.append(str(error))
    assert not failures, "\n".join(failures)
    return found
