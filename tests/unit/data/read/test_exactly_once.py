"""Law 3: the ranks receive every planned token exactly once, for any corpus, settings and sequence of world sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.read.digest import add_digests, row_digest, slice_checksum
from ray_ulysses.data.read.reader import IGNORE_INDEX, RowReader, RowSlice
from ray_ulysses.data.read.row_source import DirectSource
from tests.breadth import examples, is_fast
from tests.unit.data.plans import memory_reader
from tests.unit.data.read.test_reader import PAD, SPLITS, whole_row

World = tuple[int, tuple[int, int]]
worlds = st.lists(st.tuples(st.integers(1, 3 if is_fast() else 5), st.sampled_from(SPLITS)), min_size=1, max_size=6)
corpora = st.lists(st.integers(1, 100), min_size=1, max_size=25).filter(lambda lengths: max(lengths) > 1)
plans = st.builds(
    PlanSettings,
    seed=st.integers(0, 2**32),
    context_tokens=st.integers(PAD, 3 * PAD),
    pad_multiple=st.just(PAD),
    rows_per_step=st.integers(1, 7),
    epochs=st.integers(1, 2),
    packing=st.sampled_from(["best_fit", "wide_fit", "concat", "none"]),
    balance_steps=st.integers(1, 3),
)


def receive(reader: RowReader, plan: Plan, sequence: list[World]) -> Iterator[tuple[int, list[RowSlice]]]:
    """Yield the slices that all ranks receive in each step; the steps cycle through the worlds ``(dp, (sp, ring))``."""
    for step in range(1, plan.num_steps + 1):
        dp_size, (sp_size, ring_size) = sequence[(step - 1) % len(sequence)]
        received = []
        for dp_rank in range(dp_size):
            for sp_rank in range(sp_size):
                source = DirectSource(reader, plan, dp_rank, dp_size, sp_rank, sp_size, ring_size=ring_size)
                received += list(source.step(step))
                source.close()
        yield step, received


def pieces_received(slices: list[RowSlice]) -> Counter[tuple[int, int, int]]:
    """Count the received pieces (document, start, length), recognized by the values of their tokens alone."""
    by_row: dict[int, list[RowSlice]] = {}
    for one in slices:
        if not one.is_filler:
            by_row.setdefault(one.row, []).append(one)
    found: Counter[tuple[int, int, int]] = Counter()
    for parts in by_row.values():
        assert sorted(one.sp_rank for one in parts) == list(range(parts[0].sp_size)), "a slice is lost or came twice"
        tokens, begin = whole_row(parts, "input_ids"), 0
        for length in parts[0].document_lengths:
            piece = tokens[begin : begin + length]
            assert piece == list(range(piece[0], piece[0] + length)), "a piece is not one range of its document"
            found[(piece[0] // 100_000, piece[0] % 100_000, length)] += 1
            begin += length
    return found


@settings(max_examples=examples(40) if is_fast() else 60, derandomize=is_fast())
@given(lengths=corpora, plan_settings=plans, sequence=worlds)
def test_every_planned_token_is_received_exactly_once_at_any_sequence_of_worlds(
    lengths: list[int], plan_settings: PlanSettings, sequence: list[World]
) -> None:
    store, plan, reader = memory_reader(lengths, **asdict(plan_settings))
    received: Counter[tuple[int, int, int]] = Counter()
    labels: Counter[int] = Counter()
    for step, slices in receive(reader, plan, sequence):
        received += pieces_received(slices)
        supervised = [int(label) for one in slices for label in one.labels if label != IGNORE_INDEX]
        assert len(supervised) == plan.step_tokens(step), "the denominator must not depend on the world"
        labels.update(supervised)
    pieces = [piece for row in range(plan.num_rows) for piece in plan.pieces(row)]
    assert received == Counter((piece.document, piece.start, piece.length) for piece in pieces)
    targets = [store.token(document, at) for document, size in enumerate(lengths) for at in range(1, size)]
    assert labels == Counter(dict.fromkeys(targets, plan_settings.epochs))


@settings(max_examples=examples(25))
@given(lengths=corpora, rows_per_step=st.integers(1, 7), one=worlds, other=worlds)
def test_the_digest_of_a_run_is_the_same_at_any_sequence_of_worlds(
    lengths: list[int], rows_per_step: int, one: list[World], other: list[World]
) -> None:
    _, plan, reader = memory_reader(lengths, context_tokens=2 * PAD, pad_multiple=PAD, rows_per_step=rows_per_step)

    def digest(sequence: list[World]) -> int:
        sums: dict[int, int] = {}
        for _, slices in receive(reader, plan, sequence):
            for received in slices:
                sums[received.row] = add_digests(sums.get(received.row, 0), slice_checksum(received))
        return add_digests(*(row_digest(row, value) for row, value in sums.items()))

    assert digest(one) == digest(other)
