from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.data.plan import Plan, PlanSettings, build_plan
from ray_ulysses.errors import UserError

SETTINGS = PlanSettings(seed=3, context_tokens=50, pad_multiple=8, rows_per_step=6)


def lengths_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 160, count).astype(np.int64)


def inputs_of(plan: Plan, epoch: int) -> list[tuple[int, int, int]]:
    return sorted(
        (piece.document, piece.start, piece.length)
        for row in range(plan.num_rows)
        if plan.train.epoch[row] == epoch
        for piece in plan.train.pieces(row)
    )


@given(
    lengths=st.lists(st.integers(2, 120), min_size=1, max_size=40),
    context=st.integers(8, 64),
    pad=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 2**63),
)
def test_rows_hold_every_target_within_capacity(lengths: list[int], context: int, pad: int, seed: int) -> None:
    settings = replace(SETTINGS, context_tokens=context, pad_multiple=pad, seed=seed)
    plan = build_plan(np.asarray(lengths), "f", settings)
    assert plan.train.tokens.max() <= settings.capacity
    assert (plan.train.tokens % pad == 0).all()
    assert plan.train.supervised.min() >= 1
    assert plan.train.supervised.sum() == sum(lengths) - len(lengths)
    assert sum(plan.step_tokens(step) for step in range(1, plan.num_steps + 1)) == plan.train.supervised.sum()


def test_the_same_settings_give_the_same_plan_and_others_another() -> None:
    lengths = lengths_of(200)
    plan = build_plan(lengths, "f", SETTINGS)
    assert build_plan(lengths, "f", SETTINGS).plan_id == plan.plan_id
    others = [
        build_plan(lengths, "g", SETTINGS),
        build_plan(lengths, "f", replace(SETTINGS, seed=4)),
        build_plan(lengths, "f", replace(SETTINGS, rows_per_step=7)),
        build_plan(lengths, "f", replace(SETTINGS, pad_multiple=4)),
        build_plan(lengths, "f", replace(SETTINGS, epochs=2)),
    ]
    assert len({plan.plan_id, *(other.plan_id for other in others)}) == 6


def test_the_plan_of_this_version_never_changes() -> None:
    """A planner that orders otherwise must get a new PLANNER_VERSION, or running jobs could not resume."""
    lengths = np.arange(50) * 37 % 158 + 2
    plan = build_plan(lengths, "f", replace(SETTINGS, eval_fraction=0.1, epochs=2))
    assert plan.plan_id == "ca056e49976fd71c"


def test_each_epoch_holds_the_same_documents_in_another_order() -> None:
    plan = build_plan(lengths_of(100), "f", replace(SETTINGS, epochs=3))
    assert inputs_of(plan, 0) == inputs_of(plan, 1) == inputs_of(plan, 2)
    assert np.array_equal(np.sort(plan.train.epoch), plan.train.epoch)
    by_epoch = [plan.train.document[np.repeat(plan.train.epoch, np.diff(plan.train.offsets)) == e] for e in range(3)]
    assert not np.array_equal(by_epoch[0], by_epoch[1])


def test_the_first_epoch_is_the_plan_of_one_epoch() -> None:
    one = build_plan(lengths_of(100), "f", SETTINGS).train
    two = build_plan(lengths_of(100), "f", replace(SETTINGS, epochs=2)).train
    for row in range(one.num_rows):
        assert one.pieces(row) == two.pieces(row)


def test_steps_count_from_one_and_the_last_may_be_short() -> None:
    plan = build_plan(np.full(14, 48), "f", SETTINGS)
    assert (plan.num_rows, plan.num_steps) == (14, 3)
    assert [plan.step_rows(step) for step in (1, 2, 3)] == [range(6), range(6, 12), range(12, 14)]
    assert plan.step_tokens(3) == 2 * 47
    for step in (0, 4):
        with pytest.raises(ValueError, match=rf"step {step} is not in \[1, 3\]"):
            plan.step_rows(step)


def test_cursors_name_the_next_row_and_are_recognised() -> None:
    plan = build_plan(np.full(14, 48), "f", replace(SETTINGS, epochs=2))
    assert [plan.cursor(step).next_row for step in range(plan.num_steps + 1)] == [0, 6, 12, 18, 24, 28]
    assert [plan.cursor(step).epoch for step in range(plan.num_steps + 1)] == [0, 0, 0, 1, 1, 1]
    for step in range(plan.num_steps + 1):
        plan.check_cursor(plan.cursor(step))
    with pytest.raises(UserError, match=r"is no position of plan"):
        plan.check_cursor(replace(plan.cursor(1), next_row=7))
    with pytest.raises(UserError, match=r"is of plan other, the run's plan is"):
        plan.check_cursor(replace(plan.cursor(1), plan_id="other"))


def test_evaluation_documents_are_never_trained_on() -> None:
    plan = build_plan(lengths_of(400), "f", replace(SETTINGS, eval_fraction=0.2, eval_rows=5))
    held_out = set(plan.evaluation.document.tolist())
    assert plan.evaluation.num_rows == 5
    assert held_out and not held_out & set(plan.train.document.tolist())
    assert len(set(plan.train.document.tolist())) + plan.held_out_documents == 400
    assert 50 < plan.held_out_documents < 110


def test_more_documents_move_none_between_the_splits() -> None:
    settings = replace(SETTINGS, eval_fraction=0.2, eval_rows=1000)
    small = set(build_plan(lengths_of(400), "f", settings).train.document.tolist())
    large = set(build_plan(lengths_of(800), "f", settings).train.document.tolist())
    assert small == {document for document in large if document < 400}


def test_figures_of_the_report() -> None:
    plan = build_plan(np.array([100, 20, 30, 1]), "f", SETTINGS)
    assert plan.settings.capacity == 48
    assert plan.split_documents == 1
    assert plan.skipped_documents == 1
    assert plan.padding_tokens == int(plan.train.tokens.sum()) - 150
    assert plan.fill == pytest.approx(150 / (48 * plan.num_rows))
    assert plan.imbalance(1) == pytest.approx(1.0)


def test_100k_documents_are_planned_in_under_a_second() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(8, 1.5, 100_000), 2, 10**6).astype(np.int64)
    start = time.perf_counter()
    plan = build_plan(lengths, "f", replace(SETTINGS, context_tokens=131_072))
    assert time.perf_counter() - start < 1.0
    assert plan.fill > 0.999


@pytest.mark.parametrize(
    ("lengths", "change", "text"),
    [
        ([9], {"context_tokens": 7}, "data.context_tokens=7: is shorter than pad_multiple=8"),
        ([9], {"eval_fraction": 0.6}, r"data.eval_fraction=0.6: must be in \[0, 0.5\]"),
        ([9], {"rows_per_step": 0}, "data.rows_per_step=0: must be at least 1"),
        ([9], {"epochs": 0}, "data.epochs=0: must be at least 1"),
        ([9], {"eval_fraction": 0.01}, "holds out none of the 1 documents; use a larger share"),
        ([1, 1], {}, "none is left to train on"),
        ([], {}, "none is left to train on"),
    ],
)
def test_what_cannot_be_planned_is_refused(lengths: list[int], change: dict[str, float], text: str) -> None:
    with pytest.raises(UserError, match=text):
        build_plan(np.asarray(lengths, dtype=np.int64), "f", replace(SETTINGS, **change))


def test_a_split_that_leaves_nothing_to_train_on_is_refused() -> None:
    settings = replace(SETTINGS, eval_fraction=0.5)
    seed = next(seed for seed in range(100) if _is_refused(replace(settings, seed=seed)))
    with pytest.raises(UserError, match=r"of 1 documents, 1 are held out for evaluation and none is left to train on"):
        build_plan(np.array([9]), "f", replace(settings, seed=seed))


def _is_refused(settings: PlanSettings) -> bool:
    try:
        build_plan(np.array([9]), "f", settings)
    except UserError as error:
        return "none is left to train on" in str(error)
    return False


def test_a_replaced_corpus_is_refused() -> None:
    plan = build_plan(lengths_of(5), "f", SETTINGS)
    plan.check_corpus("f")
    with pytest.raises(UserError, match=r"the corpus was replaced since planning: .* found g; restore the corpus"):
        plan.check_corpus("g")
