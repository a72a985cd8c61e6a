"""Tests attention and gradients at start-up by comparing the live process groups with a single process.

The test takes seconds and detects wrong results caused by a broken link, driver, kernel or library. It consists of two
checks. The first runs attention over a packed row, with the run's heads, dtype, exchange, ring and kernel, and compares
the result with the definition of attention in fp64. The second runs one optimizer step of a tiny decoder in an engine
with the run's ZeRO stage, and compares the loss scale and gradients with those of a single process. Ranks exchange
their measurements, so either all ranks continue or all raise the same error. The test also times the links; the caller
decides whether any link is too slow.

Legend: D head size of queries and keys, E head size of values.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ray_ulysses.attention import ulysses
from ray_ulysses.attention.batch import IGNORE_INDEX, shard_batch
from ray_ulysses.attention.kernels import KernelName
from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.engine import loss as losses
from ray_ulysses.engine.self_test_attention import AttentionSettings, measure_attention
from ray_ulysses.engine.zero import ZeroSettings, build_engine
from ray_ulysses.errors import BrokenRanksError, RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.collectives import BlockExchange, Circulation
from ray_ulysses.parallel.gpu_environment import nccl_log, transports
from ray_ulysses.parallel.mesh import Role, SequenceMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTestReport:
    """Measurements of a passed self-test: the worst values over all ranks, identical on every rank."""

    attention_error: float
    """Relative error of attention outputs and gradients, compared with the definition of attention."""
    gradient_error: float
    """Relative error of the tiny decoder's worst gradient tensor, compared with a single process."""
    norm_ratio: float
    """Global gradient norm reported by the engine, divided by the norm in a single process."""
    kernels: tuple[str, ...]
    links: tuple[LinkTime, ...] = ()
    """Duration of one exchange for each kind of process group; empty if there is only one rank."""
    seconds: float

    def in_words(self) -> str:
        """Return a one-line summary for the log."""
        links = "".join(f"; {link}" for link in self.links)
        return (
            f"self-test passed in {self.seconds:.1f} s: attention {self.attention_error:.0e}, gradients "
            f"{self.gradient_error:.0e}, norm ratio {self.norm_ratio:.3f} (kernel {', '.join(self.kernels)}){links}"
        )


_Measured = tuple[str, float, float]
"""A quantity's name, its relative error on this rank, and the error bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """A quantity's largest relative error over all ranks, and the ranks that exceed the error bound."""

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
    """Compare attention and gradients on the live process groups and devices with a single process.

    All ranks of the world must call this function, with the same settings. Random state, hooks and memory are restored
    afterwards. ``prepare_process`` must have been called, and the ranks of each ``sp`` group must be contiguous. Only
    the stage, dtype and accumulation of ``zero`` are used.

    Raises:
        RunError: Results differ. All ranks raise the same exception, with the quantity, error, rank and remedy.
        UserError: The requested kernel is not available on this device.
    """
    clock = clock or SystemClock()
    started = clock.monotonic()
    kernels = attention.kernel_names(device)
    cuda = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda), torch.enable_grad(), ExitStack() as restored:
            # Do not log the kernels chosen for the tiny decoder.
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
    """Return the gradient error bound: twice a single process's own error if finite, but at least ``least``."""
    return max(least, 2 * own_error) if math.isfinite(own_error) else least


def find_worst(parts: Sequence[str], errors: Sequence[Sequence[float]], bounds: Sequence[float]) -> list[CheckResult]:
    """Return each quantity's largest error over all ranks. NaN is treated as infinity."""
    results = []
    for place, (what, bound) in enumerate(zip(parts, bounds, strict=True)):
        column = [float("inf") if row[place] != row[place] else row[place] for row in errors]
        rank = max(range(len(column)), key=column.__getitem__)
        wrong = tuple(index for index, error in enumerate(column) if error > bound)
        results.append(CheckResult(what=what, error=column[rank], bound=bound, rank=rank, wrong_ranks=wrong))
    return results


def _agreed(measured: Sequence[_Measured], device: torch.device) -> list[CheckResult]:
    """Gather all ranks' errors and bounds, and return the worst errors. All ranks must call this function."""
    mine = torch.tensor([numbers for _, *numbers in measured], dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    table = torch.stack(rows).cpu()
    # Bounds depend on the single-process error, which may differ slightly between GPUs.
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
    """Test whether the kernel or the exchange is wrong, and return the error. All ranks must call this function."""
    alone = SequenceMesh(sp_size=1, sp_rank=0, ring_size=1, world_size=1)
    kernel = _agreed(_attention(alone, device, replace(settings, head_groups=1)), device)
    names = ", ".join(kernels)
    wrong_ranks = _wrong_ranks(kernel)
    if wrong_ranks:
        worst = _worst(kernel)
        cause = (
            f"the kernel is wrong even in a single process ({worst.what}: {worst.error:.1e}): use another kernel "
            "(model.attention: sdpa on CPU, varlen or math on a GPU), or another build of torch or flash-attn"
        )
    else:
        layout = f"ulysses {mesh.ulysses_size} x ring {mesh.ring_size}"
        cause = (
            f"the kernel is exact in a single process, so the exchange between ranks ({layout}) is wrong: run "
            "ray-ulysses doctor on these nodes; check their driver, NCCL and links (set NCCL_DEBUG=INFO, and "
            "NCCL_P2P_DISABLE=1 to find out whether a link is the cause); or remove the node"
        )
    against = f"its definition in fp64 (kernel {names}; {settings.in_words()})"
    return _error(found, against, cause, node, broken=wrong_ranks)


def _step_error(
    found: Sequence[CheckResult], norm_ratio: float, mesh: SequenceMesh, zero: ZeroSettings, node: str
) -> RunError:
    cause = (
        f"the gradient norm is {norm_ratio:.4f} times the norm in a single process (compare this factor with sp_size="
        f"{mesh.sp_size}, world_size={dist.get_world_size()} and the accumulation steps), although attention is "
        "exact: install the versions of deepspeed, torch and transformers in constraints.txt, and run ray-ulysses "
        "doctor on these nodes"
    )
    against = f"a single process (a tiny decoder, ZeRO-{zero.stage}, {zero.dtype})"
    return _error(found, against, cause, node)


def _error(
    found: Sequence[CheckResult], against: str, cause: str, node: str, broken: frozenset[int] = frozenset()
) -> RunError:
    """Return the error to raise; ranks in ``broken`` fail even in one process. All ranks must call this function."""
    worst, wrong_ranks = _worst(found), _wrong_ranks(found)
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, node)
    place = f"rank {worst.rank}" + (f" on {names[worst.rank]}" if names[worst.rank] else "")
    text = (
        f"the self-test failed on {len(wrong_ranks)} of {len(names)} ranks, with the largest error on {place}: the "
        f"relative error of {worst.what} compared with {against} is {worst.error:.1e}, above the bound of "
        f"{worst.bound:.0e}. {cause[0].upper()}{cause[1:]}. Do not skip this check with run.self_test: false; the run "
        "would train with wrong results"
    )
    # If the kernel is wrong on every rank, no single device is at fault. If the exchange is wrong, either side may be.
    return BrokenRanksError(text, broken) if 0 < len(broken) < len(names) else RunError(text)


_GPU_BYTES, _CPU_BYTES = 256 << 20, 1 << 20
"""Message size in bytes per rank. The GPU message is about as large as a layer of an 8B model, so that latency accounts
for the same share of the duration as in a training step."""
_TIMES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTime:
    """Duration of one exchange, identical on every rank."""

    role: Role
    """Role of the process groups. All groups with this role exchange data at the same time."""
    ranks: int
    sent_bytes: int
    """Number of bytes sent by each rank."""
    seconds: float
    """Duration on the slowest rank, as the minimum of several measurements."""
    slowest_rank: int
    transports: tuple[str, ...] = ()
    """Transports that the slowest rank uses for sending, according to NCCL's log; empty if the log lists none."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second sent by the slowest rank."""
        return self.sent_bytes / self.seconds

    def __str__(self) -> str:
        by = f" by {', '.join(self.transports)}" if self.transports else ""
        return f"{self.role} of {self.ranks} ranks {self.bandwidth / 1e9:.3g} GB/s{by}"


def time_links(mesh: SequenceMesh, device: torch.device, clock: Clock) -> tuple[LinkTime, ...]:
    """Time one exchange for each kind of process group. All ranks of the world must call this function.

    Each exchange also occurs in a training step: heads over ``ulysses``, blocks over ``ring``, weights over ``shard``.
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
        # NCCL logs a connection on first use, which may have been an earlier exchange.
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
    if role == "ring":
        block = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return lambda: Circulation(block, group, tag=0).wait()
    shape = group.size(), num_bytes // group.size()
    sent, received = (torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2))
    if role == "ulysses":
        return lambda: BlockExchange(list(sent), list(received), group).wait()
    return lambda: dist.all_gather_into_tensor(received.flatten(), sent[0], group=group)


def _seconds(do: Callable[[], object], device: torch.device, clock: Clock) -> float:
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
"""Head size of the tiny decoder, supported by every kernel."""
_ROWS: tuple[tuple[int, tuple[int, ...]], ...] = ((48, (29, 1, 12)), (40, (7, 33)))
"""For each row, its length and the lengths of its documents; the rest of the row is padding."""
_MOST_ACCUMULATION = 2
_NOTHING = 1e-7


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasured:
    """Errors of a distributed training step, relative to a single process."""

    gradient_error: float
    """Norm-wise relative error of the worst gradient tensor, compared with a single process in fp64."""
    worst_tensor: str
    own_error: float
    """Norm-wise relative error of a single process in the run's dtype, also compared with fp64."""
    norm_ratio: float
    """Global gradient norm reported by the engine, divided by the norm in a single process."""


def measure_step(
    mesh: SequenceMesh, device: torch.device, settings: ZeroSettings, kernel: KernelName, head_groups: int = 1
) -> StepMeasured:
    """Compare one training step of a tiny decoder with a single process. All ranks must call this function."""
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    accumulation = min(settings.accumulation, _MOST_ACCUMULATION)
    sp_first = dist.get_global_rank(mesh.group("sp"), 0)
    dp_rank, dp_size = sp_first // mesh.sp_size, mesh.world_size // mesh.sp_size
    # Alternate between two rows, so that the reference for any world size is a weighted sum of two rows.
    weights = [(dp_size * accumulation + 1) // 2, dp_size * accumulation // 2]
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
    """Return the largest norm-wise relative error over all tensors, and the name of the worst tensor.

    If a tensor's norm is below 1e-7 of the full gradient's norm, the error is relative to the full gradient instead.
    NaN is treated as infinity.
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
    """Return the engine's unpartitioned gradients and their norm. The engine is destroyed."""
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
            # Calling step() for the last micro-batch would free the gradients before they are read.
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
    """Remove a model from DeepSpeed 0.19.8's global ZeRO-3 module stack, which would keep the model alive."""
    from deepspeed.runtime.zero import parameter_offload

    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not model]


@contextmanager
def _collected() -> Iterator[None]:
    """Free an engine's reference cycles (hooks and partitions) when the block ends.

    Older objects are excluded from garbage collection, because scanning them would take up to a second, longer than the
    test itself.
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
    """Return a two-layer model, identical on every rank, with two KV heads and at least one query head per rank."""
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
        # Large enough for attention to be far from uniform, so that attention gradients are not negligible.
        initializer_range=0.15,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        # Buffers stay in fp32, because rounded rotary frequencies would differ from the run's frequencies.
        parameter.data = parameter.data.to(dtype)
    return model.to(device)


def _row(index: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(_SEED + index)
    input_ids = torch.randint(0, _VOCAB, (1, _ROWS[index][0]), generator=generator).to(device)
    labels = input_ids.clone()
    labels[:, 3:6] = IGNORE_INDEX
    return input_ids, labels


def _one_process(model: Any, weights: list[int]) -> dict[str, torch.Tensor]:
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
