from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
from ray_ulysses.data.plan.segment import PlanSettings, Segment
from ray_ulysses.errors import UserError
from tests.breadth import examples
from tests.unit.data.plans import segment_in_memory

SETTINGS = PlanSettings(seed=3, context_tokens=64, pad_multiple=8, rows_per_step=4)


def sources_of(sizes: list[int], weights: list[float | None]) -> tuple[PlannedSource, ...]:
    return tuple(
        PlannedSource(path=f"corpus-{number}", fingerprint=f"f{number}", num_documents=size, weight=weight)
        for number, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    )


def segment_of(lengths: list[list[int]], weights: list[float | None], change: PlanSettings = SETTINGS) -> Segment:
    sources = sources_of([len(one) for one in lengths], weights)
    joined = np.concatenate([np.asarray(one, dtype=np.int64) for one in lengths])
    return segment_in_memory(PlanInput(sources=sources, lengths=joined), change)


def documents_by_epoch(segment: Segment) -> list[Counter[int]]:
    found = []
    for info in segment.epochs:
        rows = range(info.first_row, info.first_row + info.num_rows)
        pieces = [piece for row in rows for piece in segment.train.pieces(row)]
        found.append(Counter(piece.document for piece in pieces if piece.start == 0))
    return found


@pytest.mark.parametrize(("weights", "shares"), [([3, 1], 0.75), ([0.5, 0.5], 0.5), ([1, 9], 0.1)])
def test_an_epoch_holds_tokens_by_weight_and_the_scarcest_source_whole(weights: list[float], shares: float) -> None:
    segment = segment_of([[20] * 1000, [20] * 1000], weights)
    documents = documents_by_epoch(segment)[0]
    counts = [sum(document < 1000 for document in documents), sum(document >= 1000 for document in documents)]
    assert max(counts) == 1000, "the source that is scarcest for its weight is taken whole"
    assert counts[0] / sum(counts) == pytest.approx(shares, abs=0.002)
    assert set(documents.values()) == {1}


def test_a_source_goes_on_where_it_stopped() -> None:
    """A third of the second source an epoch: three epochs take each of its documents once."""
    segment = segment_of([[20] * 100, [20] * 300], [1.0, 1.0], replace(SETTINGS, epochs=3))
    second = sum(documents_by_epoch(segment), Counter())
    assert {count for document, count in second.items() if document >= 100} == {1}
    assert sum(document >= 100 for document in second) == 300
    assert {count for document, count in second.items() if document < 100} == {3}


@settings(max_examples=examples(60))
@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=4),
    weights=st.lists(st.floats(0.05, 5.0), min_size=4, max_size=4),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_no_document_is_taken_twice_before_every_other_of_its_source_once(
    sizes: list[int], weights: list[float], epochs: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(2, 150, size).tolist() for size in sizes]
    change = replace(SETTINGS, epochs=epochs, seed=seed)
    by_epoch = documents_by_epoch(segment_of(lengths, list(weights[: len(sizes)]), change))
    bases = np.cumsum([0, *sizes])
    total: Counter[int] = Counter()
    for documents in by_epoch:
        assert set(documents.values()) <= {1}, "twice in one epoch"
        total += documents
        for first, last in itertools.pairwise(bases):
            counts = [total[document] for document in range(first, last)]
            assert max(counts) - min(counts) <= 1


def test_a_weighted_source_without_a_document_to_train_on_is_refused() -> None:
    with pytest.raises(UserError, match=r"corpus-1 has weight 1.0, but no tokens left for epoch 0"):
        segment_of([[20] * 5, [1] * 5], [1.0, 1.0])
