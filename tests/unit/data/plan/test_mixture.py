from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.errors import UserError
from tests.unit.data.plan.test_branches import Corpora, begin

SETTINGS = PlanSettings(seed=3, context_tokens=64, pad_multiple=8, rows_per_step=4)


def documents_by_epoch(plan: Plan) -> list[Counter[int]]:
    epochs = [range(info.first_row, info.first_row + info.num_rows) for info in plan.newest.epochs]
    return [Counter(one.document for row in rows for one in plan.pieces(row) if one.start == 0) for rows in epochs]


@pytest.mark.parametrize(("weights", "shares"), [([3, 1], 0.75), ([0.5, 0.5], 0.5), ([1, 9], 0.1)])
def test_an_epoch_takes_tokens_by_weight_and_the_scarcest_source_completely(
    weights: list[float], shares: float
) -> None:
    plan = begin(Corpora(((20,) * 1000, (20,) * 1000), tuple(weights)), SETTINGS)
    documents = documents_by_epoch(plan)[0]
    counts = [sum(document < 1000 for document in documents), sum(document >= 1000 for document in documents)]
    assert max(counts) == 1000, "the source that is smallest relative to its weight"
    assert counts[0] / sum(counts) == pytest.approx(shares, abs=0.002)
    assert set(documents.values()) == {1}


def test_a_source_goes_on_where_it_stopped() -> None:
    """An epoch takes a third of the second source, so three epochs take each of its documents once."""
    plan = begin(Corpora(((20,) * 100, (20,) * 300), (1.0, 1.0)), replace(SETTINGS, epochs=3))
    second = sum(documents_by_epoch(plan), Counter())
    assert {count for document, count in second.items() if document >= 100} == {1}
    assert sum(document >= 100 for document in second) == 300
    assert {count for document, count in second.items() if document < 100} == {3}


def test_a_weighted_source_without_a_document_to_train_on_is_refused() -> None:
    with pytest.raises(UserError, match=r"c1 has weight 1.0, but no tokens left for epoch 0"):
        begin(Corpora(((20,) * 5, (1,) * 5), (1.0, 1.0)), SETTINGS)
