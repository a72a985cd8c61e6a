"""Under checkpointing attention runs once, and a layer sends no more than it must."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ulysses.parallel.layout import assign_heads
from tests.distributed.harness import run_calls, run_ranks
from tests.distributed.recompute_case import (
    ROW_TOKENS,
    batch_of_rows_errors,
    checkpointing_report,
    chunked_errors,
    compilations,
    compiled_report,
    counted_step,
    counts_by_kept,
    evaluation_differences,
    heads_of_a_layer,
    zero3_differences,
)

pytestmark = pytest.mark.distributed

LAYERS, HEADS, KV_HEADS, HEAD_SIZE = heads_of_a_layer()
Reports = dict[str, list[Any]]

# Ranks, and ring size, head_groups and kind of model. Gemma 4's global layers have heads of another size and number.
BATCHES: dict[str, tuple[Any, ...]] = {
    "head_groups": (2, 1, 2),
    "ulysses-and-ring": (4, 2, 1),
    "other-heads-and-ring": (4, 2, 1, "gemma4_text"),
}


@pytest.fixture(scope="module")
def reports() -> Reports:
    """What each call returned, by rank; all calls of a number of ranks are made by the same processes."""
    calls: dict[int, dict[str, tuple[Any, ...]]] = {
        2: {
            "counts": (counts_by_kept,),
            **{f"checkpointing-{ring_size}": (checkpointing_report, ring_size) for ring_size in (1, 2)},
            "evaluation": (evaluation_differences, 2),
            "zero-3": (zero3_differences, "both"),
        },
        4: {f"traffic-{ring_size}": (counted_step, "both", ring_size) for ring_size in (2, 4)},
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
@pytest.mark.parametrize("ring_size", [1, 2], ids=["ulysses", "ring"])
def test_layers_can_be_compiled_without_a_graph_break(ring_size: int) -> None:
    """fp32, another order of some sums: law 1's floor."""
    for results in run_ranks(compiled_report, 2, ring_size, timeout_s=180):
        for error, graph_breaks in results:
            assert error <= 1e-5
            assert graph_breaks == 0


@pytest.mark.slow
def test_rows_of_other_lengths_do_not_compile_a_layer_anew() -> None:
    """Once for the first shapes, once for shapes that vary, and then no more."""
    for counts in run_ranks(compilations, 2, 1, timeout_s=180):
        assert counts[-1] == counts[2], counts


@pytest.mark.parametrize("name", BATCHES)
def test_rows_of_a_batch_train_as_one_after_the_other(reports: Reports, name: str) -> None:
    """fp32, sums over rows in another order: law 1."""
    assert len(reports[name]) == BATCHES[name][0]
    for logits_error, share_of_bound in reports[name]:
        assert logits_error <= 1e-5 and share_of_bound <= 1


def test_evaluation_gives_the_numbers_of_training(reports: Reports) -> None:
    assert reports["evaluation"] == [[], []]


WITH_SINKS = {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("world_size", "ring_size", "kind", "changes", "head_groups", "compiled"),
    [
        pytest.param(2, 2, "gemma4_text", {}, 1, True, marks=pytest.mark.slow),
        pytest.param(
            3, 1, "llama", {"num_attention_heads": 8, "num_key_value_heads": 4}, 3, False, marks=pytest.mark.slow
        ),
        (4, 2, "gpt_oss", WITH_SINKS, 2, False),
    ],
    ids=["gemma4-compiled-ring", "uneven", "sinks-and-ring"],
)
def test_an_exchange_in_chunks_gives_the_same_numbers(
    world_size: int, ring_size: int, kind: str, changes: dict[str, Any], head_groups: int, compiled: bool
) -> None:
    """fp32, sums of KV copies in another order: law 1's floor."""
    for error in run_ranks(chunked_errors, world_size, ring_size, kind, changes, head_groups, compiled, timeout_s=120):
        assert error <= 1e-5
