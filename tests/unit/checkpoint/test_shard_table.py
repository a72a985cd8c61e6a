from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.checkpoint import Manifest, StateDescription, TensorSpec
from ray_ulysses.checkpoint.checksums import table_bytes
from ray_ulysses.checkpoint.intervals import CoverError, Interval, partition, plan_reads
from ray_ulysses.checkpoint.load import plan_batches, plan_load
from ray_ulysses.checkpoint.manifest import ManifestError
from ray_ulysses.checkpoint.shard_table import EVEN, ShardTable, record_of
from ray_ulysses.checkpoint.shards import ShardEntry, StoredInterval, place_intervals
from ray_ulysses.run_names import shard_file
from ray_ulysses.validation import ContentError
from tests.breadth import examples
from tests.unit.checkpoint.manifests import ATTEMPT, META, STEP

Held = list[tuple[str, int, int]]


def specs_of(sizes: list[int]) -> dict[str, TensorSpec]:
    return {
        f"fp32/{number}": TensorSpec(shape=(size,), dtype="F32" if number % 3 else "BF16")
        for number, size in enumerate(sizes)
    }


def even(tensors: dict[str, TensorSpec], world_size: int, rank: int) -> Held:
    """Return the intervals of a rank under ZeRO-3."""
    return [(key, *partition(spec.num_elements, world_size, rank)) for key, spec in tensors.items()]


def entry_of(tensors: dict[str, TensorSpec], held: Held, world_size: int, rank: int) -> ShardEntry:
    sizes = [(Interval(*one), (one[2] - one[1]) * tensors[one[0]].item_bytes) for one in held if one[1] < one[2]]
    return ShardEntry(
        file=shard_file(ATTEMPT, rank, world_size),
        num_bytes=256 + sum(size for _, size in sizes) + table_bytes(size for _, size in sizes),
        header_bytes=256,
        header_sum=rank,
        sums_sum=0,
        intervals=place_intervals(sizes, 256),
    )


def table_of(tensors: dict[str, TensorSpec], held: list[Held]) -> tuple[ShardTable, list[ShardEntry]]:
    world_size = len(held)
    entries = [entry_of(tensors, one, world_size, rank) for rank, one in enumerate(held)]
    records = [record_of(one, tensors, world_size, rank) for rank, one in enumerate(entries)]
    return ShardTable(tensors, world_size, records), entries


def cut_at(total: int, cuts: list[int]) -> list[tuple[int, int]]:
    borders = [0, *sorted(min(cut, total) for cut in cuts), total]
    return list(pairwise(borders))


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[str, TensorSpec], list[Held]]:
    """Draw tensors and what each rank holds: even shares of some tensors, shares of any size of the others."""
    tensors = specs_of(draw(st.lists(st.integers(0, 200_000) | st.integers(0, 9), max_size=7)))
    world_size = draw(st.integers(1, 5))
    held: list[Held] = [[] for _ in range(world_size)]
    for key, spec in tensors.items():
        shares = [partition(spec.num_elements, world_size, rank) for rank in range(world_size)]
        if draw(st.booleans()):
            places = st.integers(0, spec.num_elements)
            shares = cut_at(spec.num_elements, draw(st.lists(places, min_size=world_size - 1, max_size=world_size - 1)))
        for rank, share in enumerate(shares):
            held[rank].append((key, *share))
    return tensors, held


def all_stored(entries: list[ShardEntry]) -> list[tuple[ShardEntry, StoredInterval]]:
    return [(entry, one) for entry in entries for one in entry.intervals]


@settings(max_examples=examples(150))
@given(states(), st.integers(1, 7))
def test_a_table_says_what_the_ranks_wrote(state: tuple[dict[str, TensorSpec], list[Held]], new_world: int) -> None:
    tensors, held = state
    table, entries = table_of(tensors, held)
    table.validate()
    table.check_cover()
    for shard, entry in zip(table, entries, strict=True):
        assert replace(shard, intervals=tuple(shard.intervals)) == entry
        assert shard.sums_offset == entry.sums_offset
    for key in tensors:
        starts = sorted(one.interval.start for _, one in all_stored(entries) if one.interval.key == key)
        assert list(table.starts(key)) == starts
    some = {key for key in tensors if int(key[5:]) % 2}
    for found, entry in zip(table.of(some), entries, strict=True):
        assert list(found) == [one for one in entry.intervals if one.interval.key in some]
    for rank in range(new_world):
        wanted = [Interval(*one) for one in even(tensors, new_world, rank)]
        stored = all_stored(entries)
        reads = plan_reads(wanted, [one.interval for _, one in stored])
        expected = plan_batches(reads, stored, [want.start for want in wanted])
        found_batches = plan_load(table, wanted)
        assert [(one.shard.file, one.offset, one.num_bytes, one.ranges) for one in found_batches] == [
            (one.shard.file, one.offset, one.num_bytes, one.ranges) for one in expected
        ]


@settings(max_examples=examples(100))
@given(states(), st.data())
def test_an_element_that_is_missing_or_stored_twice_is_found(
    state: tuple[dict[str, TensorSpec], list[Held]], data: st.DataObject
) -> None:
    tensors, held = state
    places = [(rank, at) for rank, rows in enumerate(held) for at, row in enumerate(rows) if row[1] < row[2]]
    if not places:
        return
    rank, at = data.draw(st.sampled_from(places))
    key, start, stop = held[rank][at]
    size = tensors[key].num_elements
    wrong = [[], [(key, start + 1, stop)], [(key, start, stop - 1)]]
    wrong += [[(key, start, stop + 1)]] if stop < size else []
    held[rank][at : at + 1] = data.draw(st.sampled_from(wrong))
    table, _ = table_of(tensors, held)
    table.validate()
    with pytest.raises(CoverError, match=key):
        table.check_cover()


def test_a_shard_of_a_thousand_ranks_takes_one_row() -> None:
    tensors = specs_of([8192, 50_000_000, 8192, 3, 70_000_000] * 40)
    table, _ = table_of(tensors, [even(tensors, 1024, rank) for rank in range(1024)])
    assert max(len(record.intervals) for record in table.records) <= 2
    manifest = Manifest(
        step=STEP, attempt=ATTEMPT, world_size=1024, meta=META, state=StateDescription(tensors=tensors), shards=table
    )
    content = manifest.to_bytes()
    assert len(content) < 1024 * 400 + len(tensors) * 100
    found = Manifest.from_bytes(content)
    found.shards.check_cover()
    assert found == manifest
    # A rank of another world reads from the few shards that hold its elements.
    wanted = [Interval(*one) for one in even(tensors, 768, 500)]
    assert len({batch.shard.file for batch in plan_load(found.shards, wanted)}) < 12


def test_a_check_of_tensors_with_empty_intervals_makes_no_interval_of_each_rank(monkeypatch: Any) -> None:
    num_ranks, made = 50, [0]
    tensors = {f"fp32/{number}": TensorSpec(shape=(num_ranks,), dtype="F32") for number in range(60)}
    table, _ = table_of(tensors, [even(tensors, num_ranks, rank) for rank in range(num_ranks)])
    none = entry_of({}, [], num_ranks + 1, num_ranks)
    rows = tuple((key, 0, 0) for key in tensors)
    last = replace(record_of(none, {}, num_ranks + 1, num_ranks), intervals=rows)
    table = ShardTable(tensors, num_ranks, [*table.records, last])
    table.validate()

    def counted(*values: Any) -> Interval:
        made[0] += 1
        return Interval(*values)

    monkeypatch.setattr("ray_ulysses.checkpoint.shard_table.Interval", counted)
    table.check_cover()
    assert made == [2 * len(tensors)]


def test_even_shares_are_those_of_the_partition() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        world_size = int(rng.integers(1, 40))
        tensors = specs_of(rng.integers(0, 60, 30).tolist())
        held = [even(tensors, world_size, rank) for rank in range(world_size)]
        table, _ = table_of(tensors, held)
        for rank, rows in enumerate(held):
            assert [tuple(one.interval) for one in table[rank].intervals] == [row for row in rows if row[1] < row[2]]


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        ([(EVEN, 0, 2), (EVEN, 1, 3)], 1),  # the ranks' shares of these tensors are empty
        ([(EVEN, 2, 3), (EVEN, 0, 1)], 1),
        ([("fp32/2", 0, 1), ("fp32/1", 0, 1)], 1),
        ([("fp32/2", 0, 1), ("fp32/2", 0, 1)], 1),
        ([(EVEN, 0, 3), ("fp32/2", 0, 1)], 1),
    ],
)
def test_rows_that_are_not_in_the_order_of_the_tensors_are_refused(rows: list[Any], place: int) -> None:
    tensors = specs_of([1, 1, 1])
    table, _ = table_of(tensors, [even(tensors, 2, rank) for rank in range(2)])
    table = ShardTable(tensors, 2, [table.records[0], replace(table.records[1], intervals=tuple(rows))])
    with pytest.raises(ContentError, match=rf"^shards\[1\]\.intervals\[{place}\]"):
        table.validate()


@pytest.mark.parametrize("kind", ["even", "listed"])
@pytest.mark.parametrize("is_short", [False, True])
def test_a_small_foreign_manifest_takes_little_memory(kind: str, is_short: bool) -> None:
    # All ranks but the last store their even shares, and the last one nothing, or intervals that are stored already.
    num_ranks = 400
    tensors = {f"fp32/{number}": TensorSpec(shape=(num_ranks,), dtype="F32") for number in range(400)}
    records = []
    for rank in range(num_ranks):
        held = even(tensors, num_ranks, rank)
        if rank == num_ranks - 1:
            held = [(key, 0, 2) for key in tensors] if kind == "listed" else []
        records.append(record_of(entry_of(tensors, held, num_ranks, rank), tensors, num_ranks, rank))
    table = ShardTable(tensors, num_ranks, records[1:] if is_short else records)
    state = StateDescription(tensors=tensors)
    manifest = Manifest(step=STEP, attempt=ATTEMPT, world_size=num_ranks, meta=META, state=state, shards=table)
    content = manifest.to_bytes()
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError if is_short else CoverError):
            Manifest.from_bytes(content).shards.check_cover()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Read as JSON, it takes about ten times its size; its 160,000 intervals would take 200 times.
    assert peak < 30 * len(content), f"{peak / len(content):.0f} times the size of the file"
