"""The Ulysses exchange over ranks: what arrives where, its gradients, and how many collectives it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.exchange_case import (
    circulated,
    copied_gradients_are_added_in_fp32,
    exchange_equals_slicing,
    gathered_sequence,
    layer_collectives,
    rope_error,
)
from tests.distributed.harness import run_calls

pytestmark = pytest.mark.distributed

# (ranks, query heads, KV heads)
GROUPS = {
    "kv-heads-divide": (2, 4, 2),
    "one-kv-head-a-rank": (4, 8, 4),
    "ranks-share-a-kv-head": (4, 8, 2),
    "one-kv-head-for-all": (2, 4, 1),
    "a-group-cut-in-two": (2, 6, 3),
    "heads-do-not-divide": (3, 4, 2),
    "14-and-2-on-4": (4, 14, 2),
    "40-and-8-on-3": (3, 40, 8),
}


# (kind of scaling, tokens of the row)
ROPES = [(kind, tokens) for kind in ("longrope", "dynamic") for tokens in (12, 40)]


def blocks(exchanges: int, ranks: int) -> dict[str, int]:
    return {"c10d::send": exchanges * (ranks - 1), "c10d::recv_": exchanges * (ranks - 1)}


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Any]]:
    """What each call returned, by rank; all calls of a number of ranks are made by the same processes."""
    calls: dict[int, dict[str, tuple[Any, ...]]] = {
        2: {
            "one-row": (exchange_equals_slicing, 4, 2, 1),
            "layer": (layer_collectives,),
            "gathered": (gathered_sequence,),
            **{f"{kind}-{tokens}": (rope_error, kind, tokens) for kind, tokens in ROPES},
        },
        3: {"circulated": (circulated,)},
        4: {"copied": (copied_gradients_are_added_in_fp32,)},
    }
    for name, (ranks, heads, kv_heads) in GROUPS.items():
        calls[ranks][name] = (exchange_equals_slicing, heads, kv_heads, 2)
    return {name: report for ranks, one in calls.items() for name, report in run_calls(ranks, one).items()}


@pytest.mark.parametrize("name", GROUPS)
def test_the_exchange_is_plain_slicing_forward_and_backward(reports: dict[str, list[Any]], name: str) -> None:
    ranks = GROUPS[name][0]
    assert len(reports[name]) == ranks
    for report in reports[name]:
        assert report.wrong == ()
        # A block to each other rank and one from it, there and back, and nothing else; the backward is the same two.
        assert report.forward_collectives == blocks(2, ranks)
        assert report.backward_collectives == blocks(2, ranks)


def test_gradients_of_a_copied_head_are_added_in_fp32(reports: dict[str, list[Any]]) -> None:
    assert reports["copied"] == [True] * 4


def test_one_row_is_exchanged_as_two_are(reports: dict[str, list[Any]]) -> None:
    assert [report.wrong for report in reports["one-row"]] == [(), ()]


def test_what_goes_round_a_ring_comes_from_the_rank_before(reports: dict[str, list[Any]]) -> None:
    assert len(reports["circulated"]) == 3
    for rank, seen in enumerate(reports["circulated"]):
        assert seen == [[(rank - step) % 3, 100 + (rank - step) % 3] for step in (1, 2, 3)]


def test_a_layer_takes_two_collectives_forward_and_two_backward(reports: dict[str, list[Any]]) -> None:
    assert reports["layer"] == [(blocks(4, 2), blocks(4, 2))] * 2


def test_a_gathered_sequence_is_in_order_and_its_gradient_is_summed_over_ranks(reports: dict[str, list[Any]]) -> None:
    assert len(reports["gathered"]) == 2
    for rank, (whole, gradient) in enumerate(reports["gathered"]):
        assert whole.tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
        assert torch.equal(gradient, 3 * torch.arange(12.0).view(2, 6)[:, 3 * rank : 3 * rank + 3])


@pytest.mark.parametrize(("kind", "tokens"), ROPES)
def test_length_dependent_rope_on_two_ranks_equals_one_process(
    reports: dict[str, list[Any]], kind: str, tokens: int
) -> None:
    """A row below and one beyond the original length, after rows of other lengths. fp32, law 1's floor."""
    errors = [error for errors in reports[f"{kind}-{tokens}"] for error in errors]
    assert len(errors) == 4 and all(error <= 1e-5 for error in errors), errors
