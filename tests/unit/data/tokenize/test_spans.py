from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.data.tokenize.spans import LabelSpans, mask_spans, span_mask
from tests.unit.data.corpora import mask_of


def spans_of(documents: list[list[tuple[int, int]]]) -> LabelSpans:
    flat = np.array([span for spans in documents for span in spans], dtype=np.int64).reshape(-1, 2)
    offsets = np.cumsum([0, *(len(spans) for spans in documents)], dtype=np.int64)
    return LabelSpans(offsets=offsets, starts=flat[:, 0], stops=flat[:, 1])


@st.composite
def documents(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Documents of any spans that keep the rules: none, touching ones, one at the very start."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        spans, at = [], 0
        for gap, size in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6)):
            spans.append((at + gap, at + gap + size))
            at += gap + size
        found.append(spans)
    return found


@given(documents(), st.data())
def test_counts_and_masks_are_those_of_a_loop_over_tokens(
    spans: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    label_spans = spans_of(spans)
    assert label_spans.offsets.size - 1 == len(spans)
    supervised = (label_spans.stops - label_spans.starts).sum()
    assert supervised == sum(stop - start for one in spans for start, stop in one)
    token_range = st.tuples(st.integers(0, len(spans) - 1), st.integers(0, 50), st.integers(0, 50))
    asked = data.draw(st.lists(token_range, min_size=1, max_size=20))
    expected = []
    for document, first, last in asked:
        tokens = [any(start <= token < stop for start, stop in spans[document]) for token in range(first, last)]
        assert mask_of(label_spans, document, first, last).tolist() == tokens
        expected.append(sum(tokens))
    found = label_spans.count(*(np.array(column, dtype=np.int64) for column in zip(*asked, strict=True)))
    assert found.dtype == np.int64 and found.tolist() == expected


def test_the_borders_of_a_span_are_half_open() -> None:
    spans = spans_of([[(3, 5)], [(0, 2), (2, 4)]])
    ones = np.zeros(5, dtype=np.int64)
    assert spans.count(ones, np.array([2, 2, 3, 4, 5]), np.array([3, 4, 5, 9, 9])).tolist() == [0, 1, 2, 1, 0]
    assert mask_of(spans, 0, 2, 6).tolist() == [False, True, True, False]
    assert spans.count(np.array([1]), np.array([0]), np.array([1_000_000])).tolist() == [4]


def test_one_number_stands_for_every_document() -> None:
    spans = spans_of([[(0, 9)], [], [(4, 6)]])
    assert spans.count(np.arange(3), np.int64(1), np.int64(5)).tolist() == [4, 0, 1]


def test_no_span_at_all_counts_nothing() -> None:
    spans = spans_of([[], []])
    assert spans.count(np.array([0, 1]), np.array([0, 0]), np.array([5, 5])).tolist() == [0, 0]
    assert not mask_of(spans, 1, 0, 4).any()


@pytest.mark.parametrize(
    ("documents", "rule"),
    [
        ([[(2, 2)]], "at least one token"),
        ([[(-1, 2)]], "must begin at 0 or later"),
        ([[(0, 3), (2, 4)]], "in order and must not overlap"),
        ([[(5, 6), (0, 2)]], "in order and must not overlap"),
    ],
)
def test_what_is_no_list_of_spans_is_refused(documents: list[list[tuple[int, int]]], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        spans_of(documents)


def test_offsets_must_fit_the_spans() -> None:
    one = np.array([0], dtype=np.int64)
    with pytest.raises(ValueError, match=r"offsets must go from 0 to the number of spans, 1"):
        LabelSpans(offsets=np.array([0, 2]), starts=one, stops=one + 1)
    with pytest.raises(ValueError, match=r"offsets must not fall"):
        LabelSpans(offsets=np.array([0, 2, 1]), starts=one, stops=one + 1)


@given(st.lists(st.booleans(), max_size=30))
def test_a_mask_and_its_spans_are_the_same(mask: list[bool]) -> None:
    starts, stops = mask_spans(np.array(mask, dtype=np.bool_))
    assert span_mask(starts, stops, 0, len(mask)).tolist() == mask
    assert (starts[1:] > stops[:-1]).all()
