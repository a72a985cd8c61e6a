"""Drawing, packing and dealing of rows to ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_ulysses.config.learning import DataSection
from ray_ulysses.data.plan import packing as packing_module
from ray_ulysses.data.plan.drawing import CHUNK, COUNTERS, Drawing, Permutation
from ray_ulysses.data.plan.packing import NUM_OPEN_ROWS, Packer
from ray_ulysses.data.plan.rows import Fragments, PieceBlocks, Pieces
from ray_ulysses.data.plan.segment import Packing, PlanSettings
from ray_ulysses.data.plan.steps import assign_rows, balance_windows, num_micro_batches, step_times


def pieces_of(lengths: Sequence[int], has_next: Sequence[bool] | None = None) -> Pieces:
    return Pieces(
        document=np.arange(len(lengths), dtype=np.int64),
        start=np.zeros(len(lengths), dtype=np.int64),
        length=np.asarray(lengths, dtype=np.int64),
        has_next=np.zeros(len(lengths), dtype=bool) if has_next is None else np.asarray(has_next),
    )


def pack(packing: Packing, lengths: Sequence[int], capacity: int, blocks: int = 1) -> list[list[tuple[int, int, int]]]:
    """Return the packed rows in closing order, each as a list of pieces (document, start, length)."""
    packer, whole, rows = Packer(packing, capacity), pieces_of(lengths), []
    cuts = np.linspace(0, len(lengths), blocks + 1).astype(int)
    for low, high in itertools.pairwise(cuts):
        part, sizes = packer.add(whole.take(slice(low, high)), is_last=high == len(lengths) and low == cuts[-2])
        places = np.cumsum([0, *sizes])
        for first, last in itertools.pairwise(places):
            rows.append([(int(part.document[i]), int(part.start[i]), int(part.length[i])) for i in range(first, last)])
    return rows


def slow_best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The rule in its plainest form: rows of document numbers, in the order in which they close."""
    slots: list[list[int] | None] = [None] * NUM_OPEN_ROWS
    closed: list[list[int]] = []

    def room(slot: int) -> int:
        return capacity - sum(lengths[document] for document in slots[slot] or ())

    for document, length in enumerate(lengths):
        fitting = [(room(slot), slot) for slot, row in enumerate(slots) if row is not None and room(slot) >= length]
        if length < capacity and fitting:
            slot = min(fitting)[1]
            slots[slot].append(document)
            if room(slot) == 0:
                closed.append(slots[slot])
                slots[slot] = None
        elif length == capacity:
            closed.append([document])
        else:
            if None not in slots:
                fullest = min((room(slot), slot) for slot in range(NUM_OPEN_ROWS))[1]
                closed.append(slots[fullest])
                slots[fullest] = None
                slots[fullest] = [document]
            else:
                slots[slots.index(None)] = [document]
    return closed + [row for row in slots if row is not None]


@settings(deadline=None)  # the first call compiles
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=400),
    spare=st.integers(0, 30),
    blocks=st.integers(1, 5),
)
def test_best_fit_is_the_plain_rule_however_it_is_cut_into_blocks(lengths: list[int], spare: int, blocks: int) -> None:
    capacity = max(lengths) + spare
    found = pack("best_fit", lengths, capacity, blocks)
    assert [[document for document, _, _ in row] for row in found] == slow_best_fit(lengths, capacity)


def slow_wide_fit(lengths: Sequence[int], capacity: int, num_open: int) -> list[list[int]]:
    """The rule in its plainest form: rows of document numbers, in the order in which they close."""
    width = capacity // packing_module.NUM_CLASSES + 1
    rows: list[list[int]] = []
    spare = list(range(num_open))[::-1]
    # Open rows by slot, in the order in which they entered the class that they are in.
    entered: dict[int, list[int]] = {}

    def room(row: list[int]) -> int:
        return capacity - sum(lengths[document] for document in row)

    for document, length in enumerate(lengths):
        classes = [(room(row) // width, -at, slot) for at, (slot, row) in enumerate(entered.items())]
        # In the class of the length itself, the row that entered it last is the only one that is looked at.
        last = min((entry for entry in classes if entry[0] == length // width), default=(0, 0, -1))[2]
        fitting = [
            entry
            for entry in classes
            if entry[0] * width >= length or (entry[2] == last and room(entered[last]) >= length)
        ]
        row: list[int] = []
        slot = -1
        if length < capacity and fitting:
            slot = min(fitting)[2]
            row = entered.pop(slot)
        elif length < capacity and len(entered) == num_open:
            slot = min(classes)[2]
            rows.append(entered.pop(slot))
        elif length < capacity:
            slot = spare.pop()
        row.append(document)
        if room(row):
            entered[slot] = row
        else:
            rows.append(row)
            spare += [slot] if slot >= 0 else []
    return rows + [entered[slot] for slot in sorted(entered)]


@settings(deadline=None)  # the first call compiles
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=300),
    unit=st.sampled_from([1, 400, 5000]),
    spare=st.integers(0, 30),
    num_open=st.sampled_from([1, 3, 8]),
    blocks=st.integers(1, 5),
)
# The second piece lacks four tokens of room beside the first, whose room is in the same class.
@example(lengths=[15, 15, 1, 1, 1, 1, 16], unit=5000, spare=14, num_open=8, blocks=1)
def test_wide_fit_is_the_plain_rule_however_it_is_cut_into_blocks(
    lengths: list[int], unit: int, spare: int, num_open: int, blocks: int
) -> None:
    # Lengths that differ by less than a class of rooms, which here holds up to 74 tokens.
    lengths = [length * unit + at * 5 % 29 for at, length in enumerate(lengths)]
    capacity = max(lengths) + spare * unit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing_module, "WIDE_OPEN_ROWS", num_open)
        found = pack("wide_fit", lengths, capacity, blocks)
    assert [[document for document, _, _ in row] for row in found] == slow_wide_fit(lengths, capacity, num_open)


def test_wide_fit_fills_rows_of_documents_of_about_half_a_row_where_best_fit_does_not() -> None:
    capacity = 131_072
    lengths = np.random.default_rng(0).integers(int(0.34 * capacity), int(0.66 * capacity), 400_000)
    num_rows = {}
    for packing in ("best_fit", "wide_fit"):
        _, sizes = Packer(packing, capacity).add(pieces_of(lengths), is_last=True)  # type: ignore[arg-type]
        num_rows[packing] = sizes.size
    fill = {packing: lengths.sum() / (rows * capacity) for packing, rows in num_rows.items()}
    assert fill["best_fit"] < 0.98
    assert fill["wide_fit"] >= 0.995


@settings(deadline=None)  # the first call compiles
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60), capacity=st.integers(1, 25), blocks=st.integers(1, 4)
)
def test_concat_fills_every_row_but_the_last_and_loses_no_target(
    lengths: list[int], capacity: int, blocks: int
) -> None:
    rows = pack("concat", lengths, capacity, blocks)
    assert all(sum(length for _, _, length in row) == capacity for row in rows[:-1])
    assert all(sum(length for _, _, length in row) <= capacity for row in rows[-1:])
    labels = [
        (document, at)
        for row in rows
        for document, start, length in row
        for at in range(start + 1, min(start + length, lengths[document] - 1) + 1)
    ]
    assert sorted(labels) == [(document, at) for document, size in enumerate(lengths) for at in range(1, size)]


SEEDS = (7, 0, 1)


@pytest.mark.parametrize("block_pieces", [100, CHUNK - 1, CHUNK, CHUNK + 1, 10 * CHUNK])
def test_every_document_and_fragment_is_drawn_at_its_place(block_pieces: int) -> None:
    lengths = (np.arange(3 * CHUNK + 5) * 37 % 900 + 2).astype(np.uint32)
    sizes = np.array([0, 2 * CHUNK - 3, lengths.size], dtype=np.int64)
    fragments = Fragments(
        document=np.array([4, 9]), start=np.array([2, 0], dtype=np.int64), length=np.array([5, 3], dtype=np.int64)
    )
    drawing = Drawing(lengths, sizes, PlanSettings(seed=7, context_tokens=1000, pad_multiple=8, rows_per_step=1))
    counters = np.zeros(len(COUNTERS), dtype=np.int64)
    blocks = list(drawing.pieces(np.diff(sizes).tolist(), SEEDS, fragments, counters, block_pieces=block_pieces))
    found = Pieces.join(blocks)
    order = Permutation.seeded(lengths.size + 2, *SEEDS).elements(0, lengths.size + 2)
    whole = order < lengths.size
    assert np.array_equal(found.document, np.where(whole, order, np.where(order == lengths.size, 4, 9)))
    assert np.array_equal(found.length[whole], lengths[order[whole]])
    assert found.start[~whole].tolist() == [fragments.start[one - lengths.size] for one in order[~whole]]
    assert found.has_next.tolist() == (~whole & (found.start + found.length < lengths[found.document])).tolist()
    assert {block.size for block in blocks[:-1]} <= {block_pieces}


@settings(deadline=None)  # the first call compiles
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63))
def test_a_permutation_has_every_element_once(size: int, seed: int) -> None:
    assert np.array_equal(np.sort(Permutation.seeded(size, seed).elements(0, size)), np.arange(size))
    large = Permutation.seeded(10**12 + size, seed).elements(10**12 - 1, 10**12 + 1)
    assert len(set(large.tolist())) == 2 and (large < 10**12 + size).all()


def test_permutations_of_many_seeds_are_as_even_as_fair_shuffles() -> None:
    size, draws = 64, 3000
    orders = np.stack([Permutation.seeded(size, seed).elements(0, size) for seed in range(draws)])
    counts = np.stack([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    expected = draws / size
    chi_square = ((counts - expected) ** 2 / expected).sum() / (size - 1) ** 2
    assert 0.9 < chi_square < 1.1, "1 for a fair shuffle"
    neighbours = (np.abs(np.diff(orders, axis=1)) == 1).mean()
    assert abs(neighbours - 2 / size) < 0.003


@given(costs=st.lists(st.integers(0, 1000), min_size=1, max_size=40), dp_size=st.integers(1, 9))
def test_every_row_of_a_step_is_dealt_once(costs: list[int], dp_size: int) -> None:
    rows = range(100, 100 + len(costs))
    dealt = assign_rows(rows, costs, dp_size)
    assert len(dealt) == num_micro_batches(len(costs), dp_size)
    assert all(len(micro_batch) == dp_size for micro_batch in dealt)
    flat = [row for micro_batch in dealt for row in micro_batch]
    assert sorted(row for row in flat if row is not None) == list(rows)
    assert sum(row is None for row in flat) == len(dealt) * dp_size - len(costs)
    assert all(None not in micro_batch for micro_batch in dealt[:-1])


def test_micro_batches_hold_neighbours_in_cost_and_alternate_direction() -> None:
    assert assign_rows([0, 1, 2, 3, 4], [10, 50, 20, 40, 30], 2) == ((1, 3), (2, 4), (0, None))


@given(
    costs=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    rows_per_step=st.integers(1, 12),
    dp_size=st.integers(1, 5),
)
def test_imbalance_is_the_lockstep_time_of_the_dealing(costs: list[int], rows_per_step: int, dp_size: int) -> None:
    lockstep = 0
    for first in range(0, len(costs), rows_per_step):
        rows = range(first, min(first + rows_per_step, len(costs)))
        for micro_batch in assign_rows(rows, [costs[row] for row in rows], dp_size):
            lockstep += max(costs[row] for row in micro_batch if row is not None)
    expected = lockstep * dp_size / sum(costs)
    times = step_times(np.asarray(costs), rows_per_step, dp_size)
    assert times.imbalance == pytest.approx(expected, rel=1e-12)
    assert 1.0 - 1e-12 <= times.bound <= times.imbalance * (1 + 1e-12)
    assert times.fast <= 1.0 + 1e-12
    assert times.slow >= 1.0 - 1e-12


def test_the_bound_is_the_mean_of_the_ranks_or_the_dearest_row() -> None:
    assert step_times(np.array([8, 1, 1, 2, 6, 6]), 3, 2).bound == pytest.approx((8 + 7) * 2 / 24)


@given(
    costs=st.lists(st.integers(0, 1000), max_size=80),
    rows_per_step=st.integers(1, 9),
    num_steps=st.integers(1, 5),
    first_row=st.integers(0, 50),
)
def test_windows_move_rows_only_within_themselves(
    costs: list[int], rows_per_step: int, num_steps: int, first_row: int
) -> None:
    order = balance_windows(np.asarray(costs, dtype=np.int64), rows_per_step, num_steps, first_row)
    window = rows_per_step * num_steps
    places = np.arange(len(costs))
    assert sorted(order.tolist()) == places.tolist()
    assert np.array_equal((order + first_row) // window, (places + first_row) // window)


def test_each_step_of_a_window_holds_rows_of_all_costs() -> None:
    order = balance_windows(np.arange(64)[::-1].copy(), 16, 4)
    sums = np.arange(64)[::-1][order].reshape(4, 16).sum(axis=1)
    assert np.ptp(sums) == 0
    groups = np.sort(order.reshape(4, 4, 4), axis=2)
    assert (np.diff(groups, axis=2) == 1).all(), "a step holds groups of neighbours"


@pytest.mark.parametrize("dp_size", [8, 16, 64])
def test_rows_of_a_long_tail_load_64_groups_evenly_by_default(dp_size: int) -> None:
    # The most expensive rows cost about nine times the mean, as at 1M tokens with documents of 6,500 tokens on average.
    lengths = np.random.default_rng(0).lognormal(0.0, 1.0, 256 * 160).clip(max=10.0)
    costs = np.asarray(lengths * 10_000, dtype=np.int64)
    default = DataSection.model_fields["balance_steps"].default
    level = costs[balance_windows(costs, 256, default)]
    assert step_times(level, 256, dp_size).imbalance <= 1.05
    assert step_times(costs, 256, 64).imbalance > 1.5


def test_steps_of_a_window_do_not_rise_and_fall_in_cost() -> None:
    costs = np.random.default_rng(0).pareto(2.0, 4 * 160 * 16).clip(max=50.0)
    level = costs[balance_windows((costs * 1000).astype(np.int64), 16, 8)].reshape(-1, 8, 16).sum(axis=2)
    dearest = level.argmax(axis=1)
    assert np.bincount(dearest, minlength=8).max() < len(dearest) / 4


def test_pieces_in_blocks_are_those_of_one_table() -> None:
    rng = np.random.default_rng(0)
    sizes = [5, 0, 1, 40, 3]
    parts = [
        Pieces.make(
            [
                rng.integers(0, 2**32, size),
                rng.integers(0, 2**40, size),
                rng.integers(1, 2**31, size),
                rng.random(size) < 0.5,
            ]
        )
        for size in sizes
    ]
    blocks, whole = PieceBlocks(), Pieces.join(parts)
    for part in parts:
        blocks.add(part)
    assert blocks.size == whole.size == sum(sizes)
    for first in range(whole.size + 1):
        for stop in range(first, whole.size + 3):
            found, expected = blocks.take(slice(first, stop)), whole.take(slice(first, stop))
            for one, other in zip(found.columns, expected.columns, strict=True):
                assert one.dtype == other.dtype and np.array_equal(one, other)
