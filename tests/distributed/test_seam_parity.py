"""Law 1 through the library seam at every layout, and calls of modules that are the same on all ranks under ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.attention.batch import ShardedBatch
from ray_ulysses.attention.recompute import KeptOutput
from ray_ulysses.config.loading import parse_config
from ray_ulysses.config.model import AdapterSection
from ray_ulysses.engine.adapter import ADAPTER_FILE, add_adapter, file_name
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.zero import build_engine
from ray_ulysses.parallel.layout import ParallelLayout, held_ranges, row_multiple
from tests.distributed.harness import run_ranks
from tests.distributed.seam_case import (
    ADAPTERS,
    HEADS,
    ROWS,
    SeamCase,
    check,
    checkpointed,
    make_row,
    run_cases,
    zero_settings,
)
from tests.result_table import ResultTable
from tests.unit.attention.models import ARCHITECTURES, ENCODERS, HYBRIDS, zoo_model
from tests.unit.attention.multimodal import MULTIMODAL
from tests.unit.config.trees import small_tree

KINDS: dict[int, list[SeamCase]] = {
    # By the number of ranks; 4 heads over 3 ranks is an uneven split.
    3: [SeamCase(architecture="gpt_oss", ulysses_size=3)],
    4: [
        *(SeamCase(architecture=name, ulysses_size=4) for name in ("gemma2", "gpt_neox")),
        *(
            SeamCase(architecture=name, ulysses_size=2, ring_size=2)
            for name in ("gemma4_text", "deepseek_v3", "llama4_text")
        ),
    ],
}
LEAN: dict[str, Any] = {"kept": "both", "tile": 5, "mlp_tile": 3, "offloads": True}
"""Everything that saves memory."""


def hold(cases: list[SeamCase], timeout_s: float = 200) -> None:
    """Hold cases of one world to law 1."""
    (world_size,) = {case.world_size for case in cases}
    results = run_ranks(run_cases, world_size, cases, timeout_s=timeout_s)[0]
    assert [result.case for result in results] == cases
    for result in results:
        check(result)


@pytest.mark.parametrize("ring_size", [1, 2])
@pytest.mark.parametrize("ulysses_size", [1, 2, 3, 4])
def test_a_document_crosses_every_border_of_slices_in_every_case(ulysses_size: int, ring_size: int) -> None:
    tokens, lengths = ROWS[0]
    sp_size, ends = ulysses_size * ring_size, list(accumulate(lengths))
    row_tokens = tokens + -tokens % row_multiple(sp_size, ring_size)
    stops = {stop for rank in range(sp_size) for _, stop in held_ranges(row_tokens, rank, sp_size, ring_size)}
    assert len(stops - {row_tokens}) >= sp_size - 1
    longest = lengths.index(max(lengths))
    assert all(ends[longest] - lengths[longest] < border < ends[longest] for border in stops - {row_tokens})


def test_a_step_equals_that_of_one_process() -> None:
    # Rows are shared as well as split: every stage, a tied head and a window.
    cases = [("llama", 1), ("mistral", 2), ("qwen3", 3)]
    hold([
        SeamCase(architecture=name, ulysses_size=2, dp_size=2, zero_stage=stage, accumulation=2)
        for name, stage in cases
    ])  # fmt: skip


@pytest.mark.parametrize("ranks", KINDS)
def test_every_kind_of_attention_equals_that_of_one_process_on_slices_and_rings(ranks: int) -> None:
    hold(KINDS[ranks])


def test_masked_language_models_equal_one_process_on_slices_and_rings() -> None:
    # Windows on both sides over a ring, positions after the padding token's, and a tied head under ZeRO-3.
    hold([
        SeamCase(architecture="modernbert", ulysses_size=2, ring_size=2, zero_stage=3, accumulation=2, tile=5),
        # Masked tokens of a document are on several ranks.
        SeamCase(architecture="esm-token_dropout", ulysses_size=2, ring_size=2, accumulation=2),
        SeamCase(architecture="roberta", ulysses_size=2, dp_size=2, zero_stage=1, accumulation=1, kept="both", tile=7),
        SeamCase(architecture="eurobert", ulysses_size=1, ring_size=4, accumulation=2, rows="weighted"),
    ])  # fmt: skip


@pytest.mark.slow
def test_the_text_part_of_a_multimodal_model_trains_as_the_whole_does_on_text() -> None:
    hold([SeamCase(architecture=name, ulysses_size=2) for name in MULTIMODAL])


@pytest.mark.slow
def test_the_text_part_trains_as_the_whole_does_on_a_ring_and_under_zero_3() -> None:
    # A tied head under ZeRO-3, and positions in three axes.
    hold([
        SeamCase(architecture="qwen3_vl", ulysses_size=2, ring_size=2),
        SeamCase(architecture="gemma3", ulysses_size=2, dp_size=2, zero_stage=3, accumulation=1),
        SeamCase(architecture="qwen2_5_vl", ulysses_size=2, dp_size=2, zero_stage=3, accumulation=1),
    ])  # fmt: skip


@pytest.mark.slow
def test_fused_norms_have_the_gradients_of_one_process() -> None:
    fused: dict[str, Any] = {"has_fused_norms": True, "accumulation": 2, "ulysses_size": 2}
    hold([
        SeamCase(architecture="qwen3", zero_stage=3, **fused),
        SeamCase(architecture="gemma4_text", kept="both", **fused),
        SeamCase(architecture="zamba2", zero_stage=1, **fused),
    ])  # fmt: skip


@pytest.mark.slow
def test_compiled_tiles_have_the_gradients_of_one_process(bases: dict[str, str]) -> None:
    compiled: dict[str, Any] = {"has_compiled_mlps": True, "accumulation": 2, "ulysses_size": 2, **LEAN}
    hold([
        SeamCase(architecture="qwen3", zero_stage=3, **compiled),
        SeamCase(architecture="gemma2", zero_stage=1, **compiled),
        SeamCase(architecture="untied", adapter="mlp", base=bases["untied"], zero_stage=3, **compiled),
    ])  # fmt: skip


@pytest.mark.slow
def test_the_loss_over_tiles_equals_that_of_one_process() -> None:
    hold([
        # One tile is longer than each row.
        SeamCase(architecture="scale", ulysses_size=2, zero_stage=2, accumulation=1, tile=64),
        # Ranks whose rows have other numbers of tiles.
        SeamCase(architecture="llama", dp_size=2, zero_stage=3, accumulation=2, tile=5),
    ])  # fmt: skip


def test_the_router_loss_of_shared_rows_equals_that_of_one_process() -> None:
    tiled: dict[str, Any] = {"tile": 5, "mlp_tile": 3}
    two: dict[str, Any] = {"has_router_loss": True, "ulysses_size": 2}
    hold([
        SeamCase(architecture="mixtral", **two, zero_stage=3, accumulation=3, kept="both", **tiled),
        SeamCase(
            architecture="mixtral", has_router_loss=True, dp_size=2, zero_stage=3, accumulation=1, rows="padded",
            kept="none", **tiled,
        ),
        SeamCase(architecture="gpt_oss", has_router_loss=True, ring_size=2, accumulation=2, tile="off"),
    ])  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of a pretrained model, by whether its embeddings are tied."""
    folder = tmp_path_factory.mktemp("bases")
    for name in ("tied", "untied"):
        tree = small_tree(run__seed=5)
        tree["model"]["config"]["tie_word_embeddings"] = name == "tied"
        model: Any = build_model(parse_config(tree))
        model.save_pretrained(folder / name)
        adapted = add_adapter(model, AdapterSection(**ADAPTERS["continued"]), seed=1)
        trained = {name: one for name, one in adapted.named_parameters() if one.requires_grad}
        for one in trained.values():
            one.data += 0.05 * torch.randn_like(one)
        adapted.save_pretrained(folder / name / "adapter")
        save_file({file_name(key): one.data for key, one in trained.items()}, folder / name / "adapter" / ADAPTER_FILE)
    return {name: str(folder / name) for name in ("tied", "untied")}


def test_the_gradients_of_an_adapter_equal_those_of_one_process(bases: dict[str, str]) -> None:
    case: dict[str, Any] = {"ulysses_size": 2, "zero_stage": 3, "accumulation": 1}
    untied, tied = {"architecture": "untied"}, {"architecture": "tied"}
    hold([
        # Its norms are trained.
        SeamCase(
            **tied, adapter="extension", base=bases["tied"], has_fused_norms=True, **{**case, "accumulation": 3}, **LEAN
        ),
        SeamCase(**untied, adapter="head", base=bases["untied"], **case, **LEAN),
        # Nothing before the first layer's MLP is trained, and nothing is checkpointed.
        SeamCase(**untied, adapter="mlp", **case, tile="off", mlp_tile=3),
    ])  # fmt: skip


def test_adapters_on_experts_and_a_dora_have_the_gradients_of_one_process(bases: dict[str, str]) -> None:
    two: dict[str, Any] = {"zero_stage": 3, "accumulation": 3}
    hold([
        SeamCase(architecture="mixtral", adapter="router", ulysses_size=2, **two, **LEAN),
        SeamCase(architecture="gpt_oss", adapter="experts", ring_size=2, zero_stage=1, accumulation=2, tile="off"),
        SeamCase(architecture="qwen3_moe", adapter="experts", dp_size=2, **two, tile="off"),
        SeamCase(architecture="untied", adapter="continued", base=bases["untied"], ulysses_size=2, **two, tile="off"),
        # The magnitudes are the norms of weights that were partitioned while they were loaded.
        SeamCase(architecture="untied", adapter="dora", base=bases["untied"], ulysses_size=2, **two, **LEAN),
    ])  # fmt: skip


def test_the_gradients_over_a_quantized_base_equal_those_of_its_dequantized_weights(bases: dict[str, str]) -> None:
    case: dict[str, Any] = {"adapter": "linear", "accumulation": 2}
    hold([
        SeamCase(
            architecture="untied", base=bases["untied"], base_dtype="nf4", ulysses_size=2, zero_stage=3, **case, **LEAN
        ),
        # Nothing is checkpointed or tiled: the backward pass must find its weights again.
        SeamCase(architecture="mixtral", base_dtype="int8", ring_size=2, zero_stage=3, **case, tile="off"),
        SeamCase(architecture="mixtral", base_dtype="nf4", ulysses_size=2, zero_stage=1, **case, **LEAN),
    ])  # fmt: skip


def _matrices() -> dict[str, tuple[str, list[SeamCase]]]:
    shapes, kept = list(product((1, 2, 4), (1, 2))), ("both", "kernel", "none", None)
    return {
        "seam_parity": (
            "Law 1 through the library seam: one step against one process, fp32",
            [
                SeamCase(architecture=name, ulysses_size=u, dp_size=dp, zero_stage=stage, accumulation=rows)
                for (u, dp), name, stage, rows in product(shapes, ("llama", "qwen3", "mistral"), (1, 2, 3), (1, 3))
            ],
        ),
        "seam_architectures": (
            "Law 1: every architecture at every Ulysses and ring degree, fp32",
            [
                SeamCase(architecture=name, ulysses_size=u, ring_size=ring)
                for u, ring, name in product((1, 2, 3, 4), (1, 2), ARCHITECTURES)
            ],
        ),
        "encoders": (
            "Law 1 for masked language models: one step against one process, fp32",
            [
                SeamCase(
                    architecture=name, ulysses_size=u, ring_size=ring, zero_stage=stage, accumulation=rows, tile=tile,
                    kept=kept[(stage + rows + place) % len(kept)],
                )
                for u, ring, stage, rows, tile, (place, name) in product(
                    (1, 2, 4), (1, 2), (1, 2, 3), (1, 3), ("off", 5), enumerate(ENCODERS)
                )
            ],
        ),
        "hybrids": (
            "Law 1 for hybrids: one step against one process, fp32",
            [
                SeamCase(
                    architecture=name, ulysses_size=u, dp_size=dp, zero_stage=stage, accumulation=rows,
                    kept=kept[(stage + rows + place) % len(kept)],
                )
                for (u, dp), stage, rows, (place, name) in product(
                    ((2, 1), (2, 2), (4, 1)), (2, 3), (1, 3), enumerate(HYBRIDS)
                )
            ],
        ),
        "tiled_loss": (
            "Law 1 for the loss over tiles: one step against one process, fp32",
            [
                SeamCase(
                    architecture=name, ulysses_size=u, ring_size=ring, zero_stage=stage, accumulation=2, rows=rows,
                    tile=5, **({"mlp_tile": 3, "kept": "both"} if name in ("untied", "mixtral") else {}),
                )
                for u, ring, name, stage, rows in product(
                    (1, 2), (1, 2), ("llama", "qwen3", "mixtral", *HEADS), (1, 2, 3), ("masked", "weighted")
                )
            ],
        ),
        "adapters": (
            "Law 1 for `model.adapter`: one step against one process, fp32",
            [
                SeamCase(
                    architecture=name, adapter=adapter, ulysses_size=u, ring_size=ring, zero_stage=stage,
                    accumulation=2, **memory,
                )
                for u, ring, name, adapter, stage, memory in product(
                    (1, 2), (1, 2), ("tied", "untied", "gemma2", "gpt2", "granite", "mixtral", "phi3"), ADAPTERS,
                    (1, 2, 3), (LEAN, {"tile": "off"}),
                )
                # An adapter of a tied head is refused, and some models name their layers otherwise.
                if adapter in ("linear", "extension", "mlp", "head")
                and (name == "untied" or adapter == "linear" or (name == "tied" and adapter != "head"))
            ],
        ),
        "adapters_on_experts": (
            "Law 1 for adapters on experts and routers, and for DoRA: one step against one process, fp32",
            [
                SeamCase(
                    architecture=name, adapter=adapter, ulysses_size=u, ring_size=ring, zero_stage=stage,
                    accumulation=2, **memory,
                )
                for u, ring, (name, adapter), stage, memory in product(
                    (1, 2), (1, 2),
                    (
                        ("mixtral", "experts"), ("mixtral", "router"), ("qwen3_moe", "experts"), ("gpt_oss", "experts"),
                        ("untied", "dora"),
                    ),
                    (1, 3), (LEAN, {"tile": "off"}),
                )
            ],
        ),
        "quantized_base": (
            "Law 1 for `model.base_dtype`: one step against one process with the dequantized weights, fp32",
            [
                SeamCase(
                    architecture=name, adapter="linear", base_dtype=kind, ulysses_size=u, ring_size=ring,
                    zero_stage=stage, accumulation=2, **memory,
                )
                for u, ring, name, kind, stage, memory in product(
                    (1, 2), (1, 2), ("untied", "mixtral"), ("nf4", "int8", "fp8"), (1, 3), (LEAN, {"tile": "off"})
                )
            ],
        ),
        "router_loss": (
            "Law 1 for the router loss: one step against one process, fp32",
            [
                SeamCase(
                    architecture=name, ulysses_size=u, ring_size=ring, dp_size=dp, zero_stage=stage, accumulation=2,
                    rows=rows, kept=one, tile="off" if one in (None, "both") else 5, has_router_loss=True,
                )
                for (u, ring, dp), name, stage, rows, one in product(
                    ((2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)), ("mixtral", "gpt_oss", "qwen3_next"), (2, 3),
                    ("masked", "padded"), kept,
                )
                if ring == 1 or name != "qwen3_next"
            ],
        ),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", _matrices())
def test_the_whole_matrix(name: str, result_table: ResultTable) -> None:
    title, cases = _matrices()[name]
    failures = []
    for world_size in sorted({case.world_size for case in cases}):
        of_world = [case for case in cases if case.world_size == world_size]
        # Fresh processes for each part: after dozens of engines in one process a gather was seen to wait for ever.
        for first in range(0, len(of_world), 30):
            for result in run_ranks(run_cases, world_size, of_world[first : first + 30], timeout_s=900)[0]:
                result_table.add({
                    "case": result.case.label,
                    "loss error": f"{result.loss_error:.1e}",
                    "router loss error": f"{result.router_error:.1e}",
                    "logits error": f"{result.logits_error:.1e}",
                    "worst gradient, share of its bound": f"{result.gradient_error:.3f}",
                    "norm ratio": f"{result.norm_ratio:.6f}",
                    "held against": result.attention,
                })  # fmt: skip
                try:
                    check(result)
                except AssertionError as error:
                    failures.append(str(error))
    result_table.write(name, title)
    assert not failures, "\n".join(failures)


MICRO_BATCHES = 4
ONE_TOKEN_DOCUMENTS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceCase:
    architecture: str
    kept: KeptOutput | None = None
    """What gradient checkpointing keeps of attention; ``None`` without checkpointing."""
    calls_by_token: bool = False
    """Whether each MLP calls its activation once more for each different token that it gets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedCalls:
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
