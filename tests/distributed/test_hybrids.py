"""Law 1 for layers that carry state along the sequence: short convolutions, delta nets, lightning attention, Mamba."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import Any

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.hybrid_case import LENGTHS, ROW_TOKENS, leaks, measures
from tests.distributed.seam_case import ROWS, SeamCase
from tests.distributed.test_seam_parity import hold
from tests.unit.attention.models import HYBRIDS

pytestmark = pytest.mark.distributed

CONVOLUTION_TOKENS = 3
"""Tokens before a token that the shortest convolution of the zoo reads; Mamba's and the delta nets' read one more."""


@pytest.mark.parametrize("ulysses_size", [2, 4])
def test_documents_end_inside_the_convolution_on_both_sides_of_a_border_of_slices(ulysses_size: int) -> None:
    distances = set()
    for tokens, lengths in ROWS:
        slice_tokens = -(-tokens // ulysses_size)
        ends = accumulate(lengths)
        distances.update(end - rank * slice_tokens for end in ends for rank in range(1, ulysses_size))
    near = {distance for distance in distances if abs(distance) < CONVOLUTION_TOKENS}
    assert near >= {-1, 0, 1}
    assert any(1 in lengths for _, lengths in ROWS) and any(sum(lengths) < tokens for tokens, lengths in ROWS)
    assert any(len(lengths) == 1 for _, lengths in ROWS)


OF_EACH_KIND = ("lfm2", "qwen3_next", "kimi_linear", "minimax", "jamba", "nemotron_h")
DOCUMENTS = {"one": [ROW_TOKENS], "packed": list(LENGTHS)}


@pytest.fixture(scope="module")
def measured() -> list[Any]:
    return run_ranks(measures, 2, OF_EACH_KIND, DOCUMENTS, timeout_s=240)


@pytest.mark.parametrize(
    ("ulysses_size", "names", "num_rows"),
    [
        # Among them a row with padding, a border inside of the convolution and one on that of slices.
        (2, OF_EACH_KIND, 4),
        pytest.param(2, tuple(HYBRIDS), len(ROWS), marks=pytest.mark.slow),
        pytest.param(4, tuple(HYBRIDS), len(ROWS), marks=pytest.mark.slow),
    ],
    ids=["2-each-kind", "2", "4"],
)
def test_every_hybrid_equals_one_process_on_each_document(
    ulysses_size: int, names: tuple[str, ...], num_rows: int
) -> None:
    hold([SeamCase(architecture=name, ulysses_size=ulysses_size, accumulation=num_rows) for name in names], 300)


@pytest.mark.slow
def test_partitioned_parameters_are_gathered_through_the_module() -> None:
    # One row each, of different numbers of documents: a gather per document would hang.
    case = SeamCase(architecture="qwen3_next", ulysses_size=2, dp_size=2, zero_stage=3, accumulation=2, kept="both")
    hold([case], 300)


def test_no_bit_of_a_document_reaches_another(measured: list[Any]) -> None:
    check_leaks([found for found, *_ in measured], OF_EACH_KIND)


@pytest.mark.slow
def test_no_bit_of_a_document_reaches_another_in_any_model() -> None:
    check_leaks(run_ranks(leaks, 4, tuple(HYBRIDS), timeout_s=240), HYBRIDS)


def check_leaks(by_rank: list[dict[str, list[str]]], names: Collection[str]) -> None:
    for found in by_rank:
        assert not any(found.values()), found
        assert found.keys() == set(names)


TRAFFIC = {
    # Layers that carry state and layers of attention, and per token what one of the former sends to the other of two
    # ranks: of its projections' results, and of its output. Half of the channels of each, and of Mamba's states all
    # that belong to a group that both ranks have heads of.
    "lfm2": (1, 1, 3 * 32 // 2, 32 // 2),
    "qwen3_next": (1, 1, (2 * 24 + 2 * 40 + 2 * 8) // 2, 40 // 2),
    "kimi_linear": (1, 1, (5 * 24 + 4) // 2, 24 // 2),
    "minimax": (1, 1, 3 * 24 // 2, 24 // 2),
    "jamba": (1, 1, 2 * 64 // 2, 64 // 2),
    "nemotron_h": (1, 1, (64 + 2 * 4 * 5 + 8) // 2, 64 // 2),
}


def test_a_layer_sends_each_channel_to_the_rank_of_its_head_and_no_more(measured: list[Any]) -> None:
    check_traffic([counts for _, counts, *_ in measured], OF_EACH_KIND)


def check_traffic(by_rank: list[dict[str, tuple[int, list[int]]]], names: Collection[str]) -> None:
    """Check forward, recomputation and backward of all layers, the output kept in both layouts."""
    for counts in by_rank:
        assert counts.keys() == set(names)
        for name, (exchanges, sent) in counts.items():
            mixers, attention, gathered, scattered = TRAFFIC[name]
            assert exchanges == 5 * (mixers + attention), name
            sizes = [ROW_TOKENS // 2 * width for width in (gathered,) * 3 + (scattered,) * 2]
            assert sorted(sent) == sorted(sizes * mixers), name


def test_a_layer_that_carries_state_takes_as_many_collectives_as_attention(measured: list[Any]) -> None:
    """Forward, recomputation and backward: with the output kept, the exchange after the layer is not repeated."""
    expected = {"plain": (4, 2, 2), "both": (5, 3, 2), "kernel": (6, 3, 3), "none": (6, 3, 3)}
    for *_, counts, _ in measured:
        assert counts.keys() == expected.keys()
        for kept, (exchanges, gathers, scatters) in expected.items():
            # Per key head 2 * 6 of queries and keys, 2 * 2 * 5 of values and gates, 2 * 2 of strengths and decays; half
            # of the heads go to the other rank, and half of the 8 * 5 channels of the output.
            mixer = ROW_TOKENS // 2 * (gathers * 4 * (12 + 20 + 4) + scatters * 40) // 2
            # Attention has 4 query heads and 2 KV heads of 8.
            attention = ROW_TOKENS // 2 * 8 * (exchanges * 4 + gathers * 2 * 2) // 2
            assert counts[kept] == (2 * exchanges, mixer + attention), kept


def test_time_steps_and_states_of_all_channels_take_one_sum_whatever_the_documents(measured: list[Any]) -> None:
    """Forward, recomputation and backward; beside the exchanges that other layers take."""
    for *_, counts in measured:
        # A time step of 4 values, and 5 each of the two states.
        assert counts == dict.fromkeys(DOCUMENTS, ([ROW_TOKENS * 14] * 3, 2 * 5))
