"""The Ulysses exchange over ranks: what arrives where, its gradients, and how many collectives it takes."""

from __future__ import annotations

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
from tests.distributed.harness import run_ranks

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


def blocks(exchanges: int, ranks: int) -> dict[str, int]:
    """Return what some exchanges send and receive on a rank, as torch's profiler names it."""
    return {"c10d::send": exchanges * (ranks - 1), "c10d::recv_": exchanges * (ranks - 1)}


@pytest.mark.parametrize(("ranks", "heads", "kv_heads"), GROUPS.values(), ids=GROUPS.keys())
def test_the_exchange_is_plain_slicing_forward_and_backward(ranks: int, heads: int, kv_heads: int) -> None:
    for report in run_ranks(exchange_equals_slicing, ranks, heads, kv_heads, 2):
        assert report.wrong == ()
        # A block to each other rank and one from it, there and back, and nothing else; the backward is the same two.
        assert report.forward_collectives == blocks(2, ranks)
        assert report.backward_collectives == blocks(2, ranks)


def test_gradients_of_a_copied_head_are_added_in_fp32() -> None:
    assert all(run_ranks(copied_gradients_are_added_in_fp32, 4))


def test_one_row_is_exchanged_as_two_are() -> None:
    assert [report.wrong for report in run_ranks(exchange_equals_slicing, 2, 4, 2, 1)] == [(), ()]


def test_what_goes_round_a_ring_comes_from_the_rank_before() -> None:
    for rank, seen in enumerate(run_ranks(circulated, 3)):
        assert seen == [[(rank - step) % 3, 100 + (rank - step) % 3] for step in (1, 2, 3)]


def test_a_layer_takes_two_collectives_forward_and_two_backward() -> None:
    for forward, backward in run_ranks(layer_collectives, 2):
        assert forward == blocks(4, 2)
        assert backward == blocks(4, 2)


def test_a_gathered_sequence_is_in_order_and_its_gradient_is_summed_over_ranks() -> None:
    results = run_ranks(gathered_sequence, 2)
    for rank, (whole, gradient) in enumerate(results):
        assert whole.tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
        assert torch.equal(gradient, 3 * torch.arange(12.0).view(2, 6)[:, 3 * rank : 3 * rank + 3])


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("tokens", [12, 40])
def test_length_dependent_rope_on_two_ranks_equals_one_process(kind: str, tokens: int) -> None:
    """A row below and one beyond the original length, after rows of other lengths. fp32, law 1's floor."""
    for logits_error, gradient_error in run_ranks(rope_error, 2, kind, tokens):
        assert logits_error <= 1e-5
        assert gradient_error <= 1e-5
