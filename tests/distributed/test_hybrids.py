"""Law 1 for layers that carry state along the sequence: short convolutions, delta nets, lightning attention, Mamba."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate, product
from typing import Any

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.hybrid_case import LENGTHS, ROW_TOKENS, leaks, measures, traffic
from tests.distributed.seam_case import ROWS, SeamCase, run_cases
from tests.distributed.test_seam_parity import check, taken_down
from tests.result_table import ResultTable
from tests.unit.attention.models import HYBRIDS

pytestmark = pytest.mark.distributed

SHAPES = ((1, 1), (2, 1), (2, 2), (4, 1))
"""Ranks of sp and groups of them, of the whole matrix."""
AT_ONCE = 5
"""Models whose cases share processes, and with them what one process gives."""
KEPT = ("both", "kernel", "none", None)
CONVOLUTION_TOKENS = 3
"""Tokens before a token that the shortest convolution of the zoo reads; Mamba's and the delta nets' read one more."""


def engine_cases(shape: tuple[int, int]) -> list[SeamCase]:
    """Return every hybrid under ZeRO 2 and 3 on one row per group and on all rows, with a policy of checkpointing each.

    Each of these four cases of a model has another policy.
    """
    engines = product((2, 3), (1, len(ROWS) // shape[1]))
    return [
        SeamCase(
            architecture=name,
            ulysses_size=shape[0],
            dp_size=shape[1],
            zero_stage=stage,
            accumulation=micro_batches,
            kept=KEPT[(turn + place) % len(KEPT)],
        )
        for turn, (stage, micro_batches) in enumerate(engines)
        for place, name in enumerate(HYBRIDS)
    ]


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
        pytest.param(1, OF_EACH_KIND, len(ROWS), marks=pytest.mark.slow),
        # Among them a row with padding, a border inside of the convolution and one on that of slices.
        (2, OF_EACH_KIND, 4),
        pytest.param(2, tuple(HYBRIDS), len(ROWS), marks=pytest.mark.slow),
        pytest.param(4, tuple(HYBRIDS), len(ROWS), marks=pytest.mark.slow),
    ],
    ids=["1", "2-each-kind", "2", "4"],
)
def test_every_hybrid_equals_one_process_on_each_document(
    ulysses_size: int, names: tuple[str, ...], num_rows: int
) -> None:
    chosen = [SeamCase(architecture=name, ulysses_size=ulysses_size, accumulation=num_rows) for name in names]
    for result in run_ranks(run_cases, ulysses_size, chosen, timeout_s=300)[0]:
        check(result)


@pytest.mark.parametrize(
    "names",
    [
        ("qwen3_next",),
        pytest.param(("nemotron_h", "lfm2", "kimi_linear", "falcon_h1-norm", "zamba"), marks=pytest.mark.slow),
    ],
    ids=["experts", "others"],
)
def test_partitioned_parameters_are_gathered_through_the_module(names: tuple[str, ...]) -> None:
    # One row each, of different numbers of documents: a gather per document would hang.
    chosen = [
        SeamCase(architecture=name, ulysses_size=2, dp_size=2, zero_stage=3, accumulation=2, kept="both")
        for name in names
    ]
    if "nemotron_h" in names:
        chosen += [
            SeamCase(architecture="zamba2", ulysses_size=2, dp_size=2, zero_stage=2, accumulation=1, kept="none")
        ]
    for result in run_ranks(run_cases, 4, chosen, timeout_s=300)[0]:
        check(result)


def test_no_bit_of_a_document_reaches_another(measured: list[Any]) -> None:
    check_leaks([found for found, *_ in measured], OF_EACH_KIND)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_no_bit_of_a_document_reaches_another_in_any_model(world_size: int) -> None:
    check_leaks(run_ranks(leaks, world_size, tuple(HYBRIDS), timeout_s=240), HYBRIDS)


def check_leaks(by_rank: list[dict[str, list[str]]], names: Collection[str]) -> None:
    for found in by_rank:
        assert not any(found.values()), found
        assert found.keys() == set(names)


TRAFFIC = {
    # Layers that carry state and layers of attention, and per token what one of the former sends to the other of two
    # ranks: of its projections' results, and of its output. Half of the channels of each, and of Mamba's states all
    # that belong to a group that both ranks have heads of.
    "lfm2": (1, 1, 3 * 32 // 2, 32 // 2),
    "lfm2_moe": (1, 1, 3 * 32 // 2, 32 // 2),
    "lfm3": (1, 1, 3 * 32 // 2, 32 // 2),
    "qwen3_next": (1, 1, (2 * 24 + 2 * 40 + 2 * 8) // 2, 40 // 2),
    "qwen3_5_text": (1, 1, (2 * 24 + 2 * 40 + 2 * 8) // 2, 40 // 2),
    "qwen3_5_moe_text": (1, 1, (2 * 24 + 2 * 40 + 2 * 8) // 2, 40 // 2),
    "olmo_hybrid": (1, 1, (2 * 24 + 2 * 40 + 2 * 8) // 2, 40 // 2),
    "kimi_linear": (1, 1, (5 * 24 + 4) // 2, 24 // 2),
    "bailing_hybrid": (1, 1, (5 * 24 + 4) // 2, 24 // 2),
    "minimax": (1, 1, 3 * 24 // 2, 24 // 2),
    "jamba": (1, 1, 2 * 64 // 2, 64 // 2),
    "jamba-mamba_last": (1, 1, 2 * 64 // 2, 64 // 2),
    "zamba": (4, 2, 2 * 64 // 2, 64 // 2),
    "bamba": (1, 1, 64 // 2 + 2 * 5 + 8 // 2, 64 // 2),
    "granitemoehybrid": (1, 1, 64 // 2 + 2 * 5 + 8 // 2, 64 // 2),
    "nemotron_h": (1, 1, (64 + 2 * 4 * 5 + 8) // 2, 64 // 2),
    # Gated channel by channel, so that the gate is sent.
    "falcon_h1": (2, 2, 2 * 64 // 2 + 2 * 5 + 8 // 2, 64 // 2),
    "falcon_h1-norm": (2, 2, (64 + 2 * 2 * 5 + 8) // 2, 64 // 2),
    "zamba2": (4, 2, (64 + 2 * 2 * 5 + 8) // 2, 64 // 2),
}


def test_a_layer_sends_each_channel_to_the_rank_of_its_head_and_no_more(measured: list[Any]) -> None:
    check_traffic([counts for _, counts, *_ in measured], OF_EACH_KIND)


@pytest.mark.slow
def test_a_layer_of_any_model_sends_each_channel_to_the_rank_of_its_head_and_no_more() -> None:
    assert TRAFFIC.keys() == HYBRIDS.keys()
    check_traffic(run_ranks(traffic, 2, tuple(HYBRIDS), timeout_s=240), HYBRIDS)


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


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_matrix_of_hybrids(result_table: ResultTable) -> None:
    failures, names = [], list(HYBRIDS)
    for shape, first in product(SHAPES, range(0, len(names), AT_ONCE)):
        # Fresh processes for each: after dozens of engines in one process a gather has been seen to wait for ever.
        cases = [case for case in engine_cases(shape) if case.architecture in names[first : first + AT_ONCE]]
        for result in run_ranks(run_cases, shape[0] * shape[1], cases, timeout_s=900)[0]:
            failures += taken_down(result, result_table)
    result_table.write("hybrids", "Law 1 for hybrids: one step against one process, fp32")
    assert not failures, "\n".join(failures)
