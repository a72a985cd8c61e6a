"""A start-up self-test that compares attention and gradients on the live process groups with one process.

It takes seconds and detects wrong numbers due to a broken link, driver, kernel or library. There are two checks:
attention over a packed row with the run's heads, dtype, exchange, ring and kernel, against its definition in fp64; and
one optimizer step of a tiny decoder in an engine of the run's ZeRO stage, whose loss scale and gradients are compared
with one process. Ranks share their measurements, so that all continue or all raise the same error. The links are timed,
too; whether they are slow is for the caller to judge.

Legend: D head size of queries and keys, E head size of values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ray_ulysses.attention import ulysses
from ray_ulysses.clock import SystemClock
from ray_ulysses.engine.self_test_attention import AttentionSettings, measure_attention
from ray_ulysses.engine.self_test_step import measure_step
from ray_ulysses.errors import BrokenRanksError, RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.collectives import BlockExchange, Circulation
from ray_ulysses.parallel.gpu_environment import nccl_log, transports
from ray_ulysses.parallel.mesh import SequenceMesh

if TYPE_CHECKING:
    from ray_ulysses.clock import Clock
    from ray_ulysses.engine.zero import ZeroSettings
    from ray_ulysses.parallel.mesh import Role, SequenceMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTestReport:
    """The measurements of a passed self-test: the worst of all ranks, the same on each."""

    attention_error: float
    """Relative error of attention's output and gradients against their definition."""
    gradient_error: float
    """Relative error of a tiny decoder's gradients against one process, for the worst tensor."""
    norm_ratio: float
    """The engine's global gradient norm over one process's."""
    kernels: tuple[str, ...]
    links: tuple[LinkTime, ...] = ()
    """The time of one exchange per kind of group; empty with one rank."""
    seconds: float

    def in_words(self) -> str:
        """Return the line that a run logs."""
        links = "".join(f"; {link}" for link in self.links)
        return (
            f"self-test passed in {self.seconds:.1f} s: attention {self.attention_error:.0e}, gradients "
            f"{self.gradient_error:.0e}, norm ratio {self.norm_ratio:.3f} (kernel {', '.join(self.kernels)}){links}"
        )


_Measured = tuple[str, float, float]
"""A quantity, its relative error on this rank, and the bound of what counts as exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The worst relative error of a quantity over all ranks, and the ranks beyond the bound of what counts as exact."""

    what: str
    error: float
    bound: float
    rank: int
    wrong_ranks: tuple[int, ...]


def run_self_test(
    mesh: SequenceMesh,
    device: torch.device,
    attention: AttentionSettings,
    zero: ZeroSettings,
    *,
    node: str = "",
    clock: Clock | None = None,
) -> SelfTestReport:
    """Compare the live environment with one process; every rank of the world must call, with the same settings.

    Random state, hooks and memory are restored. ``prepare_process`` must have been called, and ``sp`` groups must be
    contiguous ranks.

    Args:
        mesh: The run's mesh.
        device: The run's device.
        attention: The run's attention.
        zero: The run's engine settings, of which stage, dtype and accumulation are used.
        node: Name of this rank's node, for errors.
        clock: The clock.

    Raises:
        RunError: Results differ; the same error on every rank names the quantity, error, rank and remedy.
        UserError: The requested kernel can't be used here.
    """
    clock = clock or SystemClock()
    started = clock.monotonic()
    kernels = attention.kernel_names(device)
    cuda = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda), torch.enable_grad(), _unannounced():
            found = _agreed(_attention(mesh, device, attention), device)
            if _wrong_ranks(found):
                raise _attention_error(found, mesh, device, attention, kernels, node)
            attention_error = max(result.error for result in found)
            step = measure_step(mesh, device, zero, attention.kernel, attention.chunks)
            bound = step_bound(attention.bound, step.own_error)
            measured = [
                (f"the gradient of {step.worst_tensor}", step.gradient_error, bound),
                ("the norm of the whole gradient", abs(step.norm_ratio - 1), bound),
            ]
            found = _agreed(measured, device)
            if _wrong_ranks(found):
                raise _step_error(found, step.norm_ratio, mesh, zero, node)
            links = time_links(mesh, device, clock)
    finally:
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return SelfTestReport(
        attention_error=attention_error,
        gradient_error=found[0].error,
        norm_ratio=step.norm_ratio,
        kernels=kernels,
        links=links,
        seconds=clock.monotonic() - started,
    )


@contextmanager
def _unannounced() -> Iterator[None]:
    """Keep the choice of kernels for the tiny decoder out of the run's log."""
    logger = get_logger(ulysses.__name__)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def step_bound(least: float, own_error: float) -> float:
    """Return what counts as exact: twice the error of one process, but where that has no finite one (pure)."""
    return max(least, 2 * own_error) if math.isfinite(own_error) else least


def find_worst(parts: Sequence[str], errors: Sequence[Sequence[float]], bounds: Sequence[float]) -> list[CheckResult]:
    """Return the worst error of every quantity over all ranks; NaN counts as infinite."""
    results = []
    for place, (what, bound) in enumerate(zip(parts, bounds, strict=True)):
        column = [float("inf") if row[place] != row[place] else row[place] for row in errors]
        rank = max(range(len(column)), key=column.__getitem__)
        wrong = tuple(index for index, error in enumerate(column) if error > bound)
        results.append(CheckResult(what=what, error=column[rank], bound=bound, rank=rank, wrong_ranks=wrong))
    return results


def _agreed(measured: Sequence[_Measured], device: torch.device) -> list[CheckResult]:
    """Gather the errors and bounds of all ranks, so that all get the same results; every rank must call."""
    mine = torch.tensor([numbers for _, *numbers in measured], dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    table = torch.stack(rows).cpu()
    # Bounds follow from one process's error, which may differ slightly between GPUs.
    bounds = table[:, :, 1].amin(dim=0).tolist()
    return find_worst([what for what, *_ in measured], table[:, :, 0].tolist(), bounds)


def _wrong_ranks(found: Sequence[CheckResult]) -> frozenset[int]:
    return frozenset(rank for result in found for rank in result.wrong_ranks)


def _worst(found: Sequence[CheckResult]) -> CheckResult:
    return max(found, key=lambda result: result.error / result.bound)


def _attention(mesh: SequenceMesh, device: torch.device, settings: AttentionSettings) -> list[_Measured]:
    return [
        (f"{name} of {'full' if window is None else 'sliding-window'} attention", error, settings.bound)
        for window in settings.windows
        for name, error in measure_attention(mesh, device, settings, window).items()
    ]


def _attention_error(
    found: Sequence[CheckResult],
    mesh: SequenceMesh,
    device: torch.device,
    settings: AttentionSettings,
    kernels: tuple[str, ...],
    node: str,
) -> RunError:
    """Return the error, after testing whether the kernel or the exchange is wrong; every rank must call."""
    alone = SequenceMesh(sp_size=1, sp_rank=0, ring_size=1, world_size=1)
    kernel = _agreed(_attention(alone, device, replace(settings, chunks=1)), device)
    names = ", ".join(kernels)
    wrong_ranks = _wrong_ranks(kernel)
    if wrong_ranks:
        worst = _worst(kernel)
        cause = (
            f"the kernel is already wrong in one process ({worst.what}: {worst.error:.1e}): use another one "
            "(model.attention: sdpa on CPU, varlen or math on a GPU), or another build of torch or flash-attn"
        )
    else:
        layout = f"ulysses {mesh.ulysses_size} x ring {mesh.ring_size}"
        cause = (
            f"the kernel alone is exact, so the exchange between ranks ({layout}) is wrong: run ray-ulysses doctor on "
            "these nodes, check driver, NCCL and links there (NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 shows whether a "
            "link is the cause), or remove the node"
        )
    against = f"its definition in fp64 (kernel {names}; {settings.in_words()})"
    return _error(found, against, cause, node, broken=wrong_ranks)


def _step_error(
    found: Sequence[CheckResult], norm_ratio: float, mesh: SequenceMesh, zero: ZeroSettings, node: str
) -> RunError:
    """Return the error for loss scale or gradients; every rank must call."""
    cause = (
        f"the gradient's norm is {norm_ratio:.4f} of one process's (compare with sp_size={mesh.sp_size}, the world "
        f"size of {dist.get_world_size()} and the accumulation), and attention is exact: install the versions of "
        "constraints.txt (deepspeed, torch, transformers), and run ray-ulysses doctor on these nodes"
    )
    against = f"one process's (a tiny decoder, ZeRO-{zero.stage}, {zero.dtype})"
    return _error(found, against, cause, node)


def _error(
    found: Sequence[CheckResult], against: str, cause: str, node: str, broken: frozenset[int] = frozenset()
) -> RunError:
    """Return the error; ``broken`` are the ranks that are wrong on their own. Every rank must call."""
    worst, wrong_ranks = _worst(found), _wrong_ranks(found)
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, node)
    place = f"rank {worst.rank}" + (f" on {names[worst.rank]}" if names[worst.rank] else "")
    text = (
        f"the self-test failed on {len(wrong_ranks)} of {len(names)} ranks, most on {place}: {worst.what} differs from "
        f"{against} by {worst.error:.1e} of its norm, and {worst.bound:.0e} counts as exact. "
        f"{cause[0].upper()}{cause[1:]}. run.self_test: false would skip this check and train wrongly"
    )
    # A kernel that is wrong on every rank is no device's fault, and an exchange may be wrong on either side.
    return BrokenRanksError(text, broken) if 0 < len(broken) < len(names) else RunError(text)


_GPU_BYTES, _CPU_BYTES = 256 << 20, 1 << 20
"""Bytes of each rank: on a GPU about those of a layer of 8B parameters, so that latency weighs as much as in a step."""
_TIMES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTime:
    """The time of one exchange, the same on every rank."""

    role: Role
    """The groups that exchanged, all at once."""
    ranks: int
    sent_bytes: int
    """Bytes that each rank sends."""
    seconds: float
    """The shortest of a few times on the slowest rank."""
    slowest_rank: int
    transports: tuple[str, ...] = ()
    """What NCCL sends by from that rank, as far as its log tells."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second that the slowest rank sends."""
        return self.sent_bytes / self.seconds

    def __str__(self) -> str:
        by = f" by {', '.join(self.transports)}" if self.transports else ""
        return f"{self.role} of {self.ranks} ranks {self.bandwidth / 1e9:.3g} GB/s{by}"


def time_links(mesh: SequenceMesh, device: torch.device, clock: Clock) -> tuple[LinkTime, ...]:
    """Time an exchange as a step makes it on each kind of group; every rank of the world must call.

    Heads are exchanged over ``ulysses``, a block is passed on over ``ring``, and weights are gathered over ``shard``.
    """
    num_bytes = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    kinds: list[tuple[Role, int, Callable[[dist.ProcessGroup, int], Callable[[], object]]]] = [
        ("ulysses", mesh.ulysses_size, lambda group, ranks: _exchange(group, ranks, num_bytes, device)),
        ("ring", mesh.ring_size, lambda group, ranks: _circulation(group, num_bytes, device)),
        ("shard", mesh.world_size, lambda group, ranks: _gathering(group, ranks, num_bytes, device)),
    ]
    found = []
    for role, ranks, prepare in kinds:
        if ranks == 1:
            continue
        log_before = nccl_log(os.environ)
        seconds = _seconds(prepare(mesh.group(role), ranks), device, clock)
        log = nccl_log(os.environ)
        # Connections are made at their first use, unless another exchange has used them.
        own = transports(log[len(log_before) :]) or transports(log)
        every: list[tuple[float, tuple[str, ...]]] = [(0.0, ())] * dist.get_world_size()
        dist.all_gather_object(every, (seconds, own))
        slowest = max(range(len(every)), key=lambda rank: every[rank][0])
        found.append(
            LinkTime(
                role=role,
                ranks=ranks,
                sent_bytes=num_bytes if role == "ring" else num_bytes // ranks * (ranks - 1),
                seconds=every[slowest][0],
                slowest_rank=slowest,
                transports=every[slowest][1],
            )
        )
    return tuple(found)


def _exchange(group: dist.ProcessGroup, ranks: int, num_bytes: int, device: torch.device) -> Callable[[], object]:
    sent, received = (torch.zeros(ranks, num_bytes // ranks, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: BlockExchange(list(sent), list(received), group).wait()


def _circulation(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> Callable[[], object]:
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return lambda: Circulation(sent, group, tag=0).wait()


def _gathering(group: dist.ProcessGroup, ranks: int, num_bytes: int, device: torch.device) -> Callable[[], object]:
    own = torch.zeros(num_bytes // ranks, dtype=torch.uint8, device=device)
    gathered = torch.empty(ranks * len(own), dtype=torch.uint8, device=device)
    return lambda: dist.all_gather_into_tensor(gathered, own, group=group)


def _seconds(do: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """Return the shortest of a few times, after one in which connections are made."""
    times = []
    for _ in range(_TIMES + 1):
        started = clock.monotonic()
        do()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock.monotonic() - started)
    return min(times[1:])
