"""ZeRO-3's trace of module calls is the same on all ranks whatever their rows hold: otherwise they wait forever."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.attention.batch import ShardedBatch
from ray_ulysses.attention.recompute import KeptOutput
from ray_ulysses.engine.zero import build_engine
from ray_ulysses.parallel.layout import ParallelLayout
from tests.distributed.harness import run_ranks
from tests.distributed.seam_case import checkpointed, make_row, zero_settings
from tests.unit.attention.models import zoo_model

MICRO_BATCHES = 4
ONE_TOKEN_DOCUMENTS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceCase:
    """A model of the zoo."""

    architecture: str
    kept: KeptOutput | None = None
    """What gradient checkpointing keeps of attention; ``None`` without checkpointing."""
    calls_by_token: bool = False
    """Whether each MLP calls its activation once more for each different token that it gets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedCalls:
    """One rank's calls in each micro-batch."""

    traced: list[list[str]]
    """Forward and backward calls that DeepSpeed traces, by the module's name."""
    untraced: list[int]
    """How many forward calls modules without parameters had."""


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
    model = checkpointed(apply_ulysses(zoo_model(case.architecture), mesh), case.kept)
    if case.calls_by_token:
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(_call_by_token)
    engine = build_engine(model, zero_settings(accumulation=len(batches), max_grad_norm=0.5, weight_decay=0.1))
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


CALLED_BY_TOKEN = [TraceCase(architecture="qwen3_next"), TraceCase(architecture="llama", calls_by_token=True)]
OTHERS = [
    TraceCase(architecture="qwen3_next", kept="both"),
    TraceCase(architecture="lfm2_moe", kept="both"),
    TraceCase(architecture="gpt_oss", kept="none"),
    TraceCase(architecture="granitemoehybrid"),
    TraceCase(architecture="lfm2"),
    TraceCase(architecture="nemotron_h", kept="kernel"),
    TraceCase(architecture="falcon_h1"),
    TraceCase(architecture="zamba2", kept="none"),
]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CALLED_BY_TOKEN, OTHERS], ids=["called by token", "others"])
def test_ranks_with_other_documents_experts_and_labels_trace_the_same_calls(cases: list[TraceCase]) -> None:
    by_rank = run_ranks(traced_calls, 4, cases, timeout_s=200)
    for place, case in enumerate(cases):
        traced = [calls for found in by_rank for calls in found[place].traced]
        assert len(traced) == 4 * MICRO_BATCHES
        assert all(calls == traced[0] for calls in traced), case
        assert "forward lm_head" in traced[0] and "backward lm_head" in traced[0]
        if case.architecture == "qwen3_next" or case.calls_by_token:
            # What is not traced differs, so that the test could fail: experts call their activation if they have one.
            assert len({tuple(found[place].untraced) for found in by_rank}) > 1, case
