from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ray_ulysses.data.tokenize.spans import LabelSpans, mask_spans, span_mask
from tests.unit.data.corpora import mask_of


def spans_of(documents: list[list[tuple[int, int]]]) -> LabelSpans:
    flat = np.array([span for spans in documents for span in spans], dtype=np.int64).reshape(-1, 2)
    offsets = np.cumsum([0, *(len(spans) for spans in documents)], dtype=np.int64)
    return LabelSpans(offsets=offsets, starts=flat[:, 0], stops=flat[:, 1])


@st.composite
def documents(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Draw documents with valid spans, including none, adjacent spans, and a span at the start."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        spans, at = [], 0
        for gap, size in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6)):
            spans.append((at + gap, at + gap + size))
            at += gap + size
        found.append(spans)
    return found


RANGES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=20)


@given(documents(), RANGES)
@example([[(3, 5)], [(0, 2), (2, 4)]], [(0, 2, 3), (0, 2, 4), (0, 3, 5), (0, 4, 9), (0, 5, 9), (1, 0, 1_000)])
@example([[], []], [(0, 0, 5)])
def test_counts_and_masks_equal_a_loop_over_tokens(
    spans: list[list[tuple[int, int]]], ranges: list[tuple[int, int, int]]
) -> None:
    label_spans = spans_of(spans)
    ranges = [(document % len(spans), first, last) for document, first, last in ranges]
    expected = []
    for document, first, last in ranges:
        tokens = [any(start <= token < stop for start, stop in spans[document]) for token in range(first, last)]
        assert mask_of(label_spans, document, first, last).tolist() == tokens
        expected.append(sum(tokens))
    found = label_spans.count(*(np.array(column, dtype=np.int64) for column in zip(*ranges, strict=True)))
    assert found.dtype == np.int64 and found.tolist() == expected
    every = label_spans.count(np.arange(len(spans)), np.int64(1), np.int64(5))
    assert every.tolist() == [mask_of(label_spans, document, 1, 5).sum() for document in range(len(spans))]


@pytest.mark.parametrize("spans", [[(2, 2)], [(-1, 2)], [(0, 3), (2, 4)], [(5, 6), (0, 2)]])
def test_inconsistent_spans_and_offsets_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="span"):
        spans_of([spans])
    one = np.array([0], dtype=np.int64)
    for offsets in ([0, 2], [0, 2, 1]):
        with pytest.raises(ValueError, match="offsets must"):
            LabelSpans(offsets=np.array(offsets), starts=one, stops=one + 1)


@given(st.lists(st.booleans(), max_size=30))
def test_a_mask_and_its_spans_are_the_same(mask: list[bool]) -> None:
    starts, stops = mask_spans(np.array(mask, dtype=np.bool_))
    assert span_mask(starts, stops, 0, len(mask)).tolist() == mask
    assert (starts[1:] > stops[:-1]).all()
