"""Stages of a run: all planned before the first step, so that every target is trained once over all stages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import plan_input
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan, num_segments, write_segment
from ray_ulysses.data.plan.segment import PlanSettings, StageLength
from ray_ulysses.data.plan.stages import NewSegment, StagePlan, num_made, plan_rest, plan_stages
from ray_ulysses.errors import UserError
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.data.plan.test_branches import labels_of, targets_trained

SETTINGS = PlanSettings(seed=3, context_tokens=64, pad_multiple=8, rows_per_step=3)


@pytest.fixture
def corpora(tmp_path: Path) -> tuple[Corpus, Corpus]:
    return tuple(text_corpus(tmp_path / name, varied_texts(12, seed)) for seed, name in enumerate(("a", "b")))  # type: ignore[return-value]


def stage(number: int, *shares: Corpus, **changes: object) -> StagePlan:
    lengths = {name: changes.pop(name) for name in ("steps", "tokens") if name in changes}
    return StagePlan(
        name=f"s{number}",
        settings=replace(SETTINGS, **changes),  # type: ignore[arg-type]
        shares=tuple((str(corpus.path), None) for corpus in shares),
        length=StageLength(number=number, **lengths),  # type: ignore[arg-type]
    )


def three(first: Corpus, second: Corpus) -> list[StagePlan]:
    return [
        stage(0, first, context_tokens=64, steps=7),
        stage(1, first, second, context_tokens=128, rows_per_step=2, tokens=1500),
        stage(2, first, second, context_tokens=256, rows_per_step=1),
    ]


def store(folder: Path, new: tuple[NewSegment, ...]) -> None:
    for one in new:
        documents = plan_input(one.corpora)
        write_segment(folder, num_segments(folder), documents, one.segment.settings, one.remainder, one.part)


def planned(folder: Path, *stages: StagePlan) -> Plan:
    store(folder, plan_stages(stages)[1])
    return load_plan(folder)


def all_targets(*corpora: Corpus) -> Counter[tuple[int, int]]:
    lengths = [int(length) for corpus in corpora for length in corpus.lengths]
    return Counter({(document, at): 1 for document, size in enumerate(lengths) for at in range(1, size)})


def ids(plan: Plan) -> list[str]:
    return [segment.plan_id for segment in plan.segments]


def test_stages_train_every_target_of_their_corpora_once(corpora: tuple[Corpus, Corpus], tmp_path: Path) -> None:
    plan, new = plan_stages(three(*corpora))
    store(tmp_path / "plan", new)
    stored = load_plan(tmp_path / "plan")
    assert ids(stored) == ids(plan)
    assert targets_trained(stored) == all_targets(*corpora)
    assert [segment.base_step for segment in stored.segments] == [0, 7, stored.stage_start(2)]
    contexts = {
        plan.stage_of_step(step): max(plan.row_tokens(row) for row in plan.step_rows(step))
        for step in range(1, plan.num_steps + 1)
    }
    assert contexts[0] <= 64 < 128 <= contexts[2] + 128 and max(contexts.values()) > 128
    assert [plan.stage_of_step(step) for step in (1, 7, 8)] == [0, 0, 1]
    cut = plan.through_stage(0)
    assert cut.num_steps == 7 and cut.num_rows == 21 and plan.num_rows > 21
    assert plan.step_rows(8) == range(21, 23), "rows are numbered over all stages"
    assert cut.cursor(7) == plan.cursor(7), "the position between two stages belongs to both"
    plan.through_stage(1).check_cursor(cut.cursor(7))
    with pytest.raises(UserError, match="data cursor belongs to plan"):
        cut.check_cursor(plan.cursor(8))


def test_a_stage_of_tokens_ends_with_the_step_that_reaches_them(corpora: tuple[Corpus, Corpus]) -> None:
    plan, _ = plan_stages(three(*corpora))
    steps = range(plan.stage_start(1) + 1, plan.stage_start(2) + 1)
    tokens = [int(plan.stats(plan.step_rows(step)).document_tokens.sum()) for step in steps]
    assert sum(tokens[:-1]) < 1500 <= sum(tokens)


def test_a_plan_of_which_only_some_stages_were_stored_is_completed_as_planned(
    corpora: tuple[Corpus, Corpus], tmp_path: Path
) -> None:
    stages = three(*corpora)
    plan, new = plan_stages(stages)
    store(tmp_path, new[:2])
    stored = load_plan(tmp_path)
    assert num_made(stored, stages) == 2
    completed, rest = plan_rest(stages, stored)
    assert ids(completed) == ids(plan) and len(rest) == 1
    store(tmp_path, rest)
    assert num_made(load_plan(tmp_path), stages) == 3


@pytest.mark.parametrize(
    "changes", [{"steps": 8}, {"context_tokens": 32}, {"rows_per_step": 2}, {"tokens": 900, "steps": None}]
)
def test_a_plan_of_other_stages_is_recognized(corpora: tuple[Corpus, Corpus], changes: dict[str, object]) -> None:
    first, second = corpora
    plan, _ = plan_stages(three(first, second))
    others = [stage(0, first, **{"context_tokens": 64, "steps": 7, **changes}), *three(first, second)[1:]]
    assert num_made(plan, others) is None
    assert num_made(plan, three(first, second)[:2]) is None


def test_a_branch_in_a_stage_replaces_the_stages_to_come(corpora: tuple[Corpus, Corpus], tmp_path: Path) -> None:
    first, second = corpora
    _, new = plan_stages(three(first, second))
    store(tmp_path, new)
    stored = load_plan(tmp_path)
    changed = [
        stage(0, first, context_tokens=32, steps=9),
        stage(1, first, second, context_tokens=512, rows_per_step=1),
    ]
    kept = stored.at_step(4)

    plan, branch = plan_stages(changed, kept, 4)
    store(tmp_path, branch)
    loaded = load_plan(tmp_path)
    assert ids(loaded) == ids(plan)
    assert [(one.stage_number, one.base_step) for one in loaded.segments] == [(0, 0), (0, 4), (1, 9)]
    assert targets_trained(loaded) == all_targets(first, second)
    assert num_made(loaded, changed) == 2


def test_rows_left_out_of_a_stage_do_not_affect_later_stages(corpora: tuple[Corpus, Corpus], tmp_path: Path) -> None:
    stages = three(*corpora)
    plan = planned(tmp_path, *stages)
    store(tmp_path, plan_stages(stages, plan.at_step(8), 8, plan.step_rows(9))[1])
    again = load_plan(tmp_path)
    left_out = labels_of(plan, plan.step_rows(9))
    assert left_out and targets_trained(again) == all_targets(*corpora) - left_out


def test_a_stage_longer_than_its_data_or_than_what_was_trained_is_refused(corpora: tuple[Corpus, Corpus]) -> None:
    first, second = corpora
    with pytest.raises(
        UserError, match=r"stage 's0': stages\.0\.steps=9999: the stage runs out of data after \d+ steps"
    ):
        plan_stages([stage(0, first, steps=9999), stage(1, second)])
    with pytest.raises(UserError, match=r"stages\.1\.tokens=9999999: the stage runs out of data"):
        plan_stages([stage(0, first, steps=2), stage(1, first, tokens=9_999_999)])
    stages = three(first, second)
    plan, _ = plan_stages(stages)
    with pytest.raises(UserError, match=r"stages\.0\.steps=4: the stage has already trained 5 steps"):
        plan_stages([stage(0, first, steps=4), *stages[1:]], plan.at_step(5), 5)


@pytest.mark.parametrize("steps", [5, 7])
def test_a_border_between_stages_of_the_same_weights_keeps_what_the_epoch_had_planned(
    corpora: tuple[Corpus, Corpus], tmp_path: Path, steps: int
) -> None:
    def weighted(number: int, **changes: object) -> StagePlan:
        shares = tuple((str(corpus.path), weight) for corpus, weight in zip(corpora, (1.0, 2.0), strict=True))
        return replace(stage(number, **changes), shares=shares)

    whole = planned(tmp_path / "whole", weighted(0))
    assert 0 < len(targets_trained(whole)) < len(all_targets(*corpora))
    longer = weighted(1, context_tokens=128, rows_per_step=2)
    assert targets_trained(planned(tmp_path / "two", weighted(0, steps=steps), longer)) == targets_trained(whole)
