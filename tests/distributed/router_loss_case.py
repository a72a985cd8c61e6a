"""One training step with a router loss on many ranks, held against Transformers' own loss on one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ray_ulysses import SequenceMesh, apply_ulysses, loss_scale, shard_batch
from ray_ulysses.attention.recompute import KeptOutput, checkpoint_contexts
from ray_ulysses.engine.loss import training_loss
from ray_ulysses.engine.tiled_mlp import tile_mlps
from ray_ulysses.engine.zero import ZeroSettings, build_engine
from ray_ulysses.parallel.layout import ParallelLayout
from tests.distributed.seam_case import gradient_error
from tests.distributed.tiled_loss_case import gradients_of
from tests.unit.attention.models import VOCAB, zoo_model

Rows = Literal["one", "packed", "padded"]

LENGTHS: dict[Rows, tuple[tuple[int, ...], ...]] = {
    "one": ((32,), (24,), (31,), (8,)),
    "packed": ((17, 1, 9, 5), (1, 30), (8, 8, 8), (1, 1, 6)),
    # The last ranks of a row may hold nothing but padding.
    "padded": ((20, 3), (5,), (1, 17), (30,)),
}
PADDING = 9
COEFFICIENT = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterCase:
    """A point of the matrix."""

    architecture: str
    rows: Rows
    ulysses_size: int = 1
    ring_size: int = 1
    dp_size: int = 1
    zero_stage: int = 3
    wrapper: Literal["ddp", "fsdp2"] = "ddp"
    accumulation: int = 1
    kept: KeptOutput | None = None
    is_tiled: bool = False

    @property
    def world_size(self) -> int:
        return self.ulysses_size * self.ring_size * self.dp_size

    @property
    def label(self) -> str:
        engine = f"zero{self.zero_stage}" if self.zero_stage else self.wrapper
        layout = f"u{self.ulysses_size}-r{self.ring_size}-dp{self.dp_size}-{engine}-acc{self.accumulation}"
        return f"{self.architecture}-{layout}-{self.rows}-{self.kept or 'plain'}{'-tiled' if self.is_tiled else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterResult:
    """What one case measured."""

    case: RouterCase
    loss_error: float
    router_error: float
    gradient_error: float
    worst_tensor: str


def make_model(architecture: str) -> Any:
    return zoo_model(architecture, output_router_logits=True, router_aux_loss_coef=COEFFICIENT)


def make_row(rows: Rows, index: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return token ids ``[1, S]`` of a row, and the lengths of its documents."""
    lengths = LENGTHS[rows][index % len(LENGTHS[rows])]
    tokens = sum(lengths) + (PADDING if rows == "padded" else 0)
    generator = torch.Generator().manual_seed(50 + index)
    return torch.randint(0, VOCAB, (1, tokens), generator=generator), lengths


@cache
def reference(
    architecture: str, rows: Rows, num_rows: int, dtype: torch.dtype
) -> tuple[float, float, dict[str, torch.Tensor]]:
    model = make_model(architecture).to(dtype)
    loss, router_loss, count = torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype), 0
    for index in range(num_rows):
        input_ids, lengths = make_row(rows, index)
        scores, supervised = [], 0
        for ids in input_ids[:, : sum(lengths)].split(lengths, dim=1):
            out = model(input_ids=ids, use_cache=False)
            scores.append(out.router_logits)
            loss = loss + torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:], reduction="sum")
            supervised += ids.shape[1] - 1
        of_row = tuple(torch.cat(parts) for parts in zip(*scores, strict=True))
        balance = load_balancing_loss_func(of_row, model.num_experts, model.num_experts_per_tok)
        router_loss = router_loss + COEFFICIENT * supervised * balance
        count += supervised
    ((loss + router_loss) / count).backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return float(loss.detach()) / count, float(router_loss.detach()) / count, gradients


def run_cases(rank: int, world_size: int, cases: Sequence[RouterCase]) -> list[RouterResult]:
    """Run every case of one world on this rank."""
    return [_run_case(rank, case) for case in cases]


def _mesh(rank: int, case: RouterCase) -> tuple[SequenceMesh, int]:
    sp_size = case.ulysses_size * case.ring_size
    layout = ParallelLayout(world_size=case.world_size, sp_size=sp_size)
    made = [dist.new_group(list(ranks)) for ranks in layout.sp_groups()]
    return SequenceMesh.from_group(made[rank // sp_size], ring_size=case.ring_size), rank // sp_size


def _run_case(rank: int, case: RouterCase) -> RouterResult:
    mesh, group = _mesh(rank, case)
    num_rows = case.accumulation * case.dp_size
    scale = float(loss_scale(_tokens(case, num_rows), mesh, case.zero_stage, case.accumulation))
    engine = _engine(case, mesh)
    losses = torch.zeros(2, dtype=torch.float64)
    for number in range(case.accumulation):
        ids, lengths = make_row(case.rows, number * case.dp_size + group)
        found = training_loss(engine, shard_batch(ids, None, lengths, mesh), tile=5 if case.is_tiled else "off")
        losses += torch.stack([found.loss_sum, found.router_loss_sum]).double()
        if case.zero_stage == 0:
            # Nothing divides by micro-batches.
            (found.objective_sum * scale / case.accumulation).backward()
        else:
            engine.backward(found.objective_sum * scale)
            if number + 1 < case.accumulation:
                engine.step()
    gradients = _gradients(engine, case)
    dist.all_reduce(losses)
    return _held_against_one_process(case, num_rows, losses, gradients)


def _tokens(case: RouterCase, num_rows: int) -> int:
    rows = [make_row(case.rows, index)[1] for index in range(num_rows)]
    return sum(sum(lengths) - len(lengths) for lengths in rows)


def _engine(case: RouterCase, mesh: SequenceMesh) -> Any:
    model: Any = apply_ulysses(make_model(case.architecture), mesh).train()
    if case.kept is not None:
        options = {"use_reentrant": False, "context_fn": checkpoint_contexts(case.kept)}
        options = {name: value for name, value in options.items() if value is not None}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if case.is_tiled:
        tile_mlps(model, 3)
    if case.wrapper == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)
    if case.zero_stage == 0:
        return DistributedDataParallel(model)
    settings = ZeroSettings(
        stage=case.zero_stage, dtype="fp32", accumulation=case.accumulation, max_grad_norm=None, learning_rate=1e-3,
        betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, partition_everything=True,
    )  # type: ignore[arg-type]  # fmt: skip
    return build_engine(model, settings)


def _gradients(engine: Any, case: RouterCase) -> dict[str, torch.Tensor]:
    if case.zero_stage != 0:
        gradients = gradients_of(engine)
        engine.step()
        engine.destroy()
        return gradients
    assert all(parameter.grad is not None for parameter in engine.parameters())
    grads: dict[str, Any] = {name.removeprefix("module."): one.grad for name, one in engine.named_parameters()}
    return {name: one.full_tensor() if case.wrapper == "fsdp2" else one.clone() for name, one in grads.items()}


def _held_against_one_process(
    case: RouterCase, num_rows: int, losses: torch.Tensor, gradients: dict[str, torch.Tensor]
) -> RouterResult:
    *wanted_losses, wanted = reference(case.architecture, case.rows, num_rows, torch.float64)
    *_, own = reference(case.architecture, case.rows, num_rows, torch.float32)
    errors = [
        abs(value / _tokens(case, num_rows) - one) / abs(one)
        for value, one in zip(losses.tolist(), wanted_losses, strict=True)
    ]
    error, worst = gradient_error(gradients, own, wanted)
    return RouterResult(
        case=case, loss_error=errors[0], router_error=errors[1], gradient_error=error, worst_tensor=worst
    )
