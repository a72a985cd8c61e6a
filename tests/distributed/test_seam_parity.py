"""Law 1 through the library seam: loss, logits, every gradient, and the scale, at every layout."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, product

import pytest

from ray_ulysses.parallel.layout import held_ranges, row_multiple
from tests.breadth import fast_only
from tests.distributed.harness import run_ranks
from tests.distributed.seam_case import ROWS, SeamCase, SeamResult, run_cases
from tests.result_table import ResultTable
from tests.unit.attention.models import ARCHITECTURES
from tests.unit.attention.multimodal import MULTIMODAL

ENGINE_ARCHITECTURES = ("llama", "qwen3", "mistral")
"""What the matrix of engines is run with: a tied and an untied head, a window."""

SPLIT: dict[int, tuple[str, ...]] = {
    # By Ulysses degree, what `make test` runs; 4 heads over 3 ranks is an uneven split.
    2: ("gemma2", "gpt_oss", "deepseek_v3", "phi3-longrope"),
    3: ("qwen3", "qwen2"),
    4: ("gemma4_text", "gpt_neox"),
}
RINGS: dict[tuple[int, int], tuple[str, ...]] = {
    # By (Ulysses, ring).
    (1, 2): ("llama", "mistral", "gpt_oss"),
    (2, 2): ("gemma4_text", "qwen3_moe", "llama-dynamic", "llama4_text"),
}

LOGITS_BOUND = 1e-5
"""fp32 forward against fp64, norm-wise a row: law 1's floor."""


def check(result: SeamResult) -> None:
    """Hold one result to law 1."""
    label = result.case.label
    assert result.loss_error <= 1e-5, f"{label}: loss off by {result.loss_error:.2e}"
    assert result.logits_error <= LOGITS_BOUND, f"{label}: logits off by {result.logits_error:.2e}"
    assert result.gradient_error <= 1.0, (
        f"{label}: gradient of {result.worst_tensor} is off by {result.gradient_error:.2f} x the bound"
    )
    assert result.norm_ratio == pytest.approx(1.0, abs=5e-4), f"{label}: gradient norm ratio {result.norm_ratio}"
    if result.case.zero_stage == 3 and result.case.world_size > 1:
        # Forward and backward each gather every parameter tensor: nothing stays whole between uses.
        assert result.fewest_gathers >= 2 * result.case.accumulation, f"{label}: {result.fewest_gathers} gathers of one"


def engine_cases(shape: tuple[int, int], stages: tuple[int, ...], accumulations: tuple[int, ...]) -> list[SeamCase]:
    sp_size, dp_size = shape
    return [
        SeamCase(architecture=name, ulysses_size=sp_size, dp_size=dp_size, zero_stage=stage, accumulation=accumulation)
        for name, stage, accumulation in product(ENGINE_ARCHITECTURES, stages, accumulations)
    ]


def layout_cases(layout: tuple[int, int], names: Iterable[str]) -> list[SeamCase]:
    ulysses_size, ring_size = layout
    return [SeamCase(architecture=name, ulysses_size=ulysses_size, ring_size=ring_size) for name in names]


@pytest.mark.parametrize("ring_size", [1, 2])
@pytest.mark.parametrize("ulysses_size", [1, 2, 3, 4])
def test_a_document_crosses_every_border_of_slices_in_every_case(ulysses_size: int, ring_size: int) -> None:
    tokens, lengths = ROWS[0]
    sp_size, ends = ulysses_size * ring_size, list(accumulate(lengths))
    row_tokens = tokens + -tokens % row_multiple(sp_size, ring_size)
    borders = {stop for rank in range(sp_size) for _, stop in held_ranges(row_tokens, rank, sp_size, ring_size)} - {
        row_tokens
    }
    assert len(borders) >= sp_size - 1
    longest = lengths.index(max(lengths))
    assert all(ends[longest] - lengths[longest] < border < ends[longest] for border in borders)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "shape", fast_only([(1, 1), (2, 2), (4, 1)], (1, 1), (2, 2)), ids=lambda shape: f"sp{shape[0]}-dp{shape[1]}"
)
def test_a_step_equals_that_of_one_process(shape: tuple[int, int]) -> None:
    # Every stage and architecture where rows are shared as well as split; elsewhere llama under ZeRO-3, the default.
    stages = (1, 2, 3) if shape == (2, 2) else (3,)
    chosen = [case for case in engine_cases(shape, stages, (3,)) if case.architecture == "llama" or shape == (2, 2)]
    chosen = [case for case in chosen if case.zero_stage == 3 or case.architecture == "llama"]
    chosen += [case for case in engine_cases(shape, (3,), (1,)) if case.architecture == "llama"]
    for result in run_ranks(run_cases, shape[0] * shape[1], chosen, timeout_s=150)[0]:
        check(result)


@pytest.mark.distributed
@pytest.mark.parametrize("ulysses_size", SPLIT, ids=lambda size: f"u{size}")
def test_every_kind_of_attention_equals_that_of_one_process(ulysses_size: int) -> None:
    chosen = layout_cases((ulysses_size, 1), SPLIT[ulysses_size])
    for result in run_ranks(run_cases, ulysses_size, chosen, timeout_s=150)[0]:
        check(result)


@pytest.mark.distributed
def test_the_text_part_of_a_multimodal_model_trains_as_the_whole_does_on_text() -> None:
    for result in run_ranks(run_cases, 2, layout_cases((2, 1), MULTIMODAL), timeout_s=150)[0]:
        check(result)


@pytest.mark.distributed
@pytest.mark.slow
def test_the_text_part_trains_as_the_whole_does_on_a_ring_and_under_zero_3() -> None:
    # A tied head under ZeRO-3, and positions in three axes.
    sharded = [
        SeamCase(architecture=name, ulysses_size=2, dp_size=2, zero_stage=3, accumulation=1)
        for name in ("gemma3", "qwen2_5_vl")
    ]
    for result in run_ranks(run_cases, 4, [*layout_cases((2, 2), ["qwen3_vl"]), *sharded], timeout_s=150)[0]:
        check(result)


@pytest.mark.distributed
def test_sinks_are_those_of_the_ranks_heads() -> None:
    for result in run_ranks(run_cases, 3, layout_cases((3, 1), ["gpt_oss"]), timeout_s=90)[0]:
        check(result)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", fast_only(RINGS, (2, 2)), ids=lambda layout: f"u{layout[0]}-r{layout[1]}")
def test_a_ring_equals_one_process(layout: tuple[int, int]) -> None:
    for result in run_ranks(run_cases, layout[0] * layout[1], layout_cases(layout, RINGS[layout]), timeout_s=150)[0]:
        check(result)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_the_whole_matrix_of_layouts_stages_and_accumulations(result_table: ResultTable) -> None:
    failures = []
    for shape in product((1, 2, 4), (1, 2)):
        chosen = engine_cases(shape, (1, 2, 3), (1, 3))
        for result in run_ranks(run_cases, shape[0] * shape[1], chosen, timeout_s=600)[0]:
            failures += taken_down(result, result_table)
    result_table.write("seam_parity", "Law 1 through the library seam: one step against one process, fp32")
    assert not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
def test_the_whole_matrix_of_architectures_and_layouts(result_table: ResultTable) -> None:
    failures = []
    for layout in product((1, 2, 3, 4), (1, 2)):
        chosen = layout_cases(layout, ARCHITECTURES)
        for result in run_ranks(run_cases, layout[0] * layout[1], chosen, timeout_s=900)[0]:
            failures += taken_down(result, result_table)
    result_table.write("seam_architectures", "Law 1: every architecture at every Ulysses and ring degree, fp32")
    assert not failures, "\n".join(failures)


def taken_down(result: SeamResult, result_table: ResultTable) -> list[str]:
    """Add a result to the table; return what it fails, if it does."""
    result_table.add(
        {
            "case": result.case.label,
            "loss error": f"{result.loss_error:.1e}",
            "logits error": f"{result.logits_error:.1e}",
            "worst gradient, share of its bound": f"{result.gradient_error:.3f}",
            "norm ratio": f"{result.norm_ratio:.6f}",
            "held against": result.attention,
        }
    )
    try:
        check(result)
    except AssertionError as error:
        return [str(error)]
    return []
