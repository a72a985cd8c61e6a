"""The parts of the benchmarks that decide what a page says, and that both sides still fit their layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.attention_report import markdown, ratios, relative, slowest
from benchmarks.attention_sides import Case, reference
from benchmarks.bench_attention import count_rank, error_rank, parse
from tests.distributed.harness import run_ranks


def test_a_pair_is_the_slowest_ranks_wall_time_and_the_mean_ranks_cpu_time() -> None:
    assert slowest([[[1.0, 8.0, 1.0, 2.0]], [[3.0, 6.0, 3.0, 4.0]]]) == [[3.0, 8.0, 2.0, 3.0]]


def test_a_ratio_is_of_pairs_not_of_medians() -> None:
    pairs = [[1.0, 2.0, 1.0, 1.0], [10.0, 15.0, 1.0, 3.0], [4.0, 4.0, 1.0, 2.0]]
    assert ratios(pairs) == (1.5, 1.0, 2.0)
    assert ratios(pairs, 2) == (2.0, 1.0, 3.0)


def test_an_error_is_norm_wise_over_all_ranks() -> None:
    assert relative([[(9.0, 50.0)], [(16.0, 50.0)]]) == [0.5]


def test_the_reference_keeps_documents_apart() -> None:
    case = Case(sp=2, tokens=8, heads=2, kv_heads=1)
    one, two = (reference(case, lengths) for lengths in ([16], [6, 10]))
    torch.testing.assert_close(one[0][:, :6], two[0][:, :6])
    assert (one[0][:, 6:] - two[0][:, 6:]).abs().max() > 0.1


def test_a_page_names_what_was_not_measured_and_what_failed() -> None:
    phases = {"collectives": 2.0, "bytes": 2.0**20}
    case = {
        "sp": 2, "tokens": 512, "heads": 8, "kv_heads": 2, "head_size": 64, "bound_s": 0.001,
        "exchange": [[0.002, 0.003, 0.001, 0.002]], "layer": None, "failures": {},
        "memory": {"stub ours": [1024.0**2], "stub theirs": [2 * 1024.0**2]},
        "traffic": {side: {"forward": phases, "backward": phases} for side in ("ours", "theirs")},
    }  # fmt: skip
    failed = case | {"exchange": [], "failures": {"exchange": "it broke"}}
    page = markdown(
        {
            "date": "a day", "commit": "abc+dirty", "hardware": "a machine", "versions": {}, "link": {2: 1e9},
            "options": {"head_size": 64, "repetitions": 1}, "command": "c", "cases": [case, failed], "errors": [],
            "load_average": (1.0, 2.0, 3.0),
        }
    )  # fmt: skip
    assert "**1.50** (1.50 to 1.50)" in page
    assert "not yet measured" in page
    assert "Failed: sp 2, 512 tokens a rank, 8/2 heads: it broke" in page
    assert "| 1.0 MiB (1.0) | 2.0 MiB (2.0) | **2.00** |" in page


def test_quick_stores_nothing_by_default() -> None:
    assert parse(["--quick"]).out is None
    assert parse([]).out is not None


def _measured(rank: int, world_size: int, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    lengths = [case.sp * case.tokens]
    errors = {side: error_rank(rank, world_size, side, case, lengths) for side in ("ours", "theirs")}
    return errors, count_rank(rank, world_size, "ours", case)


@pytest.mark.distributed
def test_both_layers_are_exact_on_one_document_and_ours_is_two_collectives_each_way() -> None:
    ranks = run_ranks(_measured, 2, Case(sp=2, tokens=16, heads=4, kv_heads=2))
    for side in ("ours", "theirs"):
        # fp32 sums of 32 terms against fp64: a few roundings.
        assert max(relative([errors[side] for errors, _ in ranks])) < 2e-6
    traffic = ranks[0][1]
    assert [traffic[phase]["collectives"] for phase in ("forward", "backward")] == [2, 2]
    # Half of the 4 + 2 + 2 + 4 heads of 64 of 16 tokens, in fp32, leaves this rank.
    assert traffic["forward"]["bytes"] == traffic["backward"]["bytes"] == 12 * 64 * 16 * 4 / 2
