"""A start-up self-test that compares attention and gradients on the live process groups with one process.

It takes seconds and detects wrong numbers due to a broken link, driver, kernel or library. There are two checks:
attention over a packed row with the run's heads, dtype, exchange, ring and kernel, against its definition in fp64; and
one optimizer step of a tiny decoder in an engine of the run's ZeRO stage, whose loss scale and gradients are compared
with one process. Ranks share their measurements, so that all continue or all raise the same error. The links are timed
too; the caller decides whether they are slow.

Legend: D head size of queries and keys, E head size of values.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ray_ulysses.attention import ulysses
from ray_ulysses.attention.batch import IGNORE_INDEX, shard_batch
from ray_ulysses.clock import SystemClock
from ray_ulysses.engine import loss as losses
from ray_ulysses.engine.self_test_attention import AttentionSettings, measure_attention
from ray_ulysses.engine.zero import build_engine
from ray_ulysses.errors import BrokenRanksError, RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.collectives import BlockExchange, Circulation
from ray_ulysses.parallel.gpu_environment import nccl_log, transports
from ray_ulysses.parallel.mesh import SequenceMesh

if TYPE_CHECKING:
    from ray_ulysses.attention.kernels import KernelName
    from ray_ulysses.clock import Clock
    from ray_ulysses.engine.zero import ZeroSettings
    from ray_ulysses.parallel.mesh import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTestReport:
    """The measurements of a passed self-test: the worst over all ranks, the same on every rank."""

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
"""A quantity, its relative error on this rank, and the largest error that counts as exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The worst relative error of a quantity over all ranks, and the ranks beyond the bound."""

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
    contiguous ranks. ``zero`` gives stage, dtype and accumulation; its other settings are not used.

    Raises:
        RunError: Results differ; the same error on every rank names the quantity, error, rank and remedy.
        UserError: The requested kernel can't be used here.
    """
    clock = clock or SystemClock()
    started = clock.monotonic()
    kernels = attention.kernel_names(device)
    cuda = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda), torch.enable_grad(), ExitStack() as restored:
            # Keep the tiny decoder's kernels out of the run's log.
            announcing = get_logger(ulysses.__name__)
            restored.callback(setattr, announcing, "disabled", announcing.disabled)
            announcing.disabled = True
            found = _agreed(_attention(mesh, device, attention), device)
            if _wrong_ranks(found):
                raise _attention_error(found, mesh, device, attention, kernels, node)
            attention_error = max(result.error for result in found)
            step = measure_step(mesh, device, zero, attention.kernel, attention.head_groups)
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


def step_bound(least: float, own_error: float) -> float:
    """Return the largest error that counts as exact: at least twice the error of one process, if finite (pure)."""
    return max(least, 2 * own_error) if math.isfinite(own_error) else least


def find_worst(parts: Sequence[str], errors: Sequence[Sequence[float]], bounds: Sequence[float]) -> list[CheckResult]:
    """Return the worst error of every quantity over all ranks; NaN counts as infinite (pure)."""
    results = []
    for place, (what, bound) in enumerate(zip(parts, bounds, strict=True)):
        column = [float("inf") if row[place] != row[place] else row[place] for row in errors]
        rank = max(range(len(column)), key=column.__getitem__)
        wrong = tuple(index for index, error in enumerate(column) if error > bound)
        results.append(CheckResult(what=what, error=column[rank], bound=bound, rank=rank, wrong_ranks=wrong))
    return results


def _agreed(measured: Sequence[_Measured], device: torch.device) -> list[CheckResult]:
    """Gather the errors and bounds of all ranks, so that all return the same results; every rank must call."""
    mine = torch.tensor([numbers for _, *numbers in measured], dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    table = torch.stack(rows).cpu()
    # Bounds follow from the error of one process, which may differ slightly between GPUs.
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
    kernel = _agreed(_attention(alone, device, replace(settings, head_groups=1)), device)
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
    # If a kernel is wrong on every rank, no single device is at fault; an exchange may be wrong on either side.
    return BrokenRanksError(text, broken) if 0 < len(broken) < len(names) else RunError(text)


_GPU_BYTES, _CPU_BYTES = 256 << 20, 1 << 20
"""Bytes per rank: on a GPU about a layer of an 8B model, so that latency matters as much as in a step."""
_TIMES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTime:
    """The time of one exchange, the same on every rank."""

    role: Role
    """Role of the groups, which all exchanged at the same time."""
    ranks: int
    sent_bytes: int
    """Bytes that each rank sends."""
    seconds: float
    """The shortest of a few measurements on the slowest rank."""
    slowest_rank: int
    transports: tuple[str, ...] = ()
    """Transports that NCCL uses to send from that rank, if its log shows them."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second that the slowest rank sends."""
        return self.sent_bytes / self.seconds

    def __str__(self) -> str:
        by = f" by {', '.join(self.transports)}" if self.transports else ""
        return f"{self.role} of {self.ranks} ranks {self.bandwidth / 1e9:.3g} GB/s{by}"


def time_links(mesh: SequenceMesh, device: torch.device, clock: Clock) -> tuple[LinkTime, ...]:
    """Time a training step's exchange on each kind of group; every rank of the world must call.

    Heads are exchanged over ``ulysses``, a block is passed on over ``ring``, and weights are gathered over ``shard``.
    """
    num_bytes = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    sizes: dict[Role, int] = {"ulysses": mesh.ulysses_size, "ring": mesh.ring_size, "shard": mesh.world_size}
    found = []
    for role, ranks in sizes.items():
        if ranks == 1:
            continue
        log_before = nccl_log(os.environ)
        seconds = _seconds(_exchange(role, mesh.group(role), num_bytes, device), device, clock)
        log = nccl_log(os.environ)
        # NCCL logs a connection at its first use, which may have been in an earlier exchange.
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


def _exchange(role: Role, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> Callable[[], object]:
    """Return a function that exchanges over a group like a training step over groups of its role."""
    if role == "ring":
        block = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return lambda: Circulation(block, group, tag=0).wait()
    shape = group.size(), num_bytes // group.size()
    sent, received = (torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2))
    if role == "ulysses":
        return lambda: BlockExchange(list(sent), list(received), group).wait()
    return lambda: dist.all_gather_into_tensor(received.flatten(), sent[0], group=group)


def _seconds(do: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """Return the shortest time of a few runs, after a first run that opens connections."""
    times = []
    for _ in range(_TIMES + 1):
        started = clock.monotonic()
        do()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock.monotonic() - started)
    return min(times[1:])


_SEED = 21
_VOCAB = 61
_HEAD_SIZE = 64
"""Head size of the tiny decoder, which every kernel supports."""
_ROWS: tuple[tuple[int, tuple[int, ...]], ...] = ((48, (29, 1, 12)), (40, (7, 33)))
"""Length of each row and lengths of its documents; the rest is padding."""
_MOST_ACCUMULATION = 2
_NOTHING = 1e-7


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasured:
    """A step on all ranks compared with one process."""

    gradient_error: float
    """Norm-wise relative error of the worst tensor against one process in fp64."""
    worst_tensor: str
    own_error: float
    """The same error for one process in the run's dtype."""
    norm_ratio: float
    """The engine's global gradient norm divided by one process's."""


def measure_step(
    mesh: SequenceMesh, device: torch.device, settings: ZeroSettings, kernel: KernelName, head_groups: int = 1
) -> StepMeasured:
    """Train one step of a tiny decoder and compare its gradients with one process's; every rank must call."""
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    accumulation = min(settings.accumulation, _MOST_ACCUMULATION)
    sp_first = dist.get_global_rank(mesh.group("sp"), 0)
    dp_rank, dp_size = sp_first // mesh.sp_size, mesh.world_size // mesh.sp_size
    # Two alternating rows, so that the reference for any world size is two weighted rows.
    weights = [0, 0]
    for index in range(dp_size * accumulation):
        weights[index % 2] += 1
    mine = [(dp_rank * accumulation + micro) % 2 for micro in range(accumulation)]

    tiny = replace(
        settings,
        accumulation=accumulation,
        offload_optimizer="none",
        offload_param="none",
        partition_everything=True,
        max_grad_norm=1.0,
    )
    with _collected():
        model = ulysses.apply_ulysses(_tiny_decoder(mesh, dtype, device), mesh, kernel, head_groups=head_groups)
        gradients, norm = _engine_step(model, tiny, mesh, device, mine)
        del model
    own = _one_process(_tiny_decoder(mesh, dtype, device), weights)
    wanted = _one_process(_tiny_decoder(mesh, dtype, device).double(), weights)
    error, worst = worst_error(gradients, wanted)
    whole = float(torch.stack([gradient.norm() for gradient in wanted.values()]).norm())
    return StepMeasured(
        gradient_error=error, worst_tensor=worst, own_error=worst_error(own, wanted)[0], norm_ratio=norm / whole
    )


def worst_error(ours: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest norm-wise relative error of a tensor, and its name.

    If a tensor's norm is below 1e-7 of the whole gradient's, its error is relative to the whole. NaN counts as
    infinite.
    """
    assert ours.keys() == truth.keys()
    whole = float(torch.stack([gradient.double().norm() for gradient in truth.values()]).norm())
    errors = {}
    for name, wanted in truth.items():
        norm = float(wanted.double().norm())
        error = float((ours[name].double() - wanted.double()).norm()) / (norm if norm >= _NOTHING * whole else whole)
        errors[name] = error if error == error else float("inf")
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def _engine_step(
    model: Any, settings: ZeroSettings, mesh: SequenceMesh, device: torch.device, mine: list[int]
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the engine's whole gradients and their norm, and destroy the engine."""
    import deepspeed

    batches = [shard_batch(*_row(index, device), _ROWS[index][1], mesh) for index in mine]
    tokens = torch.stack([(batch.labels_BL != IGNORE_INDEX).sum() for batch in batches]).sum()
    dist.all_reduce(tokens, group=mesh.group("loss"))
    scale = losses.loss_scale(int(tokens), mesh, zero_stage=settings.stage, accumulation=settings.accumulation)
    engine = build_engine(model, settings)
    try:
        engine.train()
        for place, batch in enumerate(batches):
            loss_sum, _ = losses.causal_lm_loss(engine, batch)
            engine.backward(loss_sum * scale)
            # The engine's step on the last micro-batch would free the gradients.
            if place + 1 < len(batches):
                engine.step()
        gradients = {
            name: deepspeed.utils.safe_get_full_grad(parameter).clone()
            for name, parameter in engine.module.named_parameters()
        }
        engine.step()
        norm = float(engine.get_global_grad_norm())
    finally:
        engine.destroy()
        _forget(model)
    return gradients, norm


def _forget(model: Any) -> None:
    """Remove a model from the global stack in which ZeRO-3 of DeepSpeed 0.19.8 keeps models alive."""
    from deepspeed.runtime.zero import parameter_offload

    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not model]


@contextmanager
def _collected() -> Iterator[None]:
    """Free an engine's reference cycles (hooks and partitions) immediately.

    Older objects are frozen, since scanning them takes up to a second, more than the rest.
    """
    is_first = gc.get_freeze_count() == 0
    if is_first:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if is_first:
            gc.unfreeze()


def _tiny_decoder(mesh: SequenceMesh, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a two-layer model, the same on every rank, with two KV heads and at least one query head per rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(_SEED)
    num_heads = max(4, mesh.ulysses_size + mesh.ulysses_size % 2)
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=num_heads * (8 if num_heads < 32 else 1),
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        head_dim=_HEAD_SIZE,
        max_position_embeddings=64,
        # Large enough to make attention far from uniform, so that its gradients matter.
        initializer_range=0.15,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        # Buffers keep fp32: rounded rotary frequencies would differ from the run's.
        parameter.data = parameter.data.to(dtype)
    return model.to(device)


def _row(index: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels ``[1, S]`` of a row; some labels are ignored."""
    generator = torch.Generator().manual_seed(_SEED + index)
    input_ids = torch.randint(0, _VOCAB, (1, _ROWS[index][0]), generator=generator).to(device)
    labels = input_ids.clone()
    labels[:, 3:6] = IGNORE_INDEX
    return input_ids, labels


def _one_process(model: Any, weights: list[int]) -> dict[str, torch.Tensor]:
    """Return the gradients of one process, with every document processed alone."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for index, weight in enumerate(weights):
        if not weight:
            continue
        input_ids, labels = _row(index, model.device)
        start = 0
        for length in _ROWS[index][1]:
            part = slice(start, start + length)
            logits = model(input_ids=input_ids[:, part], use_cache=False).logits[0, :-1]
            targets = labels[0, part][1:]
            loss = torch.nn.functional.cross_entropy(
                logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="sum"
            )
            total = total.to(loss.device) + weight * loss
            count += weight * int((targets != IGNORE_INDEX).sum())
            start += length
    (total / count).backward()
    return {name: parameter.grad.detach() for name, parameter in model.named_parameters()}
