from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_ulysses.data.plan import packing as packing_module
from ray_ulysses.data.plan.packing import NUM_OPEN_ROWS, Packer
from ray_ulysses.data.plan.rows import Pieces
from ray_ulysses.data.plan.segment import Packing


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
