"""Takes one optimizer step: micro-batches forward and backward, then one exchange of sums and flags."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ray_ulysses.data.fingerprint import mix_int
from ray_ulysses.data.read.digest import MODULUS, add_digests, from_int64, row_digest, to_int64
from ray_ulysses.engine.loss import loss_scale, training_loss
from ray_ulysses.errors import RunError
from ray_ulysses.trainer.agreement import NUM_FLAGS, Flags
from ray_ulysses.trainer.batches import Given, batch_of, read_back, received_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ray_ulysses.attention.batch import ShardedBatch
    from ray_ulysses.data.read.reader import RowSlice
    from ray_ulysses.parallel.layout import TileSetting
    from ray_ulysses.parallel.mesh import SequenceMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """A step's result, equal on every rank.

    Attributes:
        loss: Mean loss over the step's supervised tokens, by their weights if they have any, in nats.
        z_loss: Mean z-loss over them, with its coefficient; 0 without one.
        router_loss: Mean router loss of the step's rows, weighted by their supervised tokens, with its coefficient; 0
            without one.
        grad_norm: Norm of its gradient before clipping.
        is_finite: Whether loss and gradient are; if not, the weights are as they were before the step.
        bad_rows: The rows whose own loss is not finite.
        tokens: Supervised tokens that the model received.
        digest: Sum of the digests of the rows that the model received, modulo 2**64.
        flags: The flags that at least one rank has raised.
        direct_rows: Rows that were read directly because a rank's stream had not started; each rank's slice is a share.
    """

    loss: float
    z_loss: float
    router_loss: float
    grad_norm: float
    is_finite: bool
    bad_rows: tuple[int, ...]
    tokens: int
    digest: int
    flags: Flags
    direct_rows: float = 0.0


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
    # Of each row, of the fillers, and the z-loss and the router loss of all.
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
    # ZeRO of DeepSpeed 0.19.8 leaves the weights alone when this is not finite, and says so nowhere else.
    grad_norm = float(engine.get_global_grad_norm())
    checksums, received = received_of(given, len(rows), device)
    return _agree(losses, grad_norm, checksums, received, rows, (tokens, weight), flags(), num_direct(), mesh)


def _seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators that a model on a device draws from.

    `torch.manual_seed` would also format the stack for each kind of device that the machine lacks, which takes longer
    than many a layer of a short row.
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

    Every supervised token counts alike, whatever its weight, and its cross-entropy alone.
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
