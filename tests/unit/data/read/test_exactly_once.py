"""Law 3 from what ranks receive: any corpus, context, seed and G, and any sequence of world sizes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.read.digest import add_digests, row_digest, slice_checksum
from ray_ulysses.data.read.reader import IGNORE_INDEX, RowReader, RowSlice
from ray_ulysses.data.read.row_source import DirectSource
from tests.breadth import examples
from tests.unit.data.corpora import MemoryStore
from tests.unit.data.plans import build_plan

World = tuple[int, int]
worlds = st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=6)
corpora = st.lists(st.integers(1, 100), min_size=1, max_size=25).filter(lambda lengths: max(lengths) > 1)


def receive_step(reader: RowReader, plan: Plan, step: int, world: World) -> list[RowSlice]:
    """What all ranks of a world of ``(dp, sp)`` receive in one step."""
    dp_size, sp_size = world
    received = []
    for dp_rank in range(dp_size):
        for sp_rank in range(sp_size):
            source = DirectSource(reader, plan, dp_rank, dp_size, sp_rank, sp_size)
            received += list(source.step(step))
            source.close()
    return received


def pieces_received(slices: list[RowSlice]) -> Counter[tuple[int, int, int]]:
    """The (document, start, length) of what was received, told from the token values alone."""
    by_row: dict[int, dict[int, RowSlice]] = {}
    for one in slices:
        if not one.is_filler:
            assert one.sp_rank not in by_row.setdefault(one.row, {}), "a slice came twice"
            by_row[one.row][one.sp_rank] = one
    found: Counter[tuple[int, int, int]] = Counter()
    for parts in by_row.values():
        tokens = [int(token) for rank in sorted(parts) for token in parts[rank].input_ids]
        begin = 0
        for length in parts[0].document_lengths:
            piece = tokens[begin : begin + length]
            assert piece == list(range(piece[0], piece[0] + length)), "a piece is not one range of its document"
            found[(piece[0] // 100_000, piece[0] % 100_000, length)] += 1
            begin += length
    return found


plans = st.builds(
    PlanSettings,
    seed=st.integers(0, 2**32),
    context_tokens=st.integers(8, 48),
    pad_multiple=st.just(8),
    rows_per_step=st.integers(1, 7),
    epochs=st.integers(1, 2),
    packing=st.sampled_from(["best_fit", "wide_fit", "concat", "none"]),
    balance_steps=st.integers(1, 3),
)


@settings(max_examples=examples(40), derandomize=True)
@given(lengths=corpora, plan_settings=plans, sequence=worlds)
def test_every_planned_token_is_received_exactly_once_at_any_sequence_of_worlds(
    lengths: list[int], plan_settings: PlanSettings, sequence: list[World]
) -> None:
    check_everything_is_received_once(lengths, plan_settings, sequence)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(lengths=corpora, plan_settings=plans, sequence=worlds)
def test_every_planned_token_is_received_exactly_once_in_many_runs(
    lengths: list[int], plan_settings: PlanSettings, sequence: list[World]
) -> None:
    """The test before, with other runs each time."""
    check_everything_is_received_once(lengths, plan_settings, sequence)


def check_everything_is_received_once(lengths: list[int], plan_settings: PlanSettings, sequence: list[World]) -> None:
    store = MemoryStore(lengths)
    plan = build_plan(store.lengths, store.fingerprint, plan_settings)
    reader = RowReader(store, plan)
    received: list[Counter[tuple[int, int, int]]] = []
    labels: Counter[int] = Counter()
    for step in range(1, plan.num_steps + 1):
        slices = receive_step(reader, plan, step, sequence[(step - 1) % len(sequence)])
        received.append(pieces_received(slices))
        supervised = [int(label) for one in slices for label in one.labels if label != IGNORE_INDEX]
        assert len(supervised) == plan.step_tokens(step), "the denominator must not depend on the world"
        labels.update(supervised)
    planned = Counter(
        (piece.document, piece.start, piece.length) for row in range(plan.num_rows) for piece in plan.pieces(row)
    )
    assert sum(received, Counter()) == planned
    targets = [store.token(document, at) for document, size in enumerate(lengths) for at in range(1, size)]
    assert labels == Counter(dict.fromkeys(targets, plan_settings.epochs))


@settings(max_examples=examples(25))
@given(lengths=corpora, rows_per_step=st.integers(1, 7), one=worlds, other=worlds)
def test_the_digest_of_a_run_is_the_same_at_any_sequence_of_worlds(
    lengths: list[int], rows_per_step: int, one: list[World], other: list[World]
) -> None:
    store = MemoryStore(lengths)
    plan_settings = PlanSettings(seed=0, context_tokens=40, pad_multiple=8, rows_per_step=rows_per_step)
    plan = build_plan(store.lengths, store.fingerprint, plan_settings)
    reader = RowReader(store, plan)

    def digest(sequence: list[World]) -> int:
        sums: dict[int, int] = {}
        for step in range(1, plan.num_steps + 1):
            for received in receive_step(reader, plan, step, sequence[(step - 1) % len(sequence)]):
                sums[received.row] = add_digests(sums.get(received.row, 0), slice_checksum(received))
        return add_digests(*(row_digest(row, value) for row, value in sums.items()))

    assert digest(one) == digest(other)
