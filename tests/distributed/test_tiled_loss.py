"""Law 1 for the loss over tiles of tokens: every kind of output head, layout, ZeRO stage and kind of row."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.tiled_loss_case import HEADS, TileCase, TileResult, report, run_cases, weight_of
from tests.result_table import ResultTable

FAST = [
    TileCase(head="plain", rows="weighted", ring_size=2),
    TileCase(head="softcap", rows="masked", ulysses_size=2, accumulation=3),
    TileCase(head="scale", rows="short", ulysses_size=2, zero_stage=2),
    TileCase(head="bias", rows="masked", ulysses_size=2, zero_stage=1, accumulation=3),
    TileCase(head="tied", rows="weighted", ulysses_size=2, accumulation=3),
    TileCase(head="adapter", rows="masked", ulysses_size=2),
    TileCase(head="mlp", rows="masked", ulysses_size=2),
    TileCase(head="experts", rows="weighted", ulysses_size=2, accumulation=3),
]


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(report, 2, FAST, timeout_s=150)[0]
    return found


def check(result: TileResult) -> None:
    """Hold one result to law 1, and its gathers to one in each forward and one in each backward pass.

    A tied head is the embedding too.
    """
    case = result.case
    assert result.loss_error <= 1e-5, f"{case.label}: loss off by {result.loss_error:.2e}"
    assert result.gradient_error <= 1.0, (
        f"{case.label}: gradient of {result.worst_tensor} is off by {result.gradient_error:.2f} x the bound"
    )
    is_sharded = case.zero_stage == 3 and case.world_size > 1
    for gathers in result.head_gathers:
        assert not is_sharded or gathers, f"{case.label}: the head was not gathered"
        each = 2 if case.head == "tied" else 1
        assert all(count == each * case.accumulation for count in gathers.values()), f"{case.label}: {gathers}"


@pytest.mark.distributed
def test_the_loss_over_tiles_equals_that_of_one_process(measured: dict[str, Any]) -> None:
    assert [result.case for result in measured["cases"]] == FAST
    for result in measured["cases"]:
        check(result)


@pytest.mark.distributed
@pytest.mark.parametrize(("head", "wanted"), [("plain", [1]), ("tied", [2]), ("adapter", [1, 1, 1])])
def test_the_head_is_gathered_twice_however_many_tiles_the_rows_of_the_ranks_have(
    measured: dict[str, Any], head: str, wanted: list[int]
) -> None:
    one_tile, many_tiles = measured["gathers"][head]
    assert one_tile == many_tiles
    for gathers in one_tile:
        assert [count for name, count in gathers.items() if weight_of(head) in name] == wanted, gathers


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
def test_the_whole_matrix_of_heads_layouts_stages_and_rows(result_table: ResultTable) -> None:
    failures = []
    for ulysses_size, ring_size in product((1, 2), (1, 2)):
        cases = [
            TileCase(
                head=head, rows=rows, ulysses_size=ulysses_size, ring_size=ring_size, zero_stage=stage,
                accumulation=accumulation,
            )
            for head, rows, stage, accumulation in product(HEADS, ("short", "masked", "weighted"), (1, 2, 3), (1, 3))
        ]  # fmt: skip
        for result in run_ranks(run_cases, ulysses_size * ring_size, cases, timeout_s=1200)[0]:
            forward, backward = (max(each.values(), default=0) for each in result.head_gathers)
            result_table.add(
                {
                    "case": result.case.label,
                    "loss error": f"{result.loss_error:.1e}",
                    "worst gradient, share of its bound": f"{result.gradient_error:.3f}",
                    "gathers of the head, forward + backward": f"{forward} + {backward}",
                }
            )
            try:
                check(result)
            except AssertionError as error:
                failures.append(str(error))
    result_table.write("tiled_loss", "Law 1 for the loss over tiles: one step against one process, fp32")
    assert not failures, "\n".join(failures)
