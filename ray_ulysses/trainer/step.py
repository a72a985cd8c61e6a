"""Trains an optimizer step (micro-batches, then an exchange of sums and flags), and judges and measures the step."""

from __future__ import annotations

import contextlib
import itertools
import math
import resource
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ray_ulysses.attention.batch import IGNORE_INDEX, ShardedBatch, held_document_lengths
from ray_ulysses.attention.documents import on_device, pack_documents
from ray_ulysses.config.running import ElasticSection
from ray_ulysses.data.fingerprint import mix_int
from ray_ulysses.data.read.digest import MODULUS, add_digests, ranges_checksum, row_digest, to_int64
from ray_ulysses.data.read.reader import RowSlice
from ray_ulysses.elastic.outliers import WINDOW_STEPS, spike_bound
from ray_ulysses.engine.loss import loss_scale
from ray_ulysses.engine.router_health import LayerRouting, RouterWatch
from ray_ulysses.engine.tiled_loss import TokenLoss
from ray_ulysses.errors import FinalError, RunError
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.layout import TileSetting, held_ranges
from ray_ulysses.parallel.mesh import SequenceMesh
from ray_ulysses.planner.flops import mfu, peak_bf16_flops, step_flops
from ray_ulysses.run.requests import RequestWatch
from ray_ulysses.trainer.row_loss import NUM_ADDED, RowObjective, SetLoss, row_loss
from ray_ulysses.trainer.source_loss import SourceLoss, SourceLosses


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """Flags that a rank raises after a step. A flag is set on all ranks if any rank raises it.

    The flags are summed in the collective that ends every step.
    """

    stop: bool = False
    """Rank 0: whether the run was requested to stop."""
    resize: bool = False
    """Rank 0: whether the run must stop because its number of workers changes."""
    save_requested: bool = False
    """Rank 0: whether a checkpoint was requested."""
    gone: bool = False
    """Rank 0: whether the run directory was deleted or moved."""
    notice: bool = False
    """Whether a node will be preempted."""
    notice_due: bool = False
    """Whether a checkpoint is due because of a preemption notice; see `checkpoint.notice`."""
    time_is_up: bool = False
    """Rank 0: whether a checkpoint is due according to ``checkpoint.every_minutes``."""
    saving: bool = False
    """Whether a checkpoint is being saved."""
    buffers_busy: bool = False
    """Whether no host buffer is free."""
    failed: bool = False
    """Whether the previous save failed."""
    retry_due: bool = False
    """Rank 0: whether a failed save may be retried now."""
    ended: bool = False
    """Whether the previous save or the journal failed with an error that ends the attempt."""
    memory_due: bool = False
    """Rank 0: whether a save to peer memory is due."""
    memory_busy: bool = False
    """Whether an earlier state is still being saved to peer memory, or there is no memory for another state."""
    compute_due: bool = False
    """Rank 0: whether a measurement of each rank's compute speed is due."""

    def to_counts(self) -> list[int]:
        """Return the flags as integers that can be summed over ranks."""
        return [int(flag) for flag in astuple(self)]

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Flags:
        """Return the flags that at least one rank has raised, from counts summed over all ranks."""
        return cls(**{one.name: count > 0 for one, count in zip(fields(cls), counts, strict=True)})


NUM_FLAGS = len(fields(Flags))


def with_requests(own: Flags, requests: RequestWatch) -> Flags:
    """Return rank 0's flags, updated with requests from users and the driver."""
    stop = requests.stop()
    return replace(own, stop=stop is not None, resize=stop == "resize", save_requested=requests.take_save())


class Given(NamedTuple):
    """A row as received by the model."""

    place: int
    """Index of the row in the step."""
    num_supervised: int
    """Number of supervised tokens in the batch."""
    checksum: Callable[[], int]
    """Function that returns the batch's checksum; see `read_back`."""


def batch_of(row: RowSlice, mesh: SequenceMesh, device: torch.device) -> ShardedBatch:
    """Return a row slice as a batch with one row, on a device.

    Raises:
        RunError: The slice belongs to another rank, so the data stream is out of order.
    """
    if (row.sp_rank, row.sp_size, row.ring_size) != (mesh.sp_rank, mesh.sp_size, mesh.ring_size):
        raise RunError(
            f"the data stream is out of order: row {row.row} arrived as slice {row.sp_rank} of {row.sp_size} (ring "
            f"{row.ring_size}), but this rank expects slice {mesh.sp_rank} of {mesh.sp_size} (ring {mesh.ring_size}). "
            "Resume the run; if the error recurs, set data.engine: local"
        )
    documents = pack_documents(
        [row.document_lengths], row.row_tokens, device, ring_size=mesh.ring_size, ring_rank=mesh.ring_rank
    )
    return ShardedBatch(
        input_ids_BL=_row_on(row.input_ids, device),
        labels_BL=_row_on(row.labels, device),
        position_ids_BL=_row_on(row.position_ids, device),
        document_lengths_BL=on_device(held_document_lengths(documents, mesh), device),
        documents=documents,
        mesh=mesh,
        label_weights_BL=None if row.label_weights is None else _row_on(row.label_weights, device),
        has_shifted_labels=not row.is_masked,
    )


def _row_on(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    return on_device(torch.from_numpy(values).unsqueeze(0), device)


def read_back(batch: ShardedBatch) -> Callable[[], int]:
    """Start copying a batch back to the host, and return a function that computes its checksum.

    On a GPU, the copies are queued without blocking the host: synchronize before calling the returned function.
    """
    given = (batch.input_ids_BL, batch.labels_BL, batch.position_ids_BL, batch.label_weights_BL)
    copies = [None if tensor is None else tensor[0].to("cpu", non_blocking=True) for tensor in given]
    mesh = batch.mesh
    ranges = held_ranges(batch.documents.row_tokens, mesh.sp_rank, mesh.sp_size, mesh.ring_size)

    def checksum() -> int:
        arrays: list[Any] = [None if copy is None else copy.numpy() for copy in copies]
        return ranges_checksum(ranges, *arrays)

    return checksum


def received_of(given: Sequence[Given], num_rows: int, device: torch.device) -> tuple[list[int], int]:
    """Return the checksum of each row in a step, and the total number of supervised tokens.

    On a GPU, this function waits for all queued work.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    checksums = [0] * num_rows
    for one in given:
        checksums[one.place] += one.checksum()
    return checksums, sum(one.num_supervised for one in given)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of a step, identical on every rank."""

    loss: float
    """Mean loss over the step's supervised tokens in nats, weighted if the tokens have label weights."""
    z_loss: float
    """Mean z-loss over the same tokens, including the coefficient; 0 if the z-loss is disabled."""
    router_loss: float
    """Mean router loss of the step's rows, weighted by their supervised tokens and including the coefficient; 0 if the
    router loss is disabled."""
    grad_norm: float
    """Gradient norm before clipping."""
    is_finite: bool
    """Whether the loss and the gradient are finite. If not, the step did not change the weights."""
    bad_rows: tuple[int, ...]
    """Rows whose own loss is not finite."""
    tokens: int
    """Number of supervised tokens that the model received."""
    digest: int
    """Sum of the digests of the rows that the model received, modulo 2**64."""
    flags: Flags
    """Flags that at least one rank has raised."""
    sources: tuple[SourceLoss, ...] = ()
    """Loss of each corpus of a mixture, in the order of the plan's sources; empty for a single corpus."""
    of_documents: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the step's documents or pairs, by field of `StepDone`; empty for a loss of tokens."""
    routing: tuple[LayerRouting, ...] = ()
    """How the routers of a mixture of experts distributed the step's document tokens, for each layer with a router."""
    direct_rows: float = 0.0
    """Number of rows that were read directly because the stream had not started; fractional, because each rank counts
    its slices."""


def train_step(
    engine: Any,
    slices: Iterable[RowSlice],
    *,
    rows: range,
    tokens: int,
    mesh: SequenceMesh,
    device: torch.device,
    accumulation: int,
    seed: int,
    loss_tile: TileSetting = "auto",
    z_loss: float = 0.0,
    token_loss: TokenLoss | None = None,
    objective: RowObjective | None = None,
    num_counted: int = 0,
    sources: SourceLosses | None = None,
    routers: RouterWatch | None = None,
    flags: Callable[[], Flags] = Flags,
    num_direct: Callable[[], int] = lambda: 0,
    before_update: Callable[[], object] = lambda: None,
) -> StepResult:
    """Train one optimizer step. All ranks must call this function.

    Args:
        engine: The ZeRO engine, of any stage, with ``accumulation`` accumulation steps.
        slices: This rank's slices, one per micro-batch. A last step with fewer rows is padded with fillers.
        rows: The step's rows, by global number.
        tokens: Planned number of supervised tokens in the step. This is the denominator of the loss for every layout,
            unless tokens are masked or have label weights.
        mesh: The mesh.
        device: Device for the batches.
        accumulation: Number of micro-batches per step.
        seed: Base seed. Each row's random state is derived from the seed and the row, independent of the rank.
        loss_tile: Number of tokens per rank whose logits exist at a time.
        z_loss: Coefficient of the z-loss.
        token_loss: Loss of each token in place of the cross-entropy.
        objective: Objective of documents in place of the cross-entropy.
        num_counted: Number of documents or pairs in the step, which is the objective's denominator.
        sources: Sums the loss of each corpus of a mixture.
        routers: Counts the tokens of each expert, and balances routers after the update.
        flags: Function that returns this rank's flags; called at the end of the step.
        num_direct: Function that returns the number of slices read before the stream started; called at the end.
        before_update: Function called on every rank before the weights are updated.

    Raises:
        RunError: The model received tokens that differ from the plan.
    """
    slices, weight = _weighed(slices, tokens, mesh, device)
    seeded = partial(_seeded_batch, mesh=mesh, device=device, seed=seed)
    if objective is not None:
        weight, slices = num_counted, objective.prepared(engine, slices, seeded, [rows.stop])
    scale = loss_scale(weight, mesh, zero_stage=engine.zero_optimization_stage(), accumulation=accumulation)
    # One loss for each row, one for all fillers, then the sums that a row loss adds.
    losses = torch.zeros(len(rows) + 1 + NUM_ADDED, dtype=torch.float64, device=device)
    given: list[Given] = []
    for steps, row in enumerate(slices, start=1):
        batch = seeded(row)
        with contextlib.nullcontext() if routers is None else routers.counting(batch):
            found = row_loss(
                engine, batch, row, tile=loss_tile, z_loss=z_loss, token_loss=token_loss, objective=objective
            )
        engine.backward(found.objective_sum * scale)
        if steps == accumulation:
            before_update()
        engine.step()
        if not row.is_filler and row.row not in rows:
            raise RunError(f"row {row.row} arrived in the step of rows {rows.start} to {rows.stop - 1}; resume the run")
        losses[len(rows) if row.is_filler else row.row - rows.start] += found.loss_sum.double()
        losses[-NUM_ADDED:] += found.added
        if not row.is_filler:
            if sources is not None:
                sources.add(row, found.losses)
            given.append(Given(row.row - rows.start, row.num_supervised, read_back(batch)))
    assert steps == accumulation, f"{steps} micro-batches instead of {accumulation}"
    # If this norm is not finite, ZeRO in DeepSpeed 0.19.8 skips the update without any other report.
    grad_norm = float(engine.get_global_grad_norm())
    checksums, received = received_of(given, len(rows), device)
    watches = (sources, routers, objective)
    return _agree(losses, grad_norm, checksums, received, rows, (tokens, weight), flags(), num_direct(), mesh, watches)


def _seeded_batch(row: RowSlice, mesh: SequenceMesh, device: torch.device, seed: int) -> ShardedBatch:
    """Return a row slice as a batch, and set the random state to that of its row."""
    _seed_generators(mix_int(mix_int(seed) ^ (row.row % 2**64)) >> 1, device)
    return batch_of(row, mesh, device)


def _seed_generators(seed: int, device: torch.device) -> None:
    """Seed the random generators that a model on a device uses.

    `torch.manual_seed` is not used, because that function formats a stack trace for each kind of device that the
    machine lacks. Formatting can take longer than a layer's forward on a short row.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _weighed(
    slices: Iterable[RowSlice], tokens: int, mesh: SequenceMesh, device: torch.device
) -> tuple[Iterable[RowSlice], float]:
    """Return a step's slices and the denominator of the loss: supervised tokens, or the sum of their label weights.

    Either all slices of a run have label weights or masks, or none of them do. If they have, all slices of the step are
    read before training on the first slice. All ranks must call this function.
    """
    slices = iter(slices)
    first = next(slices)
    if first.label_weights is None and not first.is_masked:
        return itertools.chain([first], slices), tokens
    read = [first, *slices]
    total = torch.tensor(math.fsum(row.supervised_weight for row in read), dtype=torch.float64, device=device)
    dist.all_reduce(total, group=mesh.group("loss"))
    return read, float(total)


def evaluate(
    engine: Any,
    slices: Iterable[RowSlice],
    mesh: SequenceMesh,
    device: torch.device,
    loss_tile: TileSetting = "auto",
    *,
    ends: Sequence[int],
    objective: RowObjective | None = None,
) -> list[SetLoss]:
    """Return the loss of each set of evaluation rows.

    All ranks must call this function, with the same number of slices. The sets are consecutive, and ``ends`` contains
    the row after the last of each. The loss is the unweighted cross-entropy over supervised tokens, without label
    weights or auxiliary losses, or that of ``objective``.
    """

    def unweighted(row: RowSlice) -> ShardedBatch:
        return batch_of(replace(row, label_weights=None), mesh, device)

    engine.eval()
    totals = torch.zeros(len(ends), 4, dtype=torch.float64, device=device)
    try:
        with torch.no_grad():
            if objective is not None:
                slices = objective.prepared(engine, slices, unweighted, ends)
            for row in slices:
                batch = unweighted(row)
                # A filler row has neither loss nor tokens, and its number is below all others.
                of_set = totals[bisect_right(ends, row.row)]
                found = row_loss(engine, batch, row, tile=loss_tile, objective=objective)
                of_set[2:] += found.added[2:4]
                of_set[0] += found.loss_sum.double()
                of_set[1] += (batch.labels_BL != IGNORE_INDEX).sum()
    finally:
        engine.train()
    dist.all_reduce(totals, group=mesh.group("loss"))
    return [
        SetLoss(loss_sum / (tokens or 1), int(tokens))
        if objective is None
        else SetLoss(loss_sum / counted, int(tokens), int(counted), num_right / counted)
        for loss_sum, tokens, counted, num_right in totals.tolist()
    ]


def _agree(
    losses: torch.Tensor,
    grad_norm: float,
    checksums: list[int],
    received: int,
    rows: range,
    planned: tuple[int, float],
    flags: Flags,
    num_direct: int,
    mesh: SequenceMesh,
    watches: tuple[SourceLosses | None, RouterWatch | None, RowObjective | None],
) -> StepResult:
    tokens, weight = planned
    sources, routers, objective = watches
    # One collective, and one read by the host, for the losses, the corpora's sums and the routers' sums.
    of_sources = losses.new_zeros(0) if sources is None else sources.take()
    sums = torch.cat([losses, of_sources, *([] if routers is None else routers.take())])
    num_losses, first_router = len(losses), len(losses) + len(of_sources)
    dist.all_reduce(sums, group=mesh.group("loss"))
    # A row's checksum is the sum of its slices' checksums modulo 2**64, which matches int64 overflow.
    counts = torch.tensor(
        [
            received,
            num_direct,
            int(not math.isfinite(grad_norm)),
            *flags.to_counts(),
            *(to_int64(value % MODULUS) for value in checksums),
        ],
        dtype=torch.int64,
        device=losses.device,
    )
    dist.all_reduce(counts, group=mesh.group("loss"))
    total, direct_slices, num_bad_norms, *rest = counts.tolist()
    raised, row_sums = rest[:NUM_FLAGS], rest[NUM_FLAGS:]
    if total != tokens:
        raise RunError(
            f"rows {rows.start} to {rows.stop - 1} contain {total} supervised tokens, but the plan expects {tokens}: "
            "the corpus changed during the run. Restore data.path, then resume the run"
        )
    read: list[float] = sums.tolist()
    row_losses, added = read[: num_losses - NUM_ADDED], read[num_losses - NUM_ADDED : num_losses]
    loss_sum = sum(row_losses)
    digest = add_digests(*(row_digest(row, value) for row, value in zip(rows, row_sums, strict=True)))
    is_finite = math.isfinite(loss_sum) and num_bad_norms == 0
    if routers is not None and is_finite:
        routers.balance(sums[first_router:])
    return StepResult(
        loss=loss_sum / (weight or 1),
        z_loss=added[0] / (weight or 1),
        router_loss=added[1] / (weight or 1),
        grad_norm=grad_norm,
        is_finite=is_finite,
        bad_rows=tuple(row for row, value in zip(rows, row_losses, strict=False) if not math.isfinite(value)),
        tokens=tokens,
        digest=digest,
        flags=Flags.from_counts(raised),
        of_documents={} if objective is None else objective.metrics(added[2:]),
        sources=() if sources is None else sources.summary(read[num_losses:first_router]),
        routing=() if routers is None else routers.summary(read[first_router:]),
        direct_rows=direct_slices / mesh.sp_size,
    )


class BadStepError(FinalError):
    """A step's result is unusable, and training on the same rows again would give the same result."""


class StepGuard:
    """Judges each step. All ranks reach the same verdict, because they have the same result.

    ``record`` is called with a bad step's number, rows, plan ID and reason, so that the command can exclude the rows.
    """

    def __init__(self, elastic: ElasticSection, record: Callable[[int, range, str, str], object]) -> None:
        self._elastic, self._record = elastic, record
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)

    def judge(self, step: int, rows: range, plan_id: str, result: StepResult) -> None:
        """Raise an error if the step is bad. All ranks must call this method after every step.

        ``plan_id`` identifies the plan that contains the step's rows.

        Raises:
            BadStepError: The loss or gradient is not finite, or the loss is a spike.
        """
        mads = self._elastic.loss_spike_mads
        bound = None if mads is None else spike_bound(tuple(self._losses), mads)
        if not result.is_finite:
            reason = not_finite(step, rows, result)
        elif bound is not None and result.loss > bound:
            reason = (
                f"step {step}: the loss of rows {rows.start} to {rows.stop - 1} is {result.loss:.4f}, above "
                f"{bound:.4f} (elastic.loss_spike_mads={mads:g} of the last {len(self._losses)} steps)"
            )
        else:
            self._losses.append(result.loss)
            return
        # If the record can't be written, the rows can't be excluded, and the run stops.
        with contextlib.suppress(RunError):
            self._record(step, rows, plan_id, reason)
        raise BadStepError(f"{reason}. The step is not saved; {self._way_out(rows, result)}")

    def _way_out(self, rows: range, result: StepResult) -> str:
        if self._elastic.bad_steps == "skip":
            return "the run continues without these rows if possible (elastic.bad_steps=skip)"
        row = result.bad_rows[0] if result.bad_rows else rows.start
        return (
            f"a restart would fail again. Inspect the documents (`ray-ulysses inspect RUN --row {row}`), skip the rows "
            "(elastic.bad_steps: skip), or decrease optimizer.lr (`ray-ulysses train --branch`)"
        )


def not_finite(step: int, rows: range, result: StepResult) -> str:
    """Describe which part of a step is not finite: the loss of some rows, or the gradient."""
    bad = result.bad_rows
    if not bad:
        return (
            f"step {step}: the gradient of rows {rows.start} to {rows.stop - 1} is not finite (mean loss "
            f"{result.loss:.4f})"
        )
    listed = f"row {bad[0]}" if len(bad) == 1 else f"{len(bad)} rows (the first is row {bad[0]})"
    return f"step {step}: the loss of {listed} in rows {rows.start} to {rows.stop - 1} is not finite"


class StepMeter:
    """Computes a step's metrics from its result and duration."""

    def __init__(self, shape: ModelShape, device: torch.device, world_size: int) -> None:
        self._shape, self._device, self._world_size = shape, device, world_size
        self._peak_flops = peak_bf16_flops(torch.cuda.get_device_name(device) if device.type == "cuda" else None)

    def numbers(
        self,
        result: StepResult,
        *,
        seconds: float,
        document_tokens: int,
        cost: int,
        learning_rate: float,
    ) -> dict[str, float]:
        """Return a step's metrics by name.

        ``mfu`` is included only if the device's peak FLOPS are known, auxiliary losses only if they are not zero, and
        metrics of routers only for a mixture of experts.
        ``document_tokens`` excludes padding, and ``cost`` is the sum of the documents' squared lengths.
        """
        flops = step_flops(self._shape, tokens=document_tokens, sum_squared_lengths=cost)
        utilisation = mfu(flops=flops, seconds=seconds, world_size=self._world_size, peak_flops=self._peak_flops)
        numbers = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": learning_rate,
            "seconds": seconds,
            "tokens_per_s": result.tokens / seconds,
            "peak_memory_gib": peak_memory_gib(self._device),
            "world_size": float(self._world_size),
        }
        found = {"mfu": utilisation, "z_loss": result.z_loss or None, "router_loss": result.router_loss or None}
        found |= result.of_documents
        if result.routing:
            found |= {
                "router_imbalance": max(one.imbalance for one in result.routing),
                "dead_experts": float(sum(one.dead for one in result.routing)),
                "router_entropy": math.fsum(one.entropy for one in result.routing) / len(result.routing),
            }
        return numbers | {name: value for name, value in found.items() if value is not None}


def device_memory_gib(device: torch.device) -> float | None:
    """Return a GPU's total memory in GiB, or None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else None


def peak_memory_gib(device: torch.device) -> float:
    """Return this process's peak memory in GiB: allocated memory on a GPU, resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # Linux reports KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
