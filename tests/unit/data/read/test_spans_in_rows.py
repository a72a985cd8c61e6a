"""Labels of corpora with label spans: never outside a span, never across a border, whatever the split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.read.reader import IGNORE_INDEX, RowReader
from ray_ulysses.data.tokenize.spans import LabelSpans
from tests.breadth import examples
from tests.unit.data.corpora import MemoryStore
from tests.unit.data.plans import build_plan

PAD = 24
SPLITS = [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (12, 1), (4, 2), (6, 3), (12, 4)]


def spans_of(lengths: list[int], seed: int) -> tuple[LabelSpans, set[tuple[int, int]]]:
    """Random spans, and the tokens (document, place) that lie in one."""
    rng = np.random.default_rng(seed)
    offsets, starts, stops, inside = [0], [], [], set()
    for document, size in enumerate(lengths):
        cuts = np.unique(rng.integers(0, size + 1, 2 * int(rng.integers(1, 5))))
        for start, stop in zip(cuts[0::2], cuts[1::2], strict=False):
            starts.append(int(start))
            stops.append(int(stop))
            inside |= {(document, at) for at in range(int(start), int(stop))}
        offsets.append(len(starts))
    arrays = {"offsets": offsets, "starts": starts, "stops": stops}
    return LabelSpans(**{name: np.asarray(values, dtype=np.int64) for name, values in arrays.items()}), inside


@pytest.mark.parametrize(("sp_size", "ring_size"), SPLITS)
@settings(max_examples=examples(15))
@given(lengths=st.lists(st.integers(2, 90), min_size=1, max_size=12), seed=st.integers(0, 2**32))
def test_labels_are_the_spans_at_every_split(sp_size: int, ring_size: int, lengths: list[int], seed: int) -> None:
    spans, inside = spans_of(lengths, seed)
    # A corpus without a label has no plan.
    assume(any(at > 0 for _, at in inside))
    store = MemoryStore(lengths, spans)
    plan_settings = PlanSettings(seed=seed, context_tokens=2 * PAD, pad_multiple=PAD, rows_per_step=2)
    plan = build_plan(store.lengths, store.fingerprint, plan_settings, spans)
    reader = RowReader(store, plan)
    found = []
    for row in range(plan.num_rows):
        slices = [reader.read("train", row, rank, sp_size, ring_size) for rank in range(sp_size)]
        labels = [int(label) for one in slices for label in one.labels if label != IGNORE_INDEX]
        assert len(labels) == plan.stats(range(row, row + 1)).supervised[0]
        for one in slices:
            ids = one.input_ids[one.labels != IGNORE_INDEX]
            assert np.array_equal(ids + 1, one.labels[one.labels != IGNORE_INDEX]), "a label is the next token"
        found += labels
    expected = [store.token(document, at) for document, at in inside if at > 0]
    assert sorted(found) == sorted(expected)
