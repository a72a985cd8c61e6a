"""Rows and their slices: every split of a row has the same tokens, labels, positions, weights and digest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ray_ulysses.data.corpus import row_groups
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet, PlannedSource, open_sources
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.read.digest import add_digests, checksum, row_digest, slice_checksum, to_int64
from ray_ulysses.data.read.reader import IGNORE_INDEX, RowReader, RowSlice, slice_row
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.data.tokenize.spans import LabelSpans
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.layout import held_ranges
from tests.breadth import examples, is_fast
from tests.unit.data.corpora import MemoryStore, check_content, text_corpus
from tests.unit.data.plans import build_plan, memory_reader
from tests.unit.data.tokenize.test_supervision import prepare_rows, reasons_of

PAD = 24
SPLITS = [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (2, 2), (3, 3), (4, 2), (6, 2), (6, 3), (6, 6), (12, 2), (12, 4)]
"""Pairs of sp_size and ring_size; all of them can slice a row whose length is a multiple of PAD."""


def piece(document: int, start: int, length: int, has_next_label: bool = False) -> Piece:
    return Piece(document=document, start=start, length=length, has_next_label=has_next_label)


def whole_row(slices: list[RowSlice], name: str) -> list[int]:
    """Assemble a row from the values of its slices."""
    values = np.full(slices[0].row_tokens, -7, dtype=np.int64)
    for one in slices:
        place = 0
        for start, stop in held_ranges(one.row_tokens, one.sp_rank, one.sp_size, one.ring_size):
            values[start:stop] = getattr(one, name)[place : place + stop - start]
            place += stop - start
        assert place == getattr(one, name).size == one.row_tokens // one.sp_size
    return [int(value) for value in values]


def test_a_row_holds_tokens_labels_and_positions_document_by_document() -> None:
    store = MemoryStore([3, 10])
    row = slice_row(store, 5, 8, [piece(0, 0, 3), piece(1, 4, 3, has_next_label=True)], 0, 1)
    a, b = 0, 100_000
    assert row.input_ids.tolist() == [a, a + 1, a + 2, b + 4, b + 5, b + 6, 0, 0]
    assert row.labels.tolist() == [a + 1, a + 2, IGNORE_INDEX, b + 5, b + 6, b + 7, IGNORE_INDEX, IGNORE_INDEX]
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert row.document_lengths == (3, 3)
    assert (row.row, row.row_tokens, row.num_supervised, row.is_filler) == (5, 8, 5, False)


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"sp{split[0]}-ring{split[1]}")
@settings(max_examples=examples(25))
@given(lengths=st.lists(st.integers(2, 150), min_size=1, max_size=20), seed=st.integers(0, 99))
def test_the_slices_of_every_split_form_the_same_row(split: tuple[int, int], lengths: list[int], seed: int) -> None:
    _, plan, reader = memory_reader(lengths, context_tokens=2 * PAD, pad_multiple=PAD, seed=seed)
    for row in range(plan.num_rows):
        alone = reader.read("train", row, 0, 1)
        slices = [reader.read("train", row, rank, *split) for rank in range(split[0])]
        for name in ("input_ids", "labels", "position_ids"):
            assert whole_row(slices, name) == getattr(alone, name).tolist()
        assert add_digests(*map(slice_checksum, slices)) == slice_checksum(alone)
        assert sum(one.num_supervised for one in slices) == plan.stats(range(row, row + 1)).supervised[0]


def test_labels_cross_chunk_borders_between_ranks() -> None:
    store = MemoryStore([9, 16])
    # Chunks have six tokens: the first document crosses one border, the second crosses two.
    outer, inner = (slice_row(store, 0, 24, [piece(0, 0, 9), piece(1, 0, 15)], rank, 2, 2) for rank in range(2))
    b = 100_000
    assert outer.input_ids.tolist() == [*range(6), *range(b + 9, b + 15)]
    assert outer.labels.tolist() == [*range(1, 7), *range(b + 10, b + 15), IGNORE_INDEX]
    assert inner.input_ids.tolist() == [6, 7, 8, *range(b, b + 9)]
    assert inner.labels.tolist() == [7, 8, IGNORE_INDEX, *range(b + 1, b + 10)]
    assert inner.position_ids.tolist() == [6, 7, 8, *range(9)]
    assert outer.position_ids.tolist() == [*range(6), *range(9, 15)]


# One more token is read as the label of a range's last token, except at the end of the document.
@pytest.mark.parametrize(("rank", "split", "num_read"), [(1, (4, 1), 12 + 1), (0, (2, 2), 12 + 1 + 12)])
def test_a_rank_reads_only_the_tokens_of_its_slice(rank: int, split: tuple[int, int], num_read: int) -> None:
    store = MemoryStore([48])
    slice_row(store, 0, 48, [piece(0, 0, 48)], rank, *split)
    assert store.num_tokens_read == num_read


def test_a_filler_is_padding_whose_positions_continue_through_all_ranges() -> None:
    _, _, reader = memory_reader([9], context_tokens=2 * PAD, pad_multiple=PAD)
    slices = [reader.filler(rank, 4, 2) for rank in range(4)]
    assert whole_row(slices, "position_ids") == list(range(PAD))
    for one in slices:
        assert one.is_filler and one.num_supervised == 0 and one.document_lengths == ()


@pytest.mark.parametrize(("split", "setting"), [((5, 1), "sp_size=5"), ((8, 2), "sp_size=8 with .*ring_size=2")])
def test_a_row_that_a_split_can_not_divide_is_refused(split: tuple[int, int], setting: str) -> None:
    with pytest.raises(ValueError, match=rf"row 7 has 8 tokens.*parallel\.{setting}"):
        slice_row(MemoryStore([9]), 7, 8, [], 0, *split)


def test_a_plan_of_another_corpus_is_refused(tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path, ["some text"])
    planned = PlannedSource(path=str(corpus.path), fingerprint="elsewhere", num_documents=1)
    settings = PlanSettings(seed=1, context_tokens=24, pad_multiple=8, rows_per_step=4)
    plan = build_plan(corpus.lengths, "elsewhere", settings)
    with pytest.raises(UserError, match=r"the corpus has been replaced since the plan was made"):
        RowReader(CorpusSet([planned]), plan).read("train", 0, 0, 1)


def test_the_evaluation_split_is_read_from_its_own_rows() -> None:
    _, plan, reader = memory_reader(range(2, 80), eval_fraction=0.3, eval_rows=4)
    for row in range(plan.evaluation.num_rows):
        found = reader.read("evaluation", row, 0, 1)
        assert found.document_lengths == tuple(p.length for p in plan.evaluation.pieces(row))
        assert found.num_supervised == plan.evaluation.stats(row, row + 1).supervised[0]


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
    assert add_digests(int(signed.sum(dtype=np.int64))) == add_digests(*values)
    assert [add_digests(to_int64(value)) for value in values] == values
    assert [row_digest(1, to_int64(value)) for value in values] == [row_digest(1, value) for value in values]
    assert to_int64(1 << 63) == -(1 << 63)


def test_digests_of_this_version_never_change() -> None:
    """Digests of runs made by different versions are compared: the mixing is fixed."""
    assert row_digest(0, 0) == 12035550249420947055
    assert row_digest(5, 123456789) == 7032609767576830466
    values = np.arange(4)
    assert checksum(3, values, values - 100, values * 0) == 11231219940014237149


def spans_of(lengths: list[int], seed: int) -> tuple[LabelSpans, set[tuple[int, int]]]:
    """Return random spans, and the tokens (document, position) inside them."""
    rng = np.random.default_rng(seed)
    offsets, starts, stops, inside = [0], [], [], set()
    for document, size in enumerate(lengths):
        cuts = np.unique(rng.integers(0, size + 1, 2 * int(rng.integers(1, 5))))
        for start, stop in zip(cuts[0::2].tolist(), cuts[1::2].tolist(), strict=False):
            starts.append(start)
            stops.append(stop)
            inside |= {(document, at) for at in range(start, stop)}
        offsets.append(len(starts))
    return LabelSpans(offsets=np.array(offsets), starts=np.array(starts), stops=np.array(stops)), inside


@pytest.mark.parametrize("split", [(1, 1), (3, 1), (8, 1), (4, 2), (12, 4)], ids=str)
@settings(max_examples=examples(15))
@given(lengths=st.lists(st.integers(2, 90), min_size=1, max_size=12), seed=st.integers(0, 2**32))
def test_labels_are_the_spans_at_every_split(split: tuple[int, int], lengths: list[int], seed: int) -> None:
    spans, inside = spans_of(lengths, seed)
    # A corpus without labels can't be planned.
    assume(any(at > 0 for _, at in inside))
    changes = {"seed": seed, "context_tokens": 2 * PAD, "pad_multiple": PAD, "rows_per_step": 2}
    store, plan, reader = memory_reader(lengths, spans, **changes)
    found = []
    for row in range(plan.num_rows):
        slices = [reader.read("train", row, rank, *split) for rank in range(split[0])]
        labels = [int(label) for one in slices for label in one.labels if label != IGNORE_INDEX]
        assert len(labels) == plan.stats(range(row, row + 1)).supervised[0]
        for one in slices:
            ids = one.input_ids[one.labels != IGNORE_INDEX]
            assert np.array_equal(ids + 1, one.labels[one.labels != IGNORE_INDEX]), "a label is the next token"
        found += labels
    assert sorted(found) == sorted(store.token(document, at) for document, at in inside if at > 0)


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


def weights_of(corpus: Corpus, document: int) -> list[float] | None:
    found = corpus.label_weights(document, 0, int(corpus.lengths[document]))
    return None if found is None else found.tolist()


def test_documents_have_the_weight_of_their_row_or_1(tmp_path: Path) -> None:
    rows = [{"text": "ab", "w": 2.5}, {"text": "abc"}, {"text": "d", "w": None}, {"text": "efg", "w": 3}]
    corpus = prepare_rows(tmp_path, rows, text_field="text", weight_field="w")
    assert corpus.has_weights
    assert [weights_of(corpus, n) for n in range(4)] == [[2.5] * 3, [1.0] * 4, [1.0] * 2, [3.0] * 4]
    assert corpus.label_weights(3, 2, 3) == [3.0]  # type: ignore[comparison-overlap]
    assert corpus.info.spans is not None and corpus.info.spans.weights == (1.0, 3.0)
    check_content(corpus)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_tokens_may_have_their_own_weights_and_weight_0_removes_a_label(tmp_path: Path, form: str) -> None:
    rows = [
        {"ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4], "w": [1.0, 0.5, 0.0, 2.0]},
        {"ids": [5, 6], "labels": [5, 6], "w": [1.0, 1.0]},
        {"ids": [7, 8], "labels": [7, 8], "w": [4.0, 4.0]},
    ]
    fields = {"tokens_field": "ids", "labels_field": "labels", "weight_field": "w"}
    corpus = prepare_rows(tmp_path, rows, form=form, **fields)
    # The end token has the weight of the last token.
    assert weights_of(corpus, 0) == [0.0, 0.5, 0.0, 2.0, 2.0]
    assert (weights_of(corpus, 1), weights_of(corpus, 2)) == ([1.0] * 3, [4.0] * 3)
    assert corpus.info.spans is not None and corpus.info.spans.num_supervised == 3 + 3 + 3


def test_rows_with_invalid_weights_are_left_out_with_the_reason(tmp_path: Path) -> None:
    values = [-1, float("nan"), float("inf"), "2", True, 0, 1e7, [1.0], 0.5]
    rows = [{"text": f"text {number}", "w": value} for number, value in enumerate(values)]
    corpus = prepare_rows(tmp_path / "texts", rows, text_field="text", weight_field="w")
    assert corpus.num_documents == 1 and weights_of(corpus, 0) == [0.5] * 7
    reasons = dict(reasons_of(corpus))
    assert sorted(reasons) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "nan" in reasons[2] and "type bool" in reasons[5] and "10000000.0" in reasons[7]
    # Nothing predicts the first token, so a row with the weights 3 and 0 has no label.
    lists = [[1.0], [1.0, "x"], [1.0, -2.0], [3.0, 0.0], [1.0, 3.0]]
    rows = [{"ids": [number, 4], "w": weights} for number, weights in enumerate(lists)]
    corpus = prepare_rows(tmp_path / "tokens", rows, tokens_field="ids", weight_field="w")
    assert [row for row, _ in reasons_of(corpus)] == [1, 2, 3, 4]
    assert weights_of(corpus, 0) == [1.0, 3.0, 3.0]


def test_weights_of_1_give_the_same_corpus_as_no_weights(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("one", "two", "three")]
    plain = prepare_rows(tmp_path / "plain", rows, text_field="text")
    one, two, three = (
        prepare_rows(tmp_path / str(n), [{**row, "w": n} for row in rows], text_field="text", weight_field="w")
        for n in (1, 2, 3)
    )
    assert one.fingerprint == plain.fingerprint
    assert len({plain.fingerprint, two.fingerprint, three.fingerprint}) == 3
    assert one.info.spans is None and not one.has_weights and one.label_weights(0, 0, 2) is None


def test_weights_are_found_over_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_groups, "GROUP_ROWS", 3)
    rows = [{"ids": list(range(n, n + 8)), "w": [float(1 + (n + place) % 5) for place in range(8)]} for n in range(6)]
    corpus = prepare_rows(tmp_path, rows, tokens_field="ids", weight_field="w")
    # The end token follows.
    for number, row in enumerate(rows):
        assert weights_of(corpus, number) == [*row["w"], row["w"][-1]]


def test_a_forged_weight_is_noticed(tmp_path: Path) -> None:
    corpus = prepare_rows(tmp_path, [{"text": "hij", "w": 2}], text_field="text", weight_field="w")
    path = corpus.path / "spans.parquet"
    table = pq.read_table(path)
    forged = table.set_column(3, table.schema.field(3), pa.array(table.column("weight").to_numpy() + 1))
    with pq.ParquetFile(path) as file:
        notes = file.metadata.metadata
    pq.write_table(forged.replace_schema_metadata(notes), path)
    spans = replace(corpus.info.spans, num_bytes=path.stat().st_size)  # type: ignore[type-var]
    (corpus.path / "corpus.json").write_text(json.dumps(replace(corpus.info, spans=spans).to_json()))
    with pytest.raises(UserError, match=r"the spans do not match corpus\.json"):
        _ = Corpus.open(corpus.path).spans
    with pytest.raises(UserError, match="row group 0 has changed"):
        weights_of(Corpus.open(corpus.path), 0)


def pieces_of(lengths: list[int]) -> list[Piece]:
    return [
        Piece(document=number, start=number, length=length, has_next_label=number % 3 == 0)
        for number, length in enumerate(lengths)
    ]


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), layout=st.sampled_from([(1, 1), (2, 1), (4, 2)]))
def test_each_label_has_its_weight_at_every_layout(lengths: list[int], layout: tuple[int, int]) -> None:
    store = MemoryStore([length + 20 for length in lengths], has_weights=True)
    row_tokens = -(-sum(lengths) // 16) * 16
    sp_size, ring_size = layout
    whole = slice_row(store, 3, row_tokens, pieces_of(lengths), 0, 1)
    assert whole.label_weights is not None
    for label, weight in zip(whole.labels.tolist(), whole.label_weights.tolist(), strict=True):
        document, at = divmod(label, 100_000)
        is_weighted = label != IGNORE_INDEX and document % 2
        assert weight == (document + at if is_weighted else 1.0)
    slices = [slice_row(store, 3, row_tokens, pieces_of(lengths), n, sp_size, ring_size) for n in range(sp_size)]
    for part in slices:
        expected = np.concatenate([whole.label_weights[start:stop] for start, stop in part.ranges])
        assert part.label_weights is not None and np.array_equal(part.label_weights, expected)
    assert add_digests(*map(slice_checksum, slices)) == slice_checksum(whole)
    assert sum(part.supervised_weight for part in slices) == pytest.approx(whole.supervised_weight)


def test_weights_change_the_digest_except_weights_of_1() -> None:
    weighted, plain = (
        slice_row(MemoryStore([40, 40], has_weights=has_weights), 3, 48, pieces_of([20, 21]), 0, 1)
        for has_weights in (True, False)
    )
    assert weighted.label_weights is not None and plain.label_weights is None
    ones = replace(plain, label_weights=np.ones(48, dtype=np.float32))
    moved = replace(weighted, label_weights=np.roll(weighted.label_weights, 1))
    assert slice_checksum(ones) == slice_checksum(plain)
    assert len({slice_checksum(one) for one in (weighted, plain, moved)}) == 3


def test_all_slices_of_a_run_have_weights_if_one_of_its_corpora_has(tmp_path: Path) -> None:
    plain = prepare_rows(tmp_path / "plain", [{"text": "abcdefg"}], text_field="text")
    weighted = prepare_rows(tmp_path / "weighted", [{"text": "hij", "w": 2}], text_field="text", weight_field="w")
    both = open_sources([(str(plain.path), None), (str(weighted.path), None)])
    alone = open_sources([(str(plain.path), None)])
    assert both.has_weights and not alone.has_weights
    # The plan records the weights, so no corpus is opened.
    assert CorpusSet(both.sources).has_weights
    of_plain = [Piece(document=0, start=0, length=8, has_next_label=False)]
    assert slice_row(both, 0, 8, of_plain, 0, 1).label_weights.tolist() == [1.0] * 8  # type: ignore[union-attr]
    assert slice_row(alone, 0, 8, of_plain, 0, 1).label_weights is None
    of_weighted = [Piece(document=1, start=0, length=4, has_next_label=False)]
    assert slice_row(both, 0, 4, of_weighted, 0, 1).label_weights.tolist() == [2.0] * 3 + [1.0]  # type: ignore[union-attr]
