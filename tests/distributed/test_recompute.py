"""What saves memory changes no bit: attention that runs once under checkpointing, and activations in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, loss_scale, shard_batch, unshard
from ray_ulysses.attention.recompute import KeptOutput
from ray_ulysses.config import Config
from ray_ulysses.engine.activation_offload import CpuCopies, offload_activations
from ray_ulysses.engine.tiled_mlp import tile_mlps
from ray_ulysses.engine.zero import build_engine
from ray_ulysses.engine.zero_state import state_source
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.collectives import BlockExchange
from ray_ulysses.parallel.layout import assign_heads
from ray_ulysses.tracking.history import read_history
from tests.apart import worst
from tests.breadth import fast_only
from tests.distributed.harness import run_calls, run_ranks
from tests.distributed.run_case import make_config, run_worker, train
from tests.distributed.seam_case import Fp64Throughout, checkpointed, gradient_error, zero_settings
from tests.distributed.seam_case import gradients_of as engine_gradients
from tests.planned import estimate
from tests.unit.attention.models import SIZES, VOCAB, magnified, tiny_model, zoo_model

LENGTHS = (17, 1, 9, 13)
ROW_TOKENS = 48
_KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
_HOST_READS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCount:
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
        exchanges=len(sent), sent_elements=sum(elements for _, elements in sent),
        ring_sends=sum(event.name == "c10d::send" for event in events) - sum(num for num, _ in sent),
        attention_forwards=sum(event.name == _KERNEL for event in events) / once,
        host_reads=sum(event.name in _HOST_READS for event in events),
    )  # fmt: skip


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


def checkpointed_differences(rank: int, world_size: int, ring_size: int) -> dict[str, list[str]]:
    """Return by model and what is kept the gradients that differ by a bit from those without checkpointing."""
    mesh, found = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size), {}
    kept: dict[str, tuple[KeptOutput, ...]] = {"llama": ("both", "kernel", "none"), "mistral": ("both",)}
    for kind, keeps in kept.items():
        changes = {"sliding_window": 6} if kind == "mistral" else {}
        wanted = gradients_of(make_model(mesh, None, kind, **changes), mesh)
        for keep in keeps:
            ours = gradients_of(make_model(mesh, keep, kind, **changes), mesh)
            found[f"{keep}-{kind}"] = differing(ours, wanted)
    return found


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


def compile_layers(model: Any) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="aot_eager", fullgraph=True)
    return model


def compilations(rank: int, world_size: int) -> list[int]:
    """Compile the layers and train rows of other lengths and documents; return the compilations after each."""
    mesh = SequenceMesh.from_group(dist.group.WORLD)
    model = compile_layers(make_model(mesh, "both"))
    counts = []
    rows = {48: (17, 1, 9), 64: (40, 20), 32: (5, 6, 7, 8), 96: (90,), 40: (11, 3, 20), 80: (33, 44)}
    for tokens, lengths in rows.items():
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
    ours, own, truth = (
        {name: one.grad for name, one in model.named_parameters()} for model in (together, alone, exact)
    )
    return worst(logits_errors), gradient_error(ours, own, truth)[0]


def errors(
    rank: int, world_size: int, ring_size: int, kind: str, changes: Any, keep: Any, head_groups: int, compiled: bool
) -> float:
    """Return the worst relative error of loss and gradients against one group of heads, all kept and not compiled."""
    mesh = SequenceMesh.from_group(dist.group.WORLD, ring_size=ring_size)
    wanted = gradients_of(make_model(mesh, None, kind, **changes), mesh)
    model = make_model(mesh, keep, kind, head_groups=head_groups, **changes)
    if compiled:
        # A graph break is an error.
        compile_layers(model)
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


def counts_by_kept(rank: int, world_size: int) -> dict[str, StepCount]:
    counts = {keep: counted_step(rank, world_size, keep, 1) for keep in ("both", "kernel", "none")}
    return counts | {str(head_groups): counted_step(rank, world_size, "both", 1, head_groups) for head_groups in (2, 3)}


LAYERS, HEADS, KV_HEADS = (SIZES[name] for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"))
HEAD_SIZE = SIZES["hidden_size"] // HEADS
Reports = dict[str, list[Any]]

# Ranks, and ring size, head_groups and kind of model. Gemma 4's global layers have heads of another size and number.
BATCHES: dict[str, tuple[Any, ...]] = {"head_groups": (2, 1, 2), "other-heads-and-ring": (4, 2, 1, "gemma4_text")}
WITH_SINKS = {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
CHANGED: dict[str, tuple[Any, ...]] = {
    # Ranks, ring size, kind of model and changes to it, what is kept, head_groups, and whether it is compiled.
    "sinks-and-ring": (4, 2, "gpt_oss", WITH_SINKS, "both", 2, False),
    "uneven": (3, 1, "llama", {"num_attention_heads": 8, "num_key_value_heads": 4}, "both", 3, False),
    "compiled": (2, 1, "llama", {}, None, 1, True),
    "compiled-checkpointed": (2, 1, "llama", {}, "both", 1, True),
    "compiled-ring": (2, 2, "llama", {}, None, 1, True),
    "compiled-windows-and-ring": (2, 2, "gemma4_text", {}, "both", 1, True),
}


@pytest.fixture(scope="module")
def reports() -> Reports:
    """What each call returned, by rank; all calls of a number of ranks are made by the same processes."""
    calls: dict[int, dict[str, tuple[Any, ...]]] = {
        2: {
            "counts": (counts_by_kept,),
            **{f"checkpointing-{ring_size}": (checkpointed_differences, ring_size) for ring_size in (1, 2)},
            "evaluation": (evaluation_differences, 2),
            "zero-3": (zero3_differences, "both"),
        },
        4: {
            **{f"traffic-{ring_size}": (counted_step, "both", ring_size) for ring_size in (2, 4)},
            "sinks-and-ring": (errors, *CHANGED["sinks-and-ring"][1:]),
        },
    }
    for name, (ranks, *arguments) in BATCHES.items():
        calls[ranks][name] = (batch_of_rows_errors, *arguments)
    return {
        name: report for ranks, one in calls.items() for name, report in run_calls(ranks, one, timeout_s=200).items()
    }


def sent_elements(query_units: int) -> int:
    kv_heads = sum(rank.num_kv_heads for rank in assign_heads(HEADS, KV_HEADS, 2).ranks)
    # Half of the heads are the other rank's.
    return LAYERS * ROW_TOKENS // 2 * HEAD_SIZE * (query_units * HEADS + 6 * kv_heads) // 2


def test_collectives_bytes_and_attention_forwards_of_a_layer(reports: Reports) -> None:
    """Forward, recomputation and backward together; DeepSpeed 0.19.8 takes 14, and 6 hq + 6 hkv in bytes.

    In head_groups: two collectives each forward, none for the recomputation, two backward, with the model's layout kept
    only; a chunk beyond a rank's KV heads is empty.
    """
    expected = {"both": (5, 5, 1), "kernel": (6, 6, 1), "none": (6, 6, 2), "2": (8, 6, 1), "3": (12, 6, 1)}
    assert len(reports["counts"]) == 2
    for counts in reports["counts"]:
        for name, (exchanges, query_units, attentions) in expected.items():
            count = counts[name]
            assert count.exchanges == exchanges * LAYERS, name
            assert count.sent_elements == sent_elements(query_units), name
            assert count.attention_forwards == attentions, name
            assert (count.ring_sends, count.host_reads) == (0, 0), name
        theirs = LAYERS * ROW_TOKENS // 2 * HEAD_SIZE * (6 * HEADS + 6 * KV_HEADS) // 2
        assert counts["both"].sent_elements / theirs <= (5 * HEADS + 6 * KV_HEADS) / (6 * HEADS + 6 * KV_HEADS)


@pytest.mark.parametrize("ring_size", [2, 4])
def test_ring_traffic_is_apart_from_the_exchange(reports: Reports, ring_size: int) -> None:
    """Keys go round once forward and once backward; their gradients once, all the way home."""
    for count in reports[f"traffic-{ring_size}"]:
        assert count.exchanges == (5 * LAYERS if ring_size == 2 else 0)
        assert count.ring_sends == LAYERS * (2 * (ring_size - 1) + ring_size)
        assert count.attention_forwards == 1
        assert count.host_reads == 0


@pytest.mark.parametrize("ring_size", [1, 2], ids=["ulysses", "ring"])
def test_checkpointing_changes_no_bit(reports: Reports, ring_size: int) -> None:
    for report in reports[f"checkpointing-{ring_size}"]:
        assert not any(report.values()), report
        assert len(report) == 4


def test_it_goes_with_zero3(reports: Reports) -> None:
    assert reports["zero-3"] == [[], []]


@pytest.mark.slow
def test_rows_of_other_lengths_do_not_compile_a_layer_anew() -> None:
    """Once for the first shapes, once for shapes that vary, and then no more."""
    for counts in run_ranks(compilations, 2, timeout_s=180):
        assert counts[-1] == counts[2], counts


@pytest.mark.parametrize("name", BATCHES)
def test_rows_of_a_batch_train_as_one_after_the_other(reports: Reports, name: str) -> None:
    """fp32, sums over rows in another order: law 1."""
    assert len(reports[name]) == BATCHES[name][0]
    for logits_error, share_of_bound in reports[name]:
        assert logits_error <= 1e-5 and share_of_bound <= 1


def test_evaluation_gives_the_numbers_of_training(reports: Reports) -> None:
    assert reports["evaluation"] == [[], []]


@pytest.mark.parametrize("name", fast_only(CHANGED, "sinks-and-ring"))
def test_neither_head_groups_nor_compiled_layers_change_the_numbers(reports: Reports, name: str) -> None:
    """fp32, some sums in another order: law 1's floor."""
    ranks, *arguments = CHANGED[name]
    found = reports[name] if name in reports else run_ranks(errors, ranks, *arguments, timeout_s=180)
    assert len(found) == ranks and all(error <= 1e-5 for error in found), found


ROWS = ((17, 1, 9, 13), (40, 8), (30, 2))
Kind = Literal["layer_inputs", "attention_outputs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadCase:
    architecture: str = "llama"
    kinds: tuple[Kind, ...] = ("layer_inputs", "attention_outputs")
    keep: KeptOutput = "both"
    ulysses_size: int = 1
    ring_size: int = 1
    head_groups: int = 1
    zero_stage: int = 3
    dtype: Literal["bf16", "fp32"] = "fp32"
    tied: bool = True

    @property
    def sp_size(self) -> int:
        return self.ulysses_size * self.ring_size


def differences(rank: int, world_size: int, cases: list[OffloadCase]) -> list[list[str]]:
    """Return, for each case, what of the first moments and losses of two steps differs by a bit."""
    found = []
    for case in cases:
        wanted, ours = _train(case, ()), _train(case, case.kinds)
        assert wanted.keys() == ours.keys() and len(wanted) > 10
        found.append([name for name, one in wanted.items() if not torch.equal(one, ours[name])])
    return found


def _train(case: OffloadCase, kinds: Any) -> dict[str, torch.Tensor]:
    """Take two steps of rows of packed documents, with tiles; as many bytes as `plan` counts must suffice."""
    starts = range(0, dist.get_world_size(), case.sp_size)
    groups = [dist.new_group(list(range(start, start + case.sp_size))) for start in starts]
    mesh = SequenceMesh.from_group(groups[dist.get_rank() // case.sp_size], ring_size=case.ring_size)
    if case.architecture == "llama":
        model = magnified(tiny_model("llama", num_hidden_layers=4, tie_word_embeddings=case.tied))
    else:
        model = zoo_model(case.architecture)
    model = model.to({"bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype])
    checkpointed(apply_ulysses(model, mesh, head_groups=case.head_groups), case.keep)
    tile_mlps(model, 7)
    planned = estimate(
        ModelShape.from_config_dict(model.config.to_dict()), world_size=case.sp_size, sp_size=case.sp_size,
        ring_size=case.ring_size, context_tokens=max(sum(row) for row in ROWS), dtype=case.dtype,
        attention_output=case.keep, attention_head_groups=case.head_groups, offload_activations=kinds,
    )  # fmt: skip
    offload_activations(model, kinds, keep=case.keep, budget_bytes=planned.offloaded_bytes, device=torch.device("cpu"))
    settings = zero_settings(stage=case.zero_stage, dtype=case.dtype, accumulation=len(ROWS), max_grad_norm=1.0)
    engine = build_engine(model, settings)
    engine.train()
    found: dict[str, torch.Tensor] = {}
    scale = loss_scale(200, mesh, zero_stage=case.zero_stage, accumulation=len(ROWS))
    for number in range(2 * len(ROWS)):
        lengths = ROWS[number % len(ROWS)]
        generator = torch.Generator().manual_seed(number * 100 + dist.get_rank() // case.sp_size)
        row = torch.randint(0, VOCAB, (1, sum(lengths)), generator=generator)
        loss_sum, _ = causal_lm_loss(engine, shard_batch(row, None, lengths, mesh), tile=5)
        engine.backward(loss_sum * scale)
        engine.step()
        found[f"loss {number}"] = loss_sum.detach()
    found |= {part.key: part.tensor.clone() for part in state_source(engine).parts}
    engine.destroy()
    return found


LAYOUTS = [
    OffloadCase(tied=False),
    OffloadCase(ulysses_size=2, keep="kernel", kinds=("attention_outputs",), dtype="bf16"),
    OffloadCase(ulysses_size=2, keep="none", kinds=("layer_inputs",), zero_stage=2),
    OffloadCase(ring_size=2, zero_stage=1),
    OffloadCase(ulysses_size=2, head_groups=2),
]
HYBRIDS = ("lfm2", "qwen3_next", "kimi_linear", "minimax", "jamba", "nemotron_h")
OF_EACH_KIND = [OffloadCase(architecture=name, ulysses_size=2) for name in HYBRIDS]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [LAYOUTS, OF_EACH_KIND], ids=["layouts", "hybrids"])
def test_no_bit_of_two_steps_changes(cases: list[OffloadCase]) -> None:
    for rank in run_ranks(differences, 2, cases, timeout_s=500):
        assert rank == [[]] * len(cases)


def counted_run(rank: int, world_size: int, config: Config, session: str) -> tuple[int, int]:
    with (
        mock.patch.object(CpuCopies, "copy_out", autospec=True, side_effect=CpuCopies.copy_out) as out,
        mock.patch.object(CpuCopies, "copy_in", autospec=True, side_effect=CpuCopies.copy_in) as back,
    ):
        run_worker(rank, world_size, config, session)
    return out.call_count, back.call_count


@pytest.mark.slow
def test_a_run_with_activations_in_host_memory_is_the_run_without(tmp_path: Path, corpus: Path) -> None:
    model: Any = make_config(tmp_path, corpus).model.config
    steps = []
    for name, kinds in (("device", []), ("host", ["layer_inputs", "attention_outputs"])):
        config = make_config(
            tmp_path / name, corpus, run__stop_step=2, cluster__workers=2, data__rows_per_step=3,
            memory__offload_activations=kinds, model__config=model | {"num_hidden_layers": 4},
        )  # fmt: skip
        # Input, output in two layouts and log-sum-exp of 4 layers, in 3 micro-batches of 2 steps; two layers stay.
        counts = (2 * 3 * 4 * 4, 2 * 3 * 2 * 4) if kinds else (0, 0)
        assert train(config, name, worker=counted_run) == counts
        steps.append([(step.loss, step.grad_norm) for step in read_history(config.run_dir).steps])
    assert len(steps[0]) == 2 and steps[0] == steps[1]
