"""Law 1 for the router loss: the loss of whole rows, whatever layout, ZeRO stage, policy and tile shares them."""

from __future__ import annotations

from itertools import product

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.router_loss_case import RouterCase, RouterResult, run_cases
from tests.result_table import ResultTable

FAST = [
    RouterCase(architecture="mixtral", rows="packed", ulysses_size=2, kept="both", is_tiled=True),
    RouterCase(architecture="mixtral", rows="padded", ulysses_size=2, zero_stage=2, accumulation=2),
    RouterCase(architecture="mixtral", rows="padded", dp_size=2, zero_stage=3, kept="none", is_tiled=True),
    RouterCase(architecture="gpt_oss", rows="one", ring_size=2, zero_stage=0, accumulation=2),
    RouterCase(architecture="mixtral", rows="padded", ulysses_size=2, zero_stage=0, wrapper="fsdp2", kept="both"),
    RouterCase(architecture="qwen3_next", rows="packed", ulysses_size=2, zero_stage=3, kept="kernel"),
]


def check(result: RouterResult) -> None:
    """Hold one result to law 1, and its losses to 1e-6: no reduction of theirs crosses ranks but a sum."""
    label = result.case.label
    assert result.loss_error <= 1e-5, f"{label}: loss off by {result.loss_error:.2e}"
    assert result.router_error <= 1e-6, f"{label}: router loss off by {result.router_error:.2e}"
    assert result.gradient_error <= 1.0, (
        f"{label}: gradient of {result.worst_tensor} is off by {result.gradient_error:.2f} x the bound"
    )


@pytest.mark.distributed
def test_the_router_loss_of_shared_rows_equals_that_of_one_process() -> None:
    results: list[RouterResult] = run_ranks(run_cases, 2, FAST, timeout_s=150)[0]
    assert [result.case for result in results] == FAST
    for result in results:
        check(result)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
def test_the_whole_matrix_of_layouts_stages_policies_and_rows(result_table: ResultTable) -> None:
    failures = []
    layouts = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2))
    settings = ((None, False), ("both", False), ("kernel", True), ("none", True))
    for ulysses_size, ring_size, dp_size in layouts:
        cases = [
            RouterCase(
                architecture=architecture, rows=rows, ulysses_size=ulysses_size, ring_size=ring_size, dp_size=dp_size,
                zero_stage=stage, accumulation=accumulation, kept=kept, is_tiled=is_tiled,
            )
            for architecture, rows, stage, accumulation, (kept, is_tiled) in product(
                ("mixtral", "gpt_oss"), ("one", "packed", "padded"), (2, 3), (1, 2), settings
            )
        ]  # fmt: skip
        cases += [
            RouterCase(
                architecture="qwen3_next", rows=rows, ulysses_size=ulysses_size, dp_size=dp_size, zero_stage=stage,
                kept=kept,
            )
            for rows, stage, kept in product(("one", "packed", "padded"), (2, 3), (None, "both"))
            if ring_size == 1
        ]  # fmt: skip
        world_size = ulysses_size * ring_size * dp_size
        for result in run_ranks(run_cases, world_size, cases, timeout_s=1500)[0]:
            result_table.add(
                {
                    "case": result.case.label,
                    "loss error": f"{result.loss_error:.1e}",
                    "router loss error": f"{result.router_error:.1e}",
                    "worst gradient, share of its bound": f"{result.gradient_error:.3f}",
                }
            )
            try:
                check(result)
            except AssertionError as error:
                failures.append(str(error))
    result_table.write("router_loss", "Law 1 for the router loss: one step against one process, fp32")
    assert not failures, "\n".join(failures)
