"""The self-test passes on exact ranks in a few seconds, catches what it is for, and fails alike on every rank."""

from __future__ import annotations

import gc
import importlib
import time
from typing import Any

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
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed

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
    """Run it, and hold the process to what it was before."""
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
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "sp", "ring", "attention", "zero"), fast_cases(CASES, "sp2-bf16", "sp4-ring2"))
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


def test_the_slowest_rank_of_an_exchange_is_named_on_every_rank() -> None:
    for links in run_ranks(links_with_a_slow_rank, 2):
        assert [(link.role, link.slowest_rank) for link in links] == [("ulysses", 1), ("shard", 1)]


def swap_blocks() -> None:
    """Make the exchange deliver blocks in another order."""
    true_exchange = exchange.send_heads

    def swapped(tensors: Any, kinds: Any, plan: Any, group: Any) -> torch.Tensor:
        return true_exchange(tensors, kinds, plan, group).flip(0)

    exchange.send_heads = swapped


def scale_by_sp() -> None:
    """Make the loss scale wrong by the number of ranks that share a row."""
    true_scale = losses.loss_scale

    def scaled(tokens: Any, mesh: SequenceMesh, zero_stage: int = 3, accumulation: int = 1) -> Any:
        return true_scale(tokens, mesh, zero_stage, accumulation) * mesh.sp_size

    losses.loss_scale = scaled


def ignore_documents() -> None:
    """Make every kernel that works document by document see one document only."""

    def one(call: KernelCall) -> list[tuple[slice, slice]]:
        return [(slice(0, call.query_THD.shape[0]), slice(0, call.key_UKD.shape[0]))]

    KernelCall.each_span = one  # type: ignore[method-assign]


FAULTS = {
    "swap_blocks": (swap_blocks, "the exchange between ranks"),
    "scale_by_sp": (scale_by_sp, "gradient norm is 2.0000"),
    "ignore_documents": (ignore_documents, "model.attention"),
}


def fails(rank: int, world_size: int, fault: str, only_rank: int | None) -> tuple[str, str]:
    """Plant a fault; return what the self-test raised, and the kind of error."""
    mesh = _mesh(world_size, 2, 1)
    if only_rank in (None, rank):
        FAULTS[fault][0]()
    try:
        run_self_test(mesh, CPU, attention_settings(), zero_settings(accumulation=2), node=f"node-{rank}")
    except RunError as error:
        return str(error), kind_of(error, rank)
    raise AssertionError("the fault was not found")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_alike_on_every_rank(fault: str) -> None:
    outcomes = run_ranks(fails, 2, fault, None, timeout_s=60)
    assert len(set(outcomes)) == 1
    text, kind = outcomes[0]
    assert kind == "raised" and "failed on 2 of 2 ranks" in text and "run.self_test" in text
    assert FAULTS[fault][1] in text


def test_the_rank_whose_own_kernel_is_wrong_is_the_cause() -> None:
    """The run goes on without its node; its partner, whose part of the row it has spoilt, is as good as the others."""
    outcomes = run_ranks(fails, 4, "ignore_documents", 3, timeout_s=60)
    assert [kind for _, kind in outcomes] == ["consequence", "consequence", "consequence", "device"]
