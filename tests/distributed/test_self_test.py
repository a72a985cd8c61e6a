"""The self-test passes on exact ranks in a few seconds, catches what it is for, and fails alike on every rank."""

from __future__ import annotations

import gc
import importlib
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from ray_ulysses.attention import exchange
from ray_ulysses.attention.kernels.call import KernelCall
from ray_ulysses.clock import SystemClock
from ray_ulysses.elastic.causes import kind_of
from ray_ulysses.engine import loss as losses
from ray_ulysses.engine.self_test import LinkTime, SelfTestReport, run_self_test, time_links
from ray_ulysses.engine.self_test_attention import AttentionSettings
from ray_ulysses.engine.zero import ZeroSettings
from ray_ulysses.errors import RunError
from ray_ulysses.parallel.layout import ParallelLayout
from ray_ulysses.parallel.mesh import SequenceMesh
from tests.breadth import fast_cases
from tests.distributed.harness import run_calls, run_ranks

CPU = torch.device("cpu")


def attention_settings(dtype: torch.dtype = torch.float32, **changes: Any) -> AttentionSettings:
    sizes: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 16, "value_size": 16}
    return AttentionSettings(dtype=dtype, **{**sizes, **changes})


def zero_settings(**changes: Any) -> ZeroSettings:
    settings: dict[str, Any] = {"stage": 3, "dtype": "fp32", "accumulation": 1, "max_grad_norm": None}
    return ZeroSettings(learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **{**settings, **changes})


def _mesh(world_size: int, sp_size: int, ring_size: int) -> SequenceMesh:
    # A run imports these, self-test or not: seconds on a busy machine that are not the test's own.
    for name in ("torch._inductor.compile_fx", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    # The server that ranks are forked from has frozen its objects; a run's process begins with none.
    gc.unfreeze()
    return SequenceMesh.from_layout(ParallelLayout(world_size=world_size, sp_size=sp_size, ring_size=ring_size))


def passes(
    rank: int,
    world_size: int,
    sp_size: int,
    ring_size: int,
    attention: AttentionSettings,
    zero: ZeroSettings,
    device: str = "cpu",
) -> SelfTestReport:
    mesh = _mesh(world_size, sp_size, ring_size)
    torch.manual_seed(rank)
    random_state = torch.get_rng_state()
    began = time.process_time()
    report = run_self_test(mesh, torch.device(device), attention, zero, node=f"node-{rank}")
    # Of CPU time, so that a busy machine does not fail the test; a GPU's kernels are loaded first.
    assert device != "cpu" or time.process_time() - began < 5
    assert torch.equal(random_state, torch.get_rng_state())
    assert gc.get_freeze_count() == 0
    return report


CASES: dict[str, tuple[int, int, int, AttentionSettings, ZeroSettings]] = {
    # ranks, sp_size, ring_size
    "alone-bf16": (1, 1, 1, attention_settings(torch.bfloat16), zero_settings(dtype="bf16", accumulation=2)),
    "sp2-windows-and-sinks": (
        2, 2, 1, attention_settings(windows=(None, 4096), has_sinks=True), zero_settings(stage=2),
    ),
    "sp2-softcap": (2, 2, 1, attention_settings(softcap=5.0), zero_settings(stage=1)),
    "sp2-bf16": (2, 2, 1, attention_settings(torch.bfloat16), zero_settings(dtype="bf16", accumulation=6)),
    "sp2-dp2": (4, 2, 1, attention_settings(num_heads=6, num_kv_heads=3), zero_settings(accumulation=3)),
    "sp4-ring2": (4, 4, 2, attention_settings(), zero_settings()),
    "ring2-bidirectional": (2, 2, 2, attention_settings(windows=(None, 10), causal=False), zero_settings(stage=1)),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "sp", "ring", "attention", "zero"), fast_cases(CASES, "sp4-ring2"))
def test_exact_ranks_pass_in_seconds_and_report_alike(
    ranks: int, sp: int, ring: int, attention: AttentionSettings, zero: ZeroSettings
) -> None:
    reports = run_ranks(passes, ranks, sp, ring, attention, zero)
    bound = 2e-2 if zero.dtype == "bf16" else 1e-5
    groups = {"ulysses": sp // ring, "ring": ring, "shard": ranks}
    for report in reports:
        assert report.attention_error <= bound
        # bf16: one process has such an error of its own, which is what the test allows for.
        assert report.gradient_error <= (3 * bound if zero.dtype == "bf16" else bound)
        assert abs(report.norm_ratio - 1.0) < (5e-2 if zero.dtype == "bf16" else 5e-4)
        assert report.kernels == (("math",) if attention.softcap else ("sdpa",))
        assert (report.attention_error, report.links) == (reports[0].attention_error, reports[0].links)
        # Each kind of group that the layout has.
        assert {link.role: link.ranks for link in report.links} == {role: n for role, n in groups.items() if n > 1}
        assert all(link.bandwidth > 0 for link in report.links)


class SlowClock(SystemClock):
    """A clock by which everything takes longer on one rank."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def monotonic(self) -> float:
        return super().monotonic() * self._factor


def links_with_a_slow_rank(rank: int, world_size: int) -> tuple[LinkTime, ...]:
    mesh = SequenceMesh.from_layout(ParallelLayout(world_size=world_size, sp_size=2))
    return time_links(mesh, CPU, SlowClock(1e3 if rank == 1 else 1.0))


def see_one_document(call: KernelCall) -> list[tuple[slice, slice]]:
    return [(slice(0, call.query_THD.shape[0]), slice(0, call.key_UKD.shape[0]))]


FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    # What makes a wrong function of the real one, and what the error says.
    "swapped blocks": (
        exchange, "send_heads", lambda real: lambda *blocks: real(*blocks).flip(0), "the exchange between ranks",
    ),
    "scaled by sp": (
        losses, "loss_scale",
        lambda real: lambda tokens, mesh, *others, **options: real(tokens, mesh, *others, **options) * mesh.sp_size,
        "gradient norm is 2.0000",
    ),
    "ignored documents": (KernelCall, "each_span", lambda real: see_one_document, "model.attention"),
}  # fmt: skip


def fails(rank: int, world_size: int, fault: str, only_rank: int | None) -> tuple[str, str]:
    """Plant a fault; return what the self-test raised, and the kind of error."""
    mesh = _mesh(world_size, 2, 1)
    owner, name, spoil, _ = FAULTS[fault]
    planted = mock.patch.object(owner, name, spoil(getattr(owner, name)))
    try:
        with planted if only_rank in (None, rank) else nullcontext():
            run_self_test(mesh, CPU, attention_settings(), zero_settings(accumulation=2), node=f"node-{rank}")
    except RunError as error:
        return str(error), kind_of(error, rank)
    raise AssertionError("the fault was not found")


def test_a_planted_fault_is_named_alike_on_every_rank_and_so_is_a_slow_rank() -> None:
    calls = {fault: (fails, fault, None) for fault in FAULTS}
    found = run_calls(2, {"links": (links_with_a_slow_rank,), **calls}, timeout_s=120)
    for links in found.pop("links"):
        assert [(link.role, link.slowest_rank) for link in links] == [("ulysses", 1), ("shard", 1)]
    for fault, outcomes in found.items():
        assert len(set(outcomes)) == 1
        text, kind = outcomes[0]
        assert kind == "raised" and "failed on 2 of 2 ranks" in text and "run.self_test" in text
        assert FAULTS[fault][3] in text


def test_the_rank_whose_own_kernel_is_wrong_is_the_cause() -> None:
    """The run goes on without its node; its partner, whose part of the row it has spoilt, is as good as the others."""
    outcomes = run_ranks(fails, 4, "ignored documents", 3, timeout_s=60)
    assert [kind for _, kind in outcomes] == ["consequence", "consequence", "consequence", "device"]
