from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.data.packing import best_fit, split_documents


def slow_best_fit(lengths: list[int], capacity: int, num_open: int) -> list[int]:
    """The rule in its plainest form."""
    free: dict[int, int] = {}
    rows, opened = [], 0
    for length in lengths:
        fitting = [(room, row) for row, room in free.items() if room >= length]
        if fitting:
            row = min(fitting)[1]
        else:
            row, opened = opened, opened + 1
            if length < capacity and len(free) == num_open:
                del free[min((room, row) for row, room in free.items())[1]]
            free[row] = capacity
        free[row] -= length
        if not free[row]:
            del free[row]
        rows.append(row)
    return rows


@given(lengths=st.lists(st.integers(1, 30), max_size=80), spare=st.integers(0, 30), num_open=st.integers(1, 6))
def test_best_fit_is_the_plain_rule(lengths: list[int], spare: int, num_open: int) -> None:
    capacity = max(lengths, default=1) + spare
    found = best_fit(np.asarray(lengths, dtype=np.int64), capacity, num_open)
    assert found.tolist() == slow_best_fit(lengths, capacity, num_open)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=100))
def test_no_row_holds_more_than_its_capacity(lengths: list[int]) -> None:
    rows = best_fit(np.asarray(lengths, dtype=np.int64), 50, 4)
    assert np.bincount(rows, weights=lengths).max() <= 50
    assert set(rows.tolist()) == set(range(int(rows.max()) + 1))


def test_100k_documents_are_packed_in_under_a_second() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(8, 1.5, 100_000), 1, 131_072).astype(np.int64)
    start = time.perf_counter()
    rows = best_fit(lengths, 131_072)
    assert time.perf_counter() - start < 1.0
    fill = lengths.sum() / ((int(rows.max()) + 1) * 131_072)
    assert fill > 0.999


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20), capacity=st.integers(1, 25))
def test_every_token_but_the_first_is_a_label_once(lengths: list[int], capacity: int) -> None:
    document, start, length, has_next = split_documents(
        np.arange(len(lengths)), np.asarray(lengths, dtype=np.int64), capacity
    )
    labels = [
        (int(d), at + 1)
        for d, s, n, more in zip(document, start, length, has_next, strict=True)
        for at in range(int(s), int(s + n) if more else int(s + n) - 1)
    ]
    assert sorted(labels) == [(d, at) for d, size in enumerate(lengths) for at in range(1, size)]
    assert length.size == 0 or (length.min() >= 1 and length.max() <= capacity)


def test_a_remainder_of_one_token_is_a_label_and_no_piece() -> None:
    document, start, length, has_next = split_documents(np.array([7]), np.array([17]), 8)
    assert document.tolist() == [7, 7]
    assert start.tolist() == [0, 8]
    assert length.tolist() == [8, 8]
    assert has_next.tolist() == [True, True]


def test_a_document_of_one_token_has_nothing_to_predict() -> None:
    document, *_ = split_documents(np.array([0, 1]), np.array([1, 3]), 8)
    assert document.tolist() == [1]
