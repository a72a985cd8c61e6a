"""Masks of documents follow from the seed, the epoch, the document and the position, and have the published shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.data.read.blocks import Slot, pack, unpack
from ray_ulysses.data.read.digest import add_digests, slice_checksum
from ray_ulysses.data.read.masking import LONGEST_UNIT, Masking, masking_with, word_starts
from ray_ulysses.data.read.reader import IGNORE_INDEX, RowReader
from ray_ulysses.data.tokenize.tokenizers import ByteTokenizer
from ray_ulysses.errors import UserError
from tests.breadth import examples, fast_only
from tests.unit.data.plans import memory_reader
from tests.unit.data.read.test_reader import PAD, whole_row

MASK, VOCAB = 3, 1000
SPECIAL = frozenset([0, 1, 2, MASK, 777])
MASKING = Masking(seed=5, mask_id=MASK, vocab_size=VOCAB, special_ids=SPECIAL)
UNITS = ("token", "word", "span")
SPLITS = [(2, 1), (3, 1), (8, 1), (2, 2), (4, 2), (6, 3)]


def text(size: int, seed: int = 0) -> NDArray[np.int64]:
    """Return tokens without special ids."""
    return np.random.default_rng(seed).integers(10, 700, size)


def words(starts: float, seed: int = 1) -> NDArray[np.bool_]:
    return np.random.default_rng(seed).random(VOCAB) < starts


def of_unit(unit: Any, **changes: Any) -> Masking:
    return replace(MASKING, unit=unit, word_starts=words(0.4) if unit == "word" else None, **changes)


def masked(masking: Masking, tokens: NDArray[Any], **place: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the input ids, and the labels as the model gets them."""
    ids, is_predicted = masking.apply(tokens, **place)
    return ids, np.where(is_predicted, tokens.astype(np.int64), IGNORE_INDEX)


def is_near(count: int, total: int, share: float) -> bool:
    """Return whether a count is within five standard deviations of a binomial distribution."""
    return bool(abs(count - share * total) < 5 * (total * share * (1 - share)) ** 0.5)


@pytest.mark.parametrize("fraction", [0.15, 0.4])
def test_shares_are_those_of_bert(fraction: float) -> None:
    tokens = text(200_000)
    ids, labels = masked(replace(MASKING, fraction=fraction), tokens, document=9)
    chosen = labels != IGNORE_INDEX
    num = int(chosen.sum())
    assert is_near(num, tokens.size, fraction)
    assert np.array_equal(labels[chosen], tokens[chosen]) and np.array_equal(ids[~chosen], tokens[~chosen])
    kept, replaced = (ids == tokens) & chosen, ids == MASK
    drawn = ids[chosen & ~kept & ~replaced]
    # A random token may be the token itself.
    assert is_near(int(replaced.sum()), num, 0.8) and is_near(int(kept.sum()), num, 0.1 + 0.1 / VOCAB)
    assert not np.isin(drawn, [*SPECIAL]).any() and drawn.max() < VOCAB
    # 995 tokens may be drawn, and 3,000 draws miss about one in 20 of them.
    assert {4, 5, 776, 778, 999} & {*drawn.tolist()} and len({*drawn.tolist()}) > 900 * (num > 25_000)


@pytest.mark.parametrize("unit", UNITS)
def test_all_predicted_tokens_are_masked_on_request_and_special_ones_never(unit: str) -> None:
    tokens = text(5_000)
    tokens[::7] = 1
    ids, labels = masked(of_unit(unit, replace="mask"), tokens, document=2)
    chosen = labels != IGNORE_INDEX
    assert chosen.any() and (ids[chosen] == MASK).all() and not chosen[::7].any()
    assert np.array_equal(ids[~chosen], tokens[~chosen])


@pytest.mark.parametrize("unit", UNITS)
def test_each_draw_depends_on_seed_epoch_document_and_position(unit: str) -> None:
    masking, tokens = of_unit(unit), text(2_000)
    found = {
        "same": masked(masking, tokens, document=2),
        "again": masked(masking, tokens.astype(np.uint16), document=2),
        "seed": masked(replace(masking, seed=6), tokens, document=2),
        "epoch": masked(masking, tokens, document=2, epoch=1),
        "document": masked(masking, tokens, document=3),
        "position": masked(masking, tokens, document=2, first=1),
    }
    ids = {name: tuple(pair[0].tolist()) for name, pair in found.items()}
    assert ids["same"] == ids["again"] and len({*ids.values()}) == 5


@pytest.mark.parametrize("unit", ["token", "span"])
def test_a_piece_has_the_mask_of_its_part_of_the_document(unit: str) -> None:
    # Spans that begin before the piece extend into it.
    masking, tokens = of_unit(unit), text(3_000)
    whole, piece = masked(masking, tokens, document=4), masked(masking, tokens[1_000:2_000], document=4, first=1_000)
    for all_values, values in zip(whole, piece, strict=True):
        assert np.array_equal(all_values[1_000:2_000], values)


def test_words_are_masked_completely() -> None:
    masking, tokens = of_unit("word"), text(100_000)
    _, labels = masked(masking, tokens, document=1)
    chosen = labels != IGNORE_INDEX
    assert masking.word_starts is not None
    inside = ~masking.word_starts[tokens]
    inside[0] = False
    # A word of at most 10 tokens is not divided; these have 2.5 on average.
    lengths = np.diff(np.flatnonzero(~inside))
    assert lengths.max() > LONGEST_UNIT
    is_short = np.repeat(lengths <= LONGEST_UNIT, lengths)
    within = inside[: is_short.size] & is_short
    places = np.flatnonzero(within)
    assert np.array_equal(chosen[places], chosen[places - 1]) and places.size > 10_000
    # The tokens of a word share one draw.
    assert abs(chosen.mean() - 0.15) < 5 * (0.15 * 0.85 * 4 / tokens.size) ** 0.5


def test_a_long_word_is_divided() -> None:
    masking = replace(of_unit("word"), word_starts=np.zeros(VOCAB, dtype=np.bool_))
    _, labels = masked(masking, text(100_000), document=1)
    chosen = (labels != IGNORE_INDEX).reshape(-1, LONGEST_UNIT)
    assert (chosen.all(axis=1) == chosen.any(axis=1)).all()
    assert is_near(int(chosen[:, 0].sum()), len(chosen), 0.15)


def test_a_word_does_not_continue_behind_a_special_token() -> None:
    masking = replace(of_unit("word"), word_starts=np.zeros(VOCAB, dtype=np.bool_))
    pairs = [masked(masking, np.array([10, 11, 1, 12, 13]), document=number)[1] for number in range(200)]
    patterns = {tuple((labels != IGNORE_INDEX).tolist()) for labels in pairs}
    assert patterns == {(True, True, False, False, False), (False,) * 3 + (True,) * 2, (True, True, False, True, True)}


def test_spans_have_the_lengths_of_spanbert() -> None:
    size = 400_000
    ids, labels = masked(of_unit("span"), text(size), document=1)
    chosen = labels != IGNORE_INDEX
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype(np.int8)))
    lengths = edges[1::2] - edges[::2]
    # Neighbouring spans merge, so runs are longer than the mean span of 3.8 tokens.
    assert 3.8 < lengths.mean() < 4.8 and (lengths <= LONGEST_UNIT).mean() > 0.9
    assert abs(chosen.mean() - 0.15) < 0.004
    # A run is masked, replaced or kept as a whole, unless it has several spans.
    is_mask = (ids == MASK)[chosen]
    own = np.repeat(np.arange(lengths.size), lengths)
    shares = np.bincount(own, is_mask) / lengths
    assert np.isin(shares, [0, 1]).mean() > 0.9 and abs(is_mask.mean() - 0.8) < 0.01


def test_the_edges_of_documents_are_masked_as_often_as_the_middle() -> None:
    tokens, counts = text(40), np.zeros(40)
    for document in range(2_000):
        counts += masked(of_unit("span"), tokens, document=document)[1] != IGNORE_INDEX
    assert all(is_near(int(counts[place]), 2_000, 0.15) for place in (0, 1, 5, 20, 39))


def test_spans_of_words_begin_and_end_with_words() -> None:
    starts = words(0.4)
    tokens = text(20_000)
    _, labels = masked(replace(of_unit("span"), word_starts=starts), tokens, document=1)
    chosen = labels != IGNORE_INDEX
    changes = 1 + np.flatnonzero(np.diff(chosen.astype(np.int8)))
    assert starts[tokens[changes]].mean() > 0.95  # the others divide a word of more than ten tokens


@pytest.mark.parametrize("unit", UNITS)
@given(size=st.integers(1, 12), document=st.integers(0, 2**64 - 1), seed=st.integers(0, 99))
def test_a_document_predicts_a_token_if_it_can(unit: str, size: int, document: int, seed: int) -> None:
    tokens = text(size, seed)
    tokens[seed % size] = 2
    _, labels = masked(of_unit(unit), tokens, document=document)
    assert (labels != IGNORE_INDEX).any() == (size > 1)
    _, none = masked(of_unit(unit), tokens, document=document, may_predict=np.zeros(size, dtype=np.bool_))
    assert (none == IGNORE_INDEX).all()


def masked_reader(lengths: list[int], **changes: Any) -> tuple[Plan, RowReader, RowReader]:
    """Return a plan, and a reader with masks and one without."""
    store, plan, plain = memory_reader(lengths, **changes)
    masking = replace(MASKING, vocab_size=1 << 30, fraction=0.3, unit="span", special_ids=frozenset([MASK]))
    return plan, RowReader(store, plan, masking), plain


@pytest.mark.parametrize("split", fast_only(SPLITS, (2, 1), (4, 2)), ids=lambda split: f"sp{split[0]}-ring{split[1]}")
@settings(max_examples=examples(10))
@given(lengths=st.lists(st.integers(2, 150), min_size=1, max_size=20), seed=st.integers(0, 99))
def test_a_row_has_the_same_masks_at_every_layout(split: tuple[int, int], lengths: list[int], seed: int) -> None:
    plan, reader, plain = masked_reader(lengths, context_tokens=2 * PAD, pad_multiple=PAD, seed=seed)
    for row in range(plan.num_rows):
        alone, bare = reader.read("train", row, 0, 1), plain.read("train", row, 0, 1)
        slices = [reader.read("train", row, rank, *split) for rank in range(split[0])]
        for name in ("input_ids", "labels", "position_ids"):
            assert whole_row(slices, name) == getattr(alone, name).tolist()
        assert add_digests(*map(slice_checksum, slices)) == slice_checksum(alone) != slice_checksum(bare)
        chosen = alone.labels != IGNORE_INDEX
        assert np.array_equal(alone.labels[chosen], bare.input_ids[chosen])
        assert np.array_equal(alone.input_ids[~chosen], bare.input_ids[~chosen])
        # The same from tokens that were streamed.
        for rank, one in enumerate(slices):
            ranges = np.array(reader.ranges(row, rank, *split), dtype=np.int64).reshape(-1, 3)
            (received,) = unpack(pack(plain._store, [Slot(row=row, ranges=ranges)]))
            streamed = reader.slice_of(received, "train", row, rank, *split)
            assert not received.num_left and slice_checksum(streamed) == slice_checksum(one)


def test_a_document_has_the_same_mask_in_every_packing_and_another_in_each_epoch() -> None:
    lengths = [5 + 3 * (number % 7) for number in range(60)]
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for changes in ({}, {"context_tokens": 48}, {"seed": 4}, {"rows_per_step": 3}):
        plan, reader, _ = masked_reader(lengths, epochs=2, **changes)
        for row in range(plan.num_rows):
            ids, place = reader.read("train", row, 0, 1).input_ids.tolist(), 0
            for piece in plan.pieces(row):
                mask = tuple(ids[place : place + piece.length])
                found.setdefault((piece.document, plan.epoch_of(row)), set()).add(mask)
                place += piece.length
    assert {epoch for _, epoch in found} == {0, 1} and all(len(masks) == 1 for masks in found.values())
    assert sum(found[document, 0] != found[document, 1] for document in range(60)) > 40


def test_a_document_that_is_split_has_the_same_mask_wherever_it_is_split() -> None:
    found: set[tuple[int, ...]] = set()
    for context_tokens in (24, 48, 120):
        store, plan, _ = memory_reader([240], context_tokens=context_tokens, pad_multiple=8)
        reader, labels = RowReader(store, plan, replace(MASKING, vocab_size=1 << 30, fraction=0.4)), [0] * 240
        for row in range(plan.num_rows):
            one, place = reader.read("train", row, 0, 1), 0
            for piece in plan.pieces(row):
                labels[piece.start : piece.start + piece.length] = one.labels[place : place + piece.length].tolist()
                place += piece.length
        found.add(tuple(labels))
    assert len(found) == 1 and 0 not in found.pop()[1:]


def test_the_number_of_a_document_in_its_corpus_decides_its_mask() -> None:
    plan, reader, _ = masked_reader([20] * 8)
    masks = {reader.read("train", row, 0, 1).labels.tobytes() for row in range(plan.num_rows)}
    assert len(masks) == plan.num_rows
    other = replace(plan.newest.sources[0], fingerprint="another", num_documents=5)
    first = replace(plan.newest, sources=(other, *plan.newest.sources))
    shifted = RowReader(reader._store, Plan(segments=(first,)), reader._masking)
    tokens, piece = text(20), Piece(document=2, start=0, length=20, has_next_label=False)
    assert reader._masking is not None
    before = reader._masked(reader._masking, 0, piece, tokens, None)[0]
    assert shifted._masked(reader._masking, 0, replace(piece, document=7), tokens, None)[0].tolist() == before.tolist()
    assert shifted._masked(reader._masking, 0, piece, tokens, None)[0].tolist() != before.tolist()


def test_weights_of_labels_stay_with_their_tokens_and_weight_0_is_never_masked() -> None:
    plan, _, plain = masked_reader([20] * 4)
    store = plain._store
    store.has_weights = True  # type: ignore[misc]
    reader = RowReader(store, plan, replace(MASKING, vocab_size=1 << 30, fraction=0.5))
    for row in range(plan.num_rows):
        whole, bare = reader.read("train", row, 0, 1), plain.read("train", row, 0, 1)
        assert whole.label_weights is not None
        for place, label in enumerate(whole.labels.tolist()):
            document, at = divmod(label, 100_000)
            is_weighted = label != IGNORE_INDEX and document % 2
            assert whole.label_weights[place] == (document + at if is_weighted else 1.0)
            assert label in (IGNORE_INDEX, bare.input_ids[place])


@pytest.mark.parametrize(
    ("vocabulary", "starts"),
    [
        (["[CLS]", "un", "##able", "##s", "."], [True, True, False, False, True]),
        (["Ġthe", "re", "Ċ", "Ġ", "##"], [True, False, True, True, False]),
        (["▁the", "re", "\n", "▁", "Ġ"], [True, False, True, True, False]),
        (["A", "C", "GT", "[MASK]"], None),
    ],
)
def test_words_are_marked_as_their_algorithm_marks_them(vocabulary: list[str], starts: list[bool] | None) -> None:
    found = word_starts({token: number for number, token in enumerate(vocabulary)})
    assert (None if found is None else found.tolist()) == starts


def test_a_tokenizer_without_a_mask_token_is_refused() -> None:
    with pytest.raises(UserError, match="tokenizer=bytes: has no mask token"):
        masking_with(ByteTokenizer(), seed=1, fraction=0.15, unit="token", replace="bert")
