from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.plan.plan import Cursor, Plan
from ray_ulysses.data.plan.rows import Rows, RowStats
from ray_ulysses.data.plan.segment import Packing, PlanSettings
from ray_ulysses.data.tokenize.spans import LabelSpans
from ray_ulysses.errors import UserError
from tests.unit.data.plans import build_plan

SETTINGS = PlanSettings(seed=3, context_tokens=50, pad_multiple=8, rows_per_step=6)


def lengths_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 160, count).astype(np.int64)


def rows_of_epoch(plan: Plan, epoch: int) -> range:
    info = plan.newest.epochs[epoch]
    return range(info.first_row, info.first_row + info.num_rows)


def inputs_of(plan: Plan, epoch: int) -> list[tuple[int, int, int]]:
    return [
        (piece.document, piece.start, piece.length) for row in rows_of_epoch(plan, epoch) for piece in plan.pieces(row)
    ]


def all_weights(plan: Plan) -> RowStats:
    return plan.newest.train.stats(0, plan.num_rows)


def documents_of(rows: Rows) -> set[int]:
    return {piece.document for row in range(rows.num_rows) for piece in rows.pieces(row)}


@hypothesis_settings(deadline=None)
@given(
    lengths=st.lists(st.integers(2, 120), min_size=1, max_size=40),
    context=st.integers(8, 64),
    pad=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 2**63),
)
def test_rows_hold_every_target_within_capacity(lengths: list[int], context: int, pad: int, seed: int) -> None:
    settings = replace(SETTINGS, context_tokens=context, pad_multiple=pad, seed=seed)
    plan = build_plan(np.asarray(lengths), "f", settings)
    weights = all_weights(plan)
    assert weights.padded_tokens(pad).max() <= settings.capacity
    assert weights.supervised.min() >= 1
    assert weights.supervised.sum() == sum(lengths) - len(lengths) == plan.newest.totals.supervised
    assert sum(plan.step_tokens(step) for step in range(1, plan.num_steps + 1)) == weights.supervised.sum()
    for row in range(plan.num_rows):
        pieces = plan.pieces(row)
        assert plan.row_tokens(row) % pad == 0
        assert 0 <= plan.row_tokens(row) - sum(piece.length for piece in pieces) < pad
        assert weights.sum_squares[row] == sum(piece.length**2 for piece in pieces)


def test_plans_of_other_settings_have_other_ids() -> None:
    changes = ({}, {"seed": 4}, {"rows_per_step": 7}, {"pad_multiple": 4}, {"epochs": 2})
    plans = [build_plan(lengths_of(200), "f", replace(SETTINGS, **change)) for change in changes]
    assert len({plan.plan_id for plan in (*plans, build_plan(lengths_of(200), "g", SETTINGS))}) == 6


def test_the_plan_of_this_version_never_changes() -> None:
    """A planner with another order must get a new PLANNER_VERSION; otherwise, running jobs could not resume."""
    lengths = np.arange(50) * 37 % 158 + 2
    plan = build_plan(lengths, "f", replace(SETTINGS, eval_fraction=0.1, epochs=2))
    rows = [[astuple(piece) for piece in plan.pieces(row)] for row in range(plan.num_rows)]
    assert plan.plan_id == "a6d672fdec7e27df"
    assert stable_hash(rows)[:16] == "45c225a07f7a8d48"


def test_the_costliest_rows_may_come_first_and_the_others_stay_in_their_order() -> None:
    plan = build_plan(lengths_of(200), "f", replace(SETTINGS, row_order="costliest", epochs=2))
    shuffled = build_plan(lengths_of(200), "f", replace(SETTINGS, epochs=2))
    size = SETTINGS.rows_per_step
    for epoch in range(2):
        rows = rows_of_epoch(plan, epoch)
        costs = plan.newest.costs()[rows.start : rows.stop]
        assert sorted(costs[:size]) == sorted(costs)[-size:] and costs[0] == costs.max()
        first = {plan.pieces(row) for row in rows[:size]}
        others = [shuffled.pieces(row) for row in rows if shuffled.pieces(row) not in first]
        assert [plan.pieces(row) for row in rows[size:]] == others
    assert plan.plan_id != shuffled.plan_id


def test_each_epoch_holds_the_same_documents_in_another_order() -> None:
    plan = build_plan(lengths_of(100), "f", replace(SETTINGS, epochs=3))
    first, second, third = (inputs_of(plan, epoch) for epoch in range(3))
    assert sorted(first) == sorted(second) == sorted(third)
    assert first != second != third
    assert first == inputs_of(build_plan(lengths_of(100), "f", SETTINGS), 0)


def test_steps_count_from_one_and_the_last_may_be_short() -> None:
    plan = build_plan(np.full(14, 48), "f", SETTINGS)
    assert [plan.step_rows(step) for step in (1, 2, 3)] == [range(6), range(6, 12), range(12, 14)]
    assert plan.num_steps == 3 and plan.step_tokens(3) == 2 * 47
    for step in (0, 4):
        with pytest.raises(ValueError, match=rf"step {step} is not in \[1, 3\]"):
            plan.step_rows(step)


def test_cursors_name_the_next_row_and_are_recognised() -> None:
    plan = build_plan(np.full(14, 48), "f", replace(SETTINGS, epochs=2))
    cursors = [plan.cursor(step) for step in range(plan.num_steps + 1)]
    assert [one.next_row for one in cursors] == [0, 6, 12, 18, 24, 28]
    assert [one.epoch for one in cursors] == [0, 0, 0, 1, 1, 1]
    for one in cursors:
        plan.check_cursor(Cursor.from_json(one.to_json()))
    with pytest.raises(UserError, match=r"is not a position in plan"):
        plan.check_cursor(replace(cursors[1], next_row=7))
    with pytest.raises(UserError, match=r"belongs to plan other"):
        plan.check_cursor(replace(cursors[1], plan_id="other"))
    for change, problem in (
        ({"extra": 1}, "extra is 1"),
        ({"next_row": "6"}, "next_row is"),
        ({"epoch": -1}, "epoch is"),
    ):
        with pytest.raises(UserError, match=f"^data cursor .*: {problem}.*; resume from another step$"):
            Cursor.from_json({**cursors[1].to_json(), **change})


def test_evaluation_documents_are_never_trained_on() -> None:
    plan = build_plan(lengths_of(400), "f", replace(SETTINGS, eval_fraction=0.2, eval_rows=5))
    held_out, trained = documents_of(plan.evaluation), documents_of(plan.newest.train)
    assert plan.evaluation.num_rows == 5
    assert held_out
    assert not held_out & trained
    assert len(trained) + plan.newest.totals.held_out_documents == 400
    assert 50 < plan.newest.totals.held_out_documents < 110


def test_more_documents_move_none_between_the_splits() -> None:
    settings = replace(SETTINGS, eval_fraction=0.2, eval_rows=1000)
    small = documents_of(build_plan(lengths_of(400), "f", settings).newest.train)
    large = documents_of(build_plan(lengths_of(800), "f", settings).newest.train)
    assert small == {document for document in large if document < 400}


def test_a_segments_totals_count_documents_tokens_and_padding() -> None:
    segment = build_plan(np.array([100, 20, 30, 1]), "f", SETTINGS).newest
    totals = segment.totals
    assert (totals.split_documents, totals.skipped_documents, totals.tokens) == (1, 1, 150)
    padded = segment.train.stats(0, segment.train.num_rows).padded_tokens(8)
    assert totals.padding_tokens == int(padded.sum()) - 150
    assert segment.fill == pytest.approx(150 / (48 * segment.train.num_rows))


@pytest.mark.parametrize(
    ("overlong", "pieces", "lost", "counts"),
    [
        ("split", [(0, 0, 48), (0, 48, 48), (0, 96, 4), (1, 0, 48), (2, 0, 20)], 0, (1, 0, 0)),
        ("truncate", [(0, 0, 48), (1, 0, 48), (2, 0, 20)], 51, (0, 1, 0)),
        ("drop", [(1, 0, 48), (2, 0, 20)], 100, (0, 0, 1)),
        ("drop_whole", [(2, 0, 20)], 149, (0, 0, 2)),
    ],
)
def test_what_becomes_of_overlong_documents_is_counted(
    overlong: str, pieces: list[tuple[int, int, int]], lost: int, counts: tuple[int, int, int]
) -> None:
    """A document with one token more than a row is overlong only if its last token is needed as an input."""
    plan = build_plan(np.array([100, 49, 20]), "f", replace(SETTINGS, overlong=overlong))
    totals = plan.newest.totals
    assert sorted(inputs_of(plan, 0)) == pieces
    assert totals.lost_tokens == lost
    assert (totals.split_documents, totals.truncated_documents, totals.dropped_documents) == counts


def test_rows_without_a_label_are_left_out_and_counted() -> None:
    """Only the end of a document of nine rows has labels."""
    spans = LabelSpans(offsets=np.array([0, 1]), starts=np.array([48 * 8]), stops=np.array([48 * 9]))
    plan = build_plan(np.array([48 * 9]), "f", replace(SETTINGS, rows_per_step=1, epochs=3), spans)
    # The first label of the last row is that of the last token of the row before.
    assert plan.num_rows == plan.num_steps == 3 * 2 and plan.newest.totals.unlabelled_rows == 3 * 7
    assert sorted(plan.pieces(row)[0].start for row in range(6)) == [48 * 7] * 3 + [48 * 8] * 3
    assert [plan.step_tokens(step) for step in range(1, 7)].count(0) == 0
    assert plan.newest.totals.tokens == 3 * 2 * 48 and plan.newest.totals.supervised == 3 * 48
    with pytest.raises(UserError, match=r"^data: none of the 1 planned rows has a label.*data\.overlong=truncate"):
        build_plan(np.array([48 * 9]), "f", replace(SETTINGS, overlong="truncate"), spans)


@pytest.mark.parametrize("packing", ["best_fit", "wide_fit", "concat", "none"])
def test_every_row_has_a_label_and_every_label_is_in_a_row(packing: Packing) -> None:
    lengths, rng = lengths_of(300), np.random.default_rng(2)
    # Most documents have no label at all, since nothing predicts their first token.
    starts = np.where(rng.random(300) < 0.8, 0, rng.integers(1, 1_000, 300) % lengths)
    stops = np.where(starts > 0, lengths, 1)
    spans = LabelSpans(offsets=np.arange(301), starts=starts, stops=stops)
    settings = replace(SETTINGS, packing=packing, eval_fraction=0.2, eval_rows=1000)
    plan = build_plan(lengths, "f", settings, spans)
    held = plan.held_out()
    for rows, documents in ((plan.newest.train, ~held), (plan.evaluation, held)):
        supervised = rows.stats(0, rows.num_rows).supervised
        assert rows.num_rows and supervised.min() > 0
        assert supervised.sum() == (stops - starts)[documents & (starts > 0)].sum()
    assert plan.newest.totals.unlabelled_rows > 0 or packing == "concat"


@pytest.mark.parametrize(
    ("lengths", "change", "text"),
    [
        ([9], {"context_tokens": 7}, "data.context_tokens=7: is less than pad_multiple=8"),
        ([9], {"eval_fraction": 0.01}, "none of the 1 documents is held out; use a larger fraction"),
        ([1, 1], {}, "none of the 2 documents is left for training"),
        ([], {}, "none of the 0 documents is left for training"),
        ([9], {"context_tokens": 2**32}, "data.context_tokens=4294967296: is too large; use at most 2147483647"),
        ([49, 50], {"overlong": "error"}, "data.overlong=error: document 1 has 50 tokens, but a row has only 48"),
    ],
)
def test_documents_that_can_not_be_planned_are_refused(lengths: list[int], change: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        build_plan(np.asarray(lengths, dtype=np.int64), "f", replace(SETTINGS, **change))


def test_a_replaced_corpus_is_refused() -> None:
    plan = build_plan(lengths_of(5), "f", SETTINGS)
    plan.check_corpus("f")
    with pytest.raises(
        UserError, match=r"the corpus has been replaced since the plan was made: .* found g; restore the corpus"
    ):
        plan.check_corpus("g")
