"""Position bins add up to the total, and the same targets are read with exactly the stated context."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.evaluation.held_out import HeldOut, held_out_documents
from ray_ulysses.evaluation.held_out_loss import (
    SPAN_TOKENS,
    choose_documents,
    choose_spans,
    context_gain,
    paired,
    position_loss,
)
from ray_ulysses.evaluation.scoring import Passage, PassageScores
from tests.local_preparation import prepare_local
from tests.unit.evaluation.documents import held_out


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> HeldOut:
    return held_out(tmp_path_factory.mktemp("held"))


def positions_as_losses(passages: Iterator[Passage]) -> Iterator[PassageScores]:
    for one in passages:
        losses = np.where(one.is_scored, np.arange(one.tokens.size, dtype=np.float64), 0.0)
        yield PassageScores(losses=losses, is_correct=one.is_scored)


def test_each_bin_has_the_tokens_of_its_positions_and_all_bins_the_total(held: HeldOut) -> None:
    found = position_loss(held, positions_as_losses, longest=1500, max_tokens=10**9, seed=0)
    assert found is not None
    assert found.documents == held.numbers.size
    lengths = np.minimum(held.lengths, 1500)
    assert found.tokens == sum(one.tokens for one in found.bins) == int((lengths - 1).sum())
    assert found.loss_sum == pytest.approx(sum(one.loss_sum for one in found.bins), rel=1e-14)
    assert found.loss_sum == float(sum(length * (length - 1) // 2 for length in lengths))
    for number, one in enumerate(found.bins):
        assert (one.first, one.last) == (2**number, 2 ** (number + 1) - 1)
        inside = [np.arange(1, length) for length in lengths]
        own = np.concatenate([each[(each >= one.first) & (each <= one.last)] for each in inside])
        assert (one.tokens, one.loss_sum) == (own.size, float(own.sum()))


@given(
    lengths=st.lists(st.integers(2, 900), min_size=1, max_size=30),
    longest=st.integers(2, 500),
    max_tokens=st.integers(1, 9000),
    seed=st.integers(0, 9),
)
def test_documents_are_drawn_until_the_tokens_suffice(
    lengths: list[int], longest: int, max_tokens: int, seed: int
) -> None:
    places = choose_documents(np.array(lengths), longest=longest, max_tokens=max_tokens, seed=seed)
    read = [min(lengths[place], longest) for place in places]
    assert len(set(places)) == len(places) > 0
    assert sum(read) >= max_tokens or len(places) == len(lengths)
    assert sum(read[:-1]) < max_tokens


@given(
    lengths=st.lists(st.integers(2, 4000), min_size=1, max_size=20),
    context=st.integers(1, 3000),
    num_spans=st.integers(1, 40),
    seed=st.integers(0, 9),
)
def test_spans_have_their_context_and_are_spread_over_documents(
    lengths: list[int], context: int, num_spans: int, seed: int
) -> None:
    spans = choose_spans(np.array(lengths), longest_context=context, num_spans=num_spans, seed=seed)
    room = [max(0, (length - context) // SPAN_TOKENS) for length in lengths]
    assert len(spans) == min(num_spans, sum(room))
    assert all(start >= context and start + SPAN_TOKENS <= lengths[place] for place, start in spans)
    by_document = {place: sorted(start for one, start in spans if one == place) for place, _ in spans}
    assert all(later - start >= SPAN_TOKENS for starts in by_document.values() for start, later in pairwise(starts))
    most = max((len(starts) for starts in by_document.values()), default=0)
    assert all(len(by_document.get(place, ())) >= min(most - 1, count) for place, count in enumerate(room))


def test_every_context_has_the_same_targets_after_exactly_its_tokens(held: HeldOut) -> None:
    rows: list[Passage] = []

    def score(passages: Iterator[Passage]) -> Iterator[PassageScores]:
        rows.extend(passages)
        # With a loss of 1 / (tokens before the span) per token, the gain is known.
        for row in rows:
            context = row.tokens.size - SPAN_TOKENS
            yield PassageScores(losses=row.is_scored / context, is_correct=row.is_scored)

    found = context_gain(held, score, contexts=(100, 400, 1600), num_spans=5, seed=1)
    assert found is not None and found.spans == 5
    for number in range(5):
        short, middle, long = rows[number], rows[5 + number], rows[10 + number]
        assert [row.tokens.size - SPAN_TOKENS for row in (short, middle, long)] == [100, 400, 1600]
        for row in (short, middle, long):
            assert np.flatnonzero(row.is_scored).tolist() == list(range(row.tokens.size - SPAN_TOKENS, row.tokens.size))
            assert (row.tokens == long.tokens[-row.tokens.size :]).all()
    assert [one.tokens for one in found.contexts] == [5 * SPAN_TOKENS] * 3
    assert [one.loss for one in found.contexts] == pytest.approx([1 / 100, 1 / 400, 1 / 1600])
    assert [one.gain for one in found.contexts] == pytest.approx([0.0, 1 / 100 - 1 / 400, 1 / 100 - 1 / 1600])
    assert [one.standard_error for one in found.contexts] == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)


def test_the_standard_error_is_that_of_paired_differences() -> None:
    rng = np.random.default_rng(0)
    hardness, gains = rng.uniform(100, 900, 400), rng.normal(20.0, 4.0, 400)
    counts = np.full(400, 10)
    long = paired((1, 2), np.stack([hardness, hardness - gains]), counts)[1]
    assert long.gain == pytest.approx(gains.mean() / 10)
    assert long.standard_error == pytest.approx(gains.std(ddof=1) / 10 / math.sqrt(400))
    assert paired((1, 2), np.ones((2, 1)), np.ones(1, dtype=np.int64))[1].standard_error is None


def test_only_supervised_tokens_of_documents_count(tmp_path: Path) -> None:
    rows = [{"q": "?" * (40 + number), "a": "!" * 700} for number in range(4)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = SourceSpec(paths=(str(tmp_path / "in.jsonl"),), fields=RowFields(prompt="q", completion="a"))
    prepare_local(PrepareRequest(sources=source, out=tmp_path / "corpus"))
    held = held_out_documents(tmp_path / "corpus", None)
    seen: list[Passage] = []

    def score(passages: Iterator[Passage]) -> Iterator[PassageScores]:
        for one in passages:
            seen.append(one)
            yield PassageScores(losses=one.is_scored * 1.0, is_correct=one.is_scored)

    found = position_loss(held, score, longest=10_000, max_tokens=10**9, seed=0)
    assert found is not None and found.documents == 4
    assert all((one.tokens[one.is_scored] != ord("?")).all() for one in seen)
    assert found.tokens == sum(int(one.is_scored.sum()) for one in seen) == 4 * 701, "the answers and their ends"
    # With 10 tokens of context, the first spans begin in the question.
    gain = context_gain(held, score, contexts=(5, 10), num_spans=100, seed=0)
    assert gain is not None and gain.spans == 4 * 2
    inside = sum(
        int(((one.tokens[-SPAN_TOKENS:] == ord("!")) | (one.tokens[-SPAN_TOKENS:] == 256)).sum()) for one in seen[4:12]
    )
    assert [one.tokens for one in gain.contexts] == [inside, inside]
    assert [one.loss for one in gain.contexts] == [1.0, 1.0]
