"""Law 1 through the library seam: loss, logits, every gradient, and the scale, at every layout."""

from __future__ import annotations

from itertools import product

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.seam_case import ARCHITECTURES, SeamCase, SeamResult, run_cases
from tests.result_table import ResultTable

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
        assert result.gathers >= 2 * result.parameters * result.case.accumulation, f"{label}: {result.gathers} gathers"


def cases(shape: tuple[int, int], stages: tuple[int, ...], accumulations: tuple[int, ...]) -> list[SeamCase]:
    """Return the cases of one (sp, dp) shape."""
    sp_size, dp_size = shape
    return [
        SeamCase(architecture=name, sp_size=sp_size, dp_size=dp_size, zero_stage=stage, accumulation=accumulation)
        for name, stage, accumulation in product(ARCHITECTURES, stages, accumulations)
    ]


@pytest.mark.distributed
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (4, 1)], ids=lambda shape: f"sp{shape[0]}-dp{shape[1]}")
def test_a_step_equals_that_of_one_process(shape: tuple[int, int]) -> None:
    chosen = [case for case in cases(shape, (1, 2, 3), (1, 3)) if case.zero_stage == 3 or case.accumulation == 3]
    chosen = [case for case in chosen if case.zero_stage == 3 or case.architecture == "llama"]
    for result in run_ranks(run_cases, shape[0] * shape[1], chosen, timeout_s=150)[0]:
        check(result)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_the_whole_matrix_of_layouts_stages_and_accumulations(result_table: ResultTable) -> None:
    failures = []
    for shape in product((1, 2, 4), (1, 2)):
        for result in run_ranks(run_cases, shape[0] * shape[1], cases(shape, (1, 2, 3), (1, 3)), timeout_s=600)[0]:
            result_table.add(
                {
                    "case": result.case.label,
                    "loss error": f"{result.loss_error:.1e}",
                    "logits error": f"{result.logits_error:.1e}",
                    "worst gradient, share of its bound": f"{result.gradient_error:.3f}",
                    "norm ratio": f"{result.norm_ratio:.6f}",
                    "gathers": str(result.gathers),
                }
            )
            try:
                check(result)
            except AssertionError as error:
                failures.append(str(error))
    result_table.write("seam_parity", "Law 1 through the library seam: one step against one process, fp32")
    assert not failures, "\n".join(failures)
