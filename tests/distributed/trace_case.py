"""The calls of modules that ZeRO-3 keeps a trace of, on ranks whose rows have nothing in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.attention.batch import ShardedBatch
from ray_ulysses.attention.recompute import KeptOutput, checkpoint_contexts
from ray_ulysses.engine.zero import ZeroSettings, build_engine
from ray_ulysses.parallel.layout import ParallelLayout
from tests.distributed.seam_case import make_row
from tests.unit.attention.models import zoo_model

MICRO_BATCHES = 4
ONE_TOKEN_DOCUMENTS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceCase:
    """A model of the zoo.

    Attributes:
        architecture: A name of the zoo.
        kept: What gradient checkpointing keeps of attention; ``None`` without checkpointing.
        calls_by_token: Whether each MLP calls its activation once more for each different token that it gets.
    """

    architecture: str
    kept: KeptOutput | None = None
    calls_by_token: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedCalls:
    """One rank's calls in each micro-batch.

    Attributes:
        traced: Forward and backward calls that DeepSpeed traces, by the module's name.
        untraced: How many forward calls modules without parameters had.
    """

    traced: list[list[str]]
    untraced: list[int]


def traced_calls(rank: int, world_size: int, cases: Sequence[TraceCase]) -> list[TracedCalls]:
    """Train each model for some micro-batches on two groups of two ranks; return this rank's calls.

    After each micro-batch the ranks compare them, since ranks that differ would wait for each other in the next one.
    """
    layout = ParallelLayout(world_size=world_size, sp_size=2)
    groups = [dist.new_group(list(ranks)) for ranks in layout.sp_groups()]
    mesh = SequenceMesh.from_group(groups[layout.dp_rank(rank)])
    return [_run(case, mesh, list(_batches(layout.dp_rank(rank), mesh))) for case in cases]


def _batches(dp_rank: int, mesh: SequenceMesh) -> Iterator[ShardedBatch]:
    """Yield rows of one group; in turn, it has one whose every token is the same document, without any label."""
    for number in range(MICRO_BATCHES):
        if number % 2 and number // 2 == dp_rank:
            ids = torch.full((1, ONE_TOKEN_DOCUMENTS), 7)
            yield shard_batch(ids, None, (1,) * ONE_TOKEN_DOCUMENTS, mesh)
        else:
            input_ids, labels, lengths = make_row(2 * number + dp_rank)
            yield shard_batch(input_ids, labels, lengths, mesh)


def _run(case: TraceCase, mesh: SequenceMesh, batches: list[ShardedBatch]) -> TracedCalls:
    model = apply_ulysses(zoo_model(case.architecture), mesh).train()
    if case.kept is not None:
        options = {"use_reentrant": False, "context_fn": checkpoint_contexts(case.kept)}
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={name: value for name, value in options.items() if value is not None}
        )
    if case.calls_by_token:
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(_call_by_token)
    settings = ZeroSettings(
        dtype="fp32",
        accumulation=len(batches),
        max_grad_norm=0.5,
        learning_rate=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        partition_everything=True,
    )
    engine = build_engine(model, settings)
    calls: list[str] = []
    _record_traced(engine, calls)
    untraced: list[str] = []
    for name, module in engine.module.named_modules():
        if next(module.parameters(), None) is None:
            module.register_forward_pre_hook(lambda module, args, name=name: untraced.append(name))
    found = TracedCalls(traced=[], untraced=[])
    for batch in batches:
        loss_sum, _ = causal_lm_loss(engine, batch)
        engine.backward(loss_sum)
        engine.step()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, calls)
        assert all(one == calls for one in everyone), f"{case} {[len(one) for one in everyone]}"
        found.traced.append(list(calls))
        found.untraced.append(len(untraced))
        calls.clear()
        untraced.clear()
    engine.destroy()
    return found


def _call_by_token(mlp: Any, args: tuple[torch.Tensor]) -> None:
    for token_H in args[0].detach().flatten(0, 1).unique(dim=0):
        mlp.act_fn(token_H)


def _record_traced(engine: Any, calls: list[str]) -> None:
    names = {module: name for name, module in engine.module.named_modules()}
    offload = engine.optimizer.parameter_offload

    def recorded(direction: str, before: Callable[[Any], None], module: Any) -> None:
        calls.append(f"{direction} {names[module]}")
        before(module)

    for direction in ("forward", "backward"):
        name = f"pre_sub_module_{direction}_function"
        setattr(offload, name, partial(recorded, direction, getattr(offload, name)))
