"""Takes one optimizer step (micro-batches, then one exchange of sums and flags), and judges and measures it."""

from __future__ import annotations

import contextlib
import itertools
import math
import resource
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ray_ulysses.attention.batch import ShardedBatch, held_document_lengths
from ray_ulysses.attention.documents import on_device, pack_documents
from ray_ulysses.data.fingerprint import mix_int
from ray_ulysses.data.read.digest import MODULUS, add_digests, from_int64, ranges_checksum, row_digest, to_int64
from ray_ulysses.elastic.outliers import WINDOW_STEPS, spike_bound
from ray_ulysses.engine.loss import loss_scale, training_loss
from ray_ulysses.errors import FinalError, RunError
from ray_ulysses.parallel.layout import held_ranges
from ray_ulysses.planner.flops import mfu, peak_bf16_flops, step_flops
from ray_ulysses.run.requests import RequestWatch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ray_ulysses.config.running import ElasticSection
    from ray_ulysses.data.read.reader import RowSlice
    from ray_ulysses.model_shape import ModelShape
    from ray_ulysses.parallel.layout import TileSetting
    from ray_ulysses.parallel.mesh import SequenceMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """Flags that a rank raises after a step; each holds for all ranks when one of them raises it.

    Ranks add them up in the collective that ends a step anyway.
    """

    stop: bool = False
    """Rank 0: the run was asked to stop."""
    resize: bool = False
    """Rank 0: it should stop because its size changes."""
    save_requested: bool = False
    """Rank 0: somebody asked for a checkpoint."""
    gone: bool = False
    """Rank 0: the run's directory was deleted or moved."""
    notice: bool = False
    """A node will be preempted."""
    notice_due: bool = False
    """A checkpoint is due for that reason; see `checkpoint.notice`."""
    time_is_up: bool = False
    """Rank 0: a checkpoint is due by ``checkpoint.every_minutes``."""
    saving: bool = False
    """A checkpoint is being written."""
    buffers_busy: bool = False
    """A rank has no free host buffer: all are still being written."""
    failed: bool = False
    """The previous save has failed."""
    retry_due: bool = False
    """Rank 0: it is time to try again."""
    ended: bool = False
    """The previous save or the journal has failed in a way that ends the attempt."""
    memory_due: bool = False
    """Rank 0: a save to peer memory is due."""
    memory_busy: bool = False
    """An earlier state is still being written there, or there is no memory for another."""
    compute_due: bool = False
    """Rank 0: it is time to measure how fast each rank computes."""

    def to_counts(self) -> list[int]:
        """Return the flags as integers, to be summed over the ranks."""
        return [int(flag) for flag in astuple(self)]

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Flags:
        """Return the flags that at least one rank has raised, from the sums over all ranks."""
        return cls(**{field.name: count > 0 for field, count in zip(fields(cls), counts, strict=True)})


NUM_FLAGS = len(fields(Flags))


def with_requests(own: Flags, requests: RequestWatch) -> Flags:
    """Add to rank 0's flags what people and the driver have requested through the run's directory."""
    stop = requests.stop()
    return replace(own, stop=stop is not None, resize=stop == "resize", save_requested=requests.take_save())


class Given(NamedTuple):
    """A row as the model received it."""

    place: int
    """The row's place in the step."""
    num_supervised: int
    """Supervised tokens of the batch."""
    checksum: Callable[[], int]
    """Returns the checksum of the batch; see `read_back`."""


def batch_of(row: RowSlice, mesh: SequenceMesh, device: torch.device) -> ShardedBatch:
    """Return a row slice as a batch of one row on a device.

    Raises:
        RunError: The slice is not this rank's: the data stream is out of order.
    """
    if (row.sp_rank, row.sp_size, row.ring_size) != (mesh.sp_rank, mesh.sp_size, mesh.ring_size):
        raise RunError(
            f"row {row.row} arrived as slice {row.sp_rank} of {row.sp_size} (ring {row.ring_size}), but this rank "
            f"trains slice {mesh.sp_rank} of {mesh.sp_size} (ring {mesh.ring_size}); the data stream is out of order. "
            "Resume the run; if it happens again, use data.engine: local"
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
    )


def _row_on(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    return on_device(torch.from_numpy(values).unsqueeze(0), device)


def read_back(batch: ShardedBatch) -> Callable[[], int]:
    """Start copying a batch back to the host, and return a function that computes its checksum.

    On a GPU the copies are queued behind earlier work without blocking the host: synchronise before calling the result.
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
    """Return the sum of the checksums of each of a step's rows, and the supervised tokens of all batches.

    On a GPU it waits for all queued work.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    checksums = [0] * num_rows
    for one in given:
        checksums[one.place] += one.checksum()
    return checksums, sum(one.num_supervised for one in given)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """A step's result, equal on every rank."""

    loss: float
    """Mean loss over the step's supervised tokens, by their weights if they have any, in nats."""
    z_loss: float
    """Mean z-loss over them, with its coefficient; 0 without one."""
    router_loss: float
    """Mean router loss of the step's rows, weighted by their supervised tokens, with its coefficient; 0 without one."""
    grad_norm: float
    """Norm of its gradient before clipping."""
    is_finite: bool
    """Whether loss and gradient are finite; if not, the step has left the weights unchanged."""
    bad_rows: tuple[int, ...]
    """The rows whose own loss is not finite."""
    tokens: int
    """Supervised tokens that the model received."""
    digest: int
    """Sum of the digests of the rows that the model received, modulo 2**64."""
    flags: Flags
    """The flags that at least one rank has raised."""
    direct_rows: float = 0.0
    """Rows that were read directly because a rank's stream had not started; each rank's slice is a share."""


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
    flags: Callable[[], Flags] = Flags,
    num_direct: Callable[[], int] = lambda: 0,
    before_update: Callable[[], object] = lambda: None,
) -> StepResult:
    """Take one optimizer step; every rank must call.

    Args:
        engine: The ZeRO engine, of any stage; its accumulation steps are ``accumulation``.
        slices: This rank's slices, one per micro-batch. A last step of fewer rows is filled up with fillers, so that
            every step has ``accumulation`` of them.
        rows: Global rows of the step.
        tokens: Supervised tokens of the step as planned: the loss's denominator on every layout, if none has a weight.
        mesh: The mesh.
        device: Where batches go.
        accumulation: Micro-batches per step.
        seed: Base of the random state; each row has its own, regardless of the rank that trains it.
        loss_tile: Tokens per rank whose logits exist at once.
        z_loss: Coefficient of the z-loss.
        flags: Returns this rank's flags; called at the end of the step.
        num_direct: Returns how many of the slices were read directly because the stream had not started; as above.
        before_update: Called before the weights are updated, on every rank.

    Raises:
        RunError: The model received other tokens than planned.
    """
    slices, weight = _weighed(slices, tokens, mesh, device)
    scale = loss_scale(weight, mesh, zero_stage=engine.zero_optimization_stage(), accumulation=accumulation)
    # The losses of each row and of the fillers, then the z-loss and the router loss.
    losses = torch.zeros(len(rows) + 3, dtype=torch.float64, device=device)
    given: list[Given] = []
    for steps, row in enumerate(slices, start=1):
        batch = batch_of(row, mesh, device)
        _seed_generators(mix_int(mix_int(seed) ^ (row.row % 2**64)) >> 1, device)
        row_loss = training_loss(engine, batch, tile=loss_tile, z_loss=z_loss)
        engine.backward(row_loss.objective_sum * scale)
        if steps == accumulation:
            before_update()
        engine.step()
        if not row.is_filler and row.row not in rows:
            raise RunError(f"row {row.row} arrived in a step of rows {rows.start} to {rows.stop - 1}; resume the run")
        losses[len(rows) if row.is_filler else row.row - rows.start] += row_loss.loss_sum.double()
        losses[-2:] += torch.stack([row_loss.z_loss_sum, row_loss.router_loss_sum]).double()
        if not row.is_filler:
            given.append(Given(row.row - rows.start, row.num_supervised, read_back(batch)))
    assert steps == accumulation, f"{steps} micro-batches instead of {accumulation}"
    # DeepSpeed 0.19.8's ZeRO skips the update when this is not finite, and reports it nowhere else.
    grad_norm = float(engine.get_global_grad_norm())
    checksums, received = received_of(given, len(rows), device)
    return _agree(losses, grad_norm, checksums, received, rows, (tokens, weight), flags(), num_direct(), mesh)


def _seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators that a model on a device draws from.

    `torch.manual_seed` would also format the stack for each kind of device that the machine lacks, which can take
    longer than a layer of a short row.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _weighed(
    slices: Iterable[RowSlice], tokens: int, mesh: SequenceMesh, device: torch.device
) -> tuple[Iterable[RowSlice], float]:
    """Return a step's slices and its supervised tokens, or the sum of the tokens' weights over all ranks.

    Either no slice of a run has weights, or every one of every rank has: then all of the step's are read before the
    first is trained. Every rank must call.
    """
    slices = iter(slices)
    first = next(slices)
    if first.label_weights is None:
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
) -> tuple[float, int]:
    """Return the mean loss over evaluation rows, and their supervised tokens; every rank must call, equally often.

    Every supervised token counts equally, whatever its weight, and only by its cross-entropy.
    """
    engine.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    try:
        with torch.no_grad():
            for row in slices:
                batch: ShardedBatch = batch_of(replace(row, label_weights=None), mesh, device)
                found = training_loss(engine, batch, tile=loss_tile)
                totals[0] += found.loss_sum.double()
                totals[1] += found.num_tokens
    finally:
        engine.train()
    dist.all_reduce(totals, group=mesh.group("loss"))
    loss_sum, num_tokens = totals.tolist()
    return loss_sum / num_tokens, int(num_tokens)


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
) -> StepResult:
    tokens, weight = planned
    dist.all_reduce(losses, group=mesh.group("loss"))
    # Checksums of a row's slices add up to the row's, modulo 2**64, as int64 does when it wraps.
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
    raised, sums = rest[:NUM_FLAGS], rest[NUM_FLAGS:]
    if total != tokens:
        raise RunError(
            f"rows {rows.start} to {rows.stop - 1} contained {total} supervised tokens, the plan has {tokens}; "
            "the corpus was changed during the run. Restore data.path and resume"
        )
    *row_losses, z_loss_sum, router_loss_sum = losses.tolist()
    loss_sum = sum(row_losses)
    digest = add_digests(*(row_digest(row, from_int64(value)) for row, value in zip(rows, sums, strict=True)))
    return StepResult(
        loss=loss_sum / weight,
        z_loss=z_loss_sum / weight,
        router_loss=router_loss_sum / weight,
        grad_norm=grad_norm,
        is_finite=math.isfinite(loss_sum) and num_bad_norms == 0,
        bad_rows=tuple(row for row, value in zip(rows, row_losses, strict=False) if not math.isfinite(value)),
        tokens=tokens,
        digest=digest,
        flags=Flags.from_counts(raised),
        direct_rows=direct_slices / mesh.sp_size,
    )


class BadStepError(FinalError):
    """A step can't be kept, and the same rows would give the same result."""


class StepGuard:
    """Judges each step; all ranks reach the same verdict, since they have agreed on the result.

    ``record`` takes a bad step's number, rows, plan and reason, which tell the command which rows to leave out.
    """

    def __init__(self, elastic: ElasticSection, record: Callable[[int, range, str, str], object]) -> None:
        self._elastic, self._record = elastic, record
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)

    def judge(self, step: int, rows: range, plan_id: str, result: StepResult) -> None:
        """End the attempt if the step is bad; every rank must call, after every step.

        ``plan_id`` identifies the plan of its rows.

        Raises:
            BadStepError: The step is bad.
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
        # Without this record the run can only stop.
        with contextlib.suppress(RunError):
            self._record(step, rows, plan_id, reason)
        raise BadStepError(f"{reason}. Nothing of the step is saved; {self._way_out(rows, result)}")

    def _way_out(self, rows: range, result: StepResult) -> str:
        if self._elastic.bad_steps == "skip":
            return "its rows are left out from now on (elastic.bad_steps=skip) where that is possible"
        row = result.bad_rows[0] if result.bad_rows else rows.start
        return (
            f"a restart would meet the same. Look at its documents (`ray-ulysses inspect RUN --row {row}`), leave its "
            "rows out (elastic.bad_steps: skip), or lower optimizer.lr or raise schedule.warmup_steps in a new run"
        )


def not_finite(step: int, rows: range, result: StepResult) -> str:
    """Return a message that names what is not finite in a step (pure)."""
    bad = result.bad_rows
    if not bad:
        return (
            f"step {step}: the gradient of rows {rows.start} to {rows.stop - 1} is not finite (their loss is "
            f"{result.loss:.4f})"
        )
    listed = f"row {bad[0]}" if len(bad) == 1 else f"{len(bad)} rows, the first of them row {bad[0]},"
    return f"step {step}: the loss of {listed} of {rows.start} to {rows.stop - 1} is not finite"


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
        """Return a step's metrics by name; ``mfu`` only if the device's peak is known, other losses only if present.

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
        return numbers | {name: value for name, value in found.items() if value is not None}


def device_memory_gib(device: torch.device) -> float | None:
    """Return the memory of a GPU, in GiB; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory / 2**30 if device.type == "cuda" else None


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process, in GiB: allocated on a GPU, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
