"""Labels of corpora with label spans: at every split, they are inside a span and never cross a document border."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ray_ulysses.data.read.reader import IGNORE_INDEX
from ray_ulysses.data.tokenize.spans import LabelSpans
from tests.breadth import examples
from tests.unit.data.plans import memory_reader
from tests.unit.data.read.test_reader import PAD


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
