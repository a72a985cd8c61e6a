"""What a checkpointed model sends and computes, as torch's profiler sees it, and that it changes no number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch, unshard
from ray_ulysses.attention.recompute import KeptOutput
from ray_ulysses.engine.zero import build_engine
from ray_ulysses.parallel.collectives import BlockExchange
from tests.apart import worst
from tests.distributed.seam_case import Fp64Throughout, checkpointed, zero_settings
from tests.distributed.seam_case import gradients_of as engine_gradients
from tests.unit.attention.models import SIZES, VOCAB, magnified, tiny_model

LENGTHS = (17, 1, 9, 13)
ROW_TOKENS = 48
_KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
_HOST_READS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCount:
    """What one forward and backward took on one rank."""

    exchanges: int
    sent_elements: int
    ring_sends: int
    attention_forwards: float
    host_reads: int


def make_row() -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, ROW_TOKENS), generator=torch.Generator().manual_seed(3))


def make_model(
    mesh: SequenceMesh, keep: KeptOutput | None, kind: str = "llama", *, head_groups: int = 1, **changes: Any
) -> Any:
    return checkpointed(apply_ulysses(magnified(tiny_model(kind, **changes)), mesh, head_groups=head_groups), keep)


def counted_step(rank: int, world_size: int, keep: KeptOutput, ring_size: int, head_groups: int = 1) -> StepCount:
    """Count the collectives, host reads and attention forwards of a whole model's forward and backward."""
    from torch.profiler import ProfilerActivity, profile

    mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
    model = make_model(mesh, keep, head_groups=head_groups)
    batch = shard_batch(make_row(), None, LENGTHS, mesh)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as forward:
        model(**batch.model_inputs())
        # Once per model, and not once per step: a look at the loss that its own forward would make.
        causal_lm_loss(model, batch)
    once = sum(event.name == _KERNEL for event in forward.events()) / 2
    sent: list[tuple[int, int]] = []
    with counted_exchanges(sent), profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss_sum, _ = causal_lm_loss(model, batch)
        loss_sum.backward()
    events = [event for event in profiler.events() if event.name.startswith(("c10d::", "aten::"))]
    names = {event.name for event in events if event.name.startswith("c10d::")}
    assert names <= {"c10d::send", "c10d::recv_"}, names
    return StepCount(
        exchanges=len(sent),
        sent_elements=sum(elements for _, elements in sent),
        ring_sends=sum(event.name == "c10d::send" for event in events) - sum(num for num, _ in sent),
        attention_forwards=sum(event.name == _KERNEL for event in events) / once,
        host_reads=sum(event.name in _HOST_READS for event in events),
    )


@contextmanager
def counted_exchanges(into: list[tuple[int, int]]) -> Iterator[None]:
    """Note of each exchange of heads how many blocks it sends, and their elements."""
    start = BlockExchange.__init__

    def counted(
        self: BlockExchange, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        sizes = [block.numel() for place, block in enumerate(sent) if place != group.rank()]
        into.append((sum(size > 0 for size in sizes), sum(sizes)))
        start(self, sent, received, group)

    with mock.patch.object(BlockExchange, "__init__", counted):
        yield


def gradients_of(model: Any, mesh: SequenceMesh) -> dict[str, torch.Tensor]:
    loss_sum, _ = causal_lm_loss(model, shard_batch(make_row(), None, LENGTHS, mesh))
    loss_sum.backward()
    return {"loss": loss_sum.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def differing(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert ours.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(ours[name], wanted[name])]


def checkpointed_differences(rank: int, world_size: int, keep: KeptOutput, ring_size: int, kind: str) -> list[str]:
    mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
    changes = {"sliding_window": 6} if kind == "mistral" else {}
    wanted = gradients_of(make_model(mesh, None, kind, **changes), mesh)
    return differing(gradients_of(make_model(mesh, keep, kind, **changes), mesh), wanted)


def zero3_differences(rank: int, world_size: int, keep: KeptOutput) -> list[str]:
    """The same through a ZeRO-3 engine that gathers each layer's weights again for the recomputation."""
    mesh = SequenceMesh.from_group(dist.group.WORLD)
    found: list[dict[str, torch.Tensor]] = []
    for kept in (None, keep):
        engine = build_engine(make_model(mesh, kept), zero_settings())
        engine.train()
        loss_sum, _ = causal_lm_loss(engine, shard_batch(make_row(), None, LENGTHS, mesh))
        engine.backward(loss_sum * loss_scale(sum(LENGTHS) - len(LENGTHS), mesh))
        found.append(engine_gradients(engine))
        engine.destroy()
    return differing(found[1], found[0])


def compile_layers(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="aot_eager", **options)
    return model


def compiled_errors(rank: int, world_size: int, keep: KeptOutput | None, ring_size: int) -> tuple[float, int]:
    """Compile every layer; return the worst relative error against eager, and the graph breaks."""
    mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
    wanted = gradients_of(make_model(mesh, keep), mesh)
    model = compile_layers(make_model(mesh, keep))
    ours = {name.replace("_orig_mod.", ""): value for name, value in gradients_of(model, mesh).items()}
    error = worst(float((ours[name] - truth).norm() / truth.norm()) for name, truth in wanted.items())
    return error, sum(torch._dynamo.utils.counters["graph_break"].values())


def compilations(rank: int, world_size: int, ring_size: int) -> list[int]:
    """Compile the layers and train rows of other lengths and documents; return the compilations after each."""
    mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
    model = compile_layers(make_model(mesh, "both"), fullgraph=True)
    counts = []
    for tokens, lengths in (
        (48, (17, 1, 9)),
        (64, (40, 20)),
        (32, (5, 6, 7, 8)),
        (96, (90,)),
        (40, (11, 3, 20)),
        (80, (33, 44)),
    ):
        ids = torch.arange(tokens) % VOCAB
        loss_sum, _ = causal_lm_loss(model, shard_batch(ids, None, lengths, mesh))
        loss_sum.backward()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return counts


def batch_of_rows_errors(
    rank: int, world_size: int, ring_size: int, head_groups: int, kind: str = "mistral"
) -> tuple[float, float]:
    """Train two rows in one batch and one after the other.

    Return the relative error of the logits, and the worst of the gradients as a share of law 1's bound: 1e-5, or twice
    the error that rows one after the other have against fp64.
    """
    mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
    rows = torch.randint(0, VOCAB, (2, ROW_TOKENS), generator=torch.Generator().manual_seed(9))
    lengths = ((17, 1, 9, 13), (30, 18))
    together, alone = (make_model(mesh, "both", kind, head_groups=head_groups, sliding_window=20) for _ in range(2))
    exact = make_model(mesh, None, kind, sliding_window=20).double()
    batch = shard_batch(rows, None, lengths, mesh)
    logits = unshard(together(**batch.model_inputs()).logits, batch)
    causal_lm_loss(together, batch)[0].backward()
    logits_errors = []
    for row, row_lengths, ours in zip(rows, lengths, logits, strict=True):
        single = shard_batch(row, None, row_lengths, mesh)
        wanted = unshard(alone(**single.model_inputs()).logits, single)[0]
        ours = ours[: len(wanted)]
        logits_errors.append(float((ours - wanted).norm() / wanted.norm()))
        causal_lm_loss(alone, single)[0].backward()
        with Fp64Throughout():
            causal_lm_loss(exact, single)[0].backward()
    shares = []
    for ours, own, truth in zip(together.parameters(), alone.parameters(), exact.parameters(), strict=True):
        error, own_error = (float((one.grad - other.grad).norm() / other.grad.norm()) for one, other in (
            (ours, own), (own, truth)
        ))  # fmt: skip
        shares.append(error / max(1e-5, 2 * own_error))
    return worst(logits_errors), worst(shares)


def chunked_errors(
    rank: int, world_size: int, ring_size: int, kind: str, changes: dict[str, Any], head_groups: int, compiled: bool
) -> float:
    """Exchange head groups, checkpointed; return the worst relative error of loss and gradients against one group."""
    mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
    wanted = gradients_of(make_model(mesh, None, kind, **changes), mesh)
    model = make_model(mesh, "both", kind, head_groups=head_groups, **changes)
    if compiled:
        compile_layers(model, fullgraph=True)
    ours = {name.replace("_orig_mod.", ""): value for name, value in gradients_of(model, mesh).items()}
    whole = torch.stack([truth.norm() for truth in wanted.values()]).norm()
    assert ours.keys() == wanted.keys()
    return worst(
        float((ours[name] - truth).norm() / (truth.norm() if truth.norm() > 1e-7 * whole else whole))
        for name, truth in wanted.items()
    )


def evaluation_differences(rank: int, world_size: int, ring_size: int) -> list[str]:
    """Compare logits without gradients, in evaluation mode and under checkpointing with those of training."""
    mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
    batch = shard_batch(make_row(), None, LENGTHS, mesh)
    wanted = unshard(make_model(mesh, None)(**batch.model_inputs()).logits, batch).detach()
    model, wrong = make_model(mesh, "both"), []
    for mode in ("train", "eval"):
        getattr(model, mode)()
        with torch.no_grad():
            if not torch.equal(unshard(model(**batch.model_inputs()).logits, batch), wanted):
                wrong.append(mode)
    return wrong


def heads_of_a_layer() -> tuple[int, int, int, int]:
    heads = SIZES["num_attention_heads"]
    return SIZES["num_hidden_layers"], heads, SIZES["num_key_value_heads"], SIZES["hidden_size"] // heads


def checkpointing_report(rank: int, world_size: int, ring_size: int) -> dict[str, list[str]]:
    cases: tuple[tuple[KeptOutput, str], ...] = (
        ("both", "llama"),
        ("kernel", "llama"),
        ("none", "llama"),
        ("both", "mistral"),
    )
    return {f"{keep}-{kind}": checkpointed_differences(rank, world_size, keep, ring_size, kind) for keep, kind in cases}


def compiled_report(rank: int, world_size: int, ring_size: int) -> list[tuple[float, int]]:
    return [compiled_errors(rank, world_size, keep, ring_size) for keep in (None, "both")]


def counts_by_kept(rank: int, world_size: int) -> dict[str, StepCount]:
    counts = {keep: counted_step(rank, world_size, keep, 1) for keep in ("both", "kernel", "none")}
    return counts | {str(head_groups): counted_step(rank, world_size, "both", 1, head_groups) for head_groups in (2, 3)}
