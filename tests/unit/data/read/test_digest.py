from __future__ import annotations

from dataclasses import replace

import numpy as np

from ray_ulysses.data.read.digest import add_digests, checksum, from_int64, row_digest, slice_checksum, to_int64
from ray_ulysses.data.read.reader import RowReader
from tests.unit.data.plans import memory_reader


def reader_of(*lengths: int) -> RowReader:
    return memory_reader(lengths, context_tokens=32)[2]


def test_the_digest_of_a_row_is_the_same_for_every_sp_size() -> None:
    reader = reader_of(20, 30, 17, 90)
    sums = {
        add_digests(*(slice_checksum(reader.read("train", 2, rank, size)) for rank in range(size)))
        for size in (1, 2, 4, 8)
    }
    assert len(sums) == 1


def test_changed_and_swapped_values_change_the_checksum() -> None:
    whole, outer = reader_of(20).read("train", 0, 0, 1), reader_of(100).read("train", 0, 0, 2, 2)
    names, half = ("input_ids", "labels", "position_ids"), outer.input_ids.size // 2
    tokens = whole.input_ids.copy()
    tokens[[3, 4]] = tokens[[4, 3]]
    changed = [{name: getattr(whole, name) + (np.arange(24) == at)} for name in names for at in range(24)]
    for values in (*changed, {"input_ids": tokens}, {"input_ids": whole.labels, "labels": whole.input_ids}):
        assert slice_checksum(replace(whole, **values)) != slice_checksum(whole)
    ranges = {name: np.roll(getattr(outer, name), half) for name in names}
    assert slice_checksum(replace(outer, **ranges)) != slice_checksum(outer)


def test_rows_that_swap_contents_a_repeated_row_and_a_lost_one_are_noticed() -> None:
    contents = {row: 1000 + row for row in range(4)}
    right = add_digests(*(row_digest(row, value) for row, value in contents.items()))
    swapped = add_digests(row_digest(0, 1001), row_digest(1, 1000), row_digest(2, 1002), row_digest(3, 1003))
    tripled = add_digests(right, row_digest(2, 1002), row_digest(2, 1002))
    lost = add_digests(*(row_digest(row, contents[row]) for row in (0, 1, 2)))
    assert len({right, swapped, tripled, lost}) == 4
    assert row_digest(-1, slice_checksum(reader_of(20).filler(0, 1))) == 0, "a filler adds nothing"


def test_signed_sums_that_wrap_give_the_same_digest() -> None:
    values = [row_digest(row, row * 7919) for row in range(100)]
    signed = np.asarray([to_int64(value) for value in values], dtype=np.int64)
    assert from_int64(int(signed.sum(dtype=np.int64))) == add_digests(*values)
    assert [from_int64(to_int64(value)) for value in values] == values


def test_digests_of_this_version_never_change() -> None:
    """Digests of runs made by different versions are compared: the mixing is fixed."""
    assert row_digest(0, 0) == 12035550249420947055
    assert row_digest(5, 123456789) == 7032609767576830466
    values = np.arange(4)
    assert checksum(3, values, values - 100, values * 0) == 11231219940014237149
