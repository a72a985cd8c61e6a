"""The configuration of each stage, and the rules for stages."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ulysses.config import Config, parse_config, resume_conflicts
from ray_ulysses.config.resume import resume_fingerprint, stage_conflicts
from ray_ulysses.config.stages import corpus_paths, stage_config
from ray_ulysses.errors import ConfigError
from tests.unit.config.trees import small_tree

STAGES: list[dict[str, Any]] = [
    {"name": "short", "steps": 10, "context_tokens": 256, "rows_per_step": 16, "sp_size": 1, "path": "runs/short"},
    {"name": "middle", "tokens": 5000, "lr": 1e-4, "rope": {"rope_theta": 5e5}, "schedule": {"kind": "linear"}},
    {"name": "long", "sources": [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 3.0}], "optimizer": "reset"},
]


def tree(*stages: dict[str, Any], **changes: Any) -> dict[str, Any]:
    settings = {"parallel__sp_size": 2, "optimizer__lr": 1e-3, "schedule__warmup_steps": 5, **changes}
    return {**small_tree(**settings), "stages": [dict(one) for one in stages or STAGES]}


def config(*stages: dict[str, Any], **changes: Any) -> Config:
    return parse_config(tree(*stages, **changes))


def refused(*stages: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        config(*stages, **changes)
    return str(error.value)


def test_a_stage_has_its_own_settings_and_the_runs_for_the_rest() -> None:
    run = config(parallel__ring_size=2)
    first, middle, last = (stage_config(run, number) for number in range(3))
    assert (first.data.context_tokens, first.data.rows_per_step, first.parallel.sp_size) == (256, 16, 1)
    assert first.data_sources == (("runs/short", None),) and first.optimizer.lr == 1e-3
    assert first.parallel.ring_size is None, "the ring is that of the largest size"
    assert (middle.data.context_tokens, middle.parallel.sp_size, middle.optimizer.lr) == (1024, 2, 1e-4)
    assert middle.schedule.kind == "linear" and middle.schedule.warmup_steps == 100, "a schedule of its own"
    assert middle.model.rope is not None and last.model.rope is None
    assert last.data_sources == (("a", 1.0), ("b", 3.0)) and last.schedule.warmup_steps == 5
    assert not any(one.stages for one in (first, middle, last))
    assert resume_fingerprint(middle) != resume_fingerprint(last)


def test_a_run_whose_stages_all_have_corpora_needs_none_of_its_own() -> None:
    own = [dict(STAGES[0]), dict(STAGES[1], path="b"), STAGES[2]]
    run = config(*own, data__path=None)
    assert corpus_paths(run) == ("runs/short", "b", "a")
    assert corpus_paths(config()) == ("runs/short", "runs/corpus", "a", "b")
    text = refused(*STAGES, data__path=None)
    assert text.count("no corpus is specified") == 1 and "data.path: " in text and "'middle'" in text


@pytest.mark.parametrize(
    ("stages", "path"),
    [
        ([{"name": "a"}, {"name": "b"}], "stages.0.steps"),
        ([{"name": "a", "steps": 1, "tokens": 1}], "stages.0.steps"),
        ([{"name": "a", "steps": 1}, {"name": "a"}], "stages.1.name"),
        ([{"name": "a", "context_tokens": 2048}], "stages.0.context_tokens"),
        ([{"name": "a", "sp_size": 3}], "stages.0.sp_size"),
        ([{"name": "a", "path": "x", "sources": [{"path": "y"}]}], "stages.0.path"),
        ([{"name": "a", "schedule": {"warmup_steps": 9, "horizon_steps": 9}}], "schedule.warmup_steps"),
        ([{"name": "a", "schedule": {"decay_steps": 9}}], "stages.0.schedule.decay_steps"),
        ([{"name": "a", "contxt_tokens": 9}], "stages.0.contxt_tokens"),
        ([{"name": "a b"}], "stages.0.name"),
    ],
)
def test_an_invalid_stage_is_refused_by_its_setting(stages: list[dict[str, Any]], path: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(*stages)
    assert path in [problem.path for problem in error.value.problems]


def test_stages_are_refused_with_another_runs_state_or_a_part_of_a_model() -> None:
    assert "model.resume_state='all': continues another run" in refused(model__resume_from="other")
    config(model__resume_from="other", model__resume_state="weights")
    text = refused({"name": "a", "rope": {"rope_theta": 1e6}}, model__part="text", model__path="m")
    assert "stages.0.rope: changes the text decoder's positions" in text


@pytest.mark.parametrize(
    ("changed", "num_begun", "words"),
    [
        ([STAGES[0], dict(STAGES[1], lr=2e-4), STAGES[2]], 1, None),
        ([STAGES[0], dict(STAGES[1], lr=2e-4), STAGES[2]], 2, None),
        ([STAGES[0], dict(STAGES[1], lr=2e-4), STAGES[2]], 3, "stages.1: optimizer.lr=0.0002: "),
        ([dict(STAGES[0], context_tokens=512), *STAGES[1:]], 1, None),
        ([dict(STAGES[0], context_tokens=512), *STAGES[1:]], 2, "stages.0: data.context_tokens=512: "),
        (STAGES[:2], 3, "stages=2: "),
        (STAGES[:2], 2, None),
        ([dict(STAGES[0], name="other"), *STAGES[1:]], 1, "stages.0.name='other': "),
        ([STAGES[0], dict(STAGES[1], name="other"), STAGES[2]], 1, None),
        ([dict(STAGES[0], schedule={"warmup_steps": 5}), *STAGES[1:]], 1, "stages.0.schedule: "),
        ([dict(STAGES[0], schedule={"warmup_steps": 5}), *STAGES[1:]], 2, "stages.0.schedule: "),
        ([STAGES[0], STAGES[1], dict(STAGES[2], schedule={"warmup_steps": 5})], 2, None),
    ],
)
def test_a_branch_may_change_data_and_learning_rate_of_the_current_stage_and_later_stages(
    changed: list[dict[str, Any]], num_begun: int, words: str | None
) -> None:
    problems = [str(problem) for problem in stage_conflicts(config(), config(*changed), num_begun)]
    assert len(problems) == (0 if words is None else 1)
    assert words is None or problems[0].startswith(words)
    (problem,) = resume_conflicts(config(), config(*changed))
    assert problem.path == "stages" and "--branch" in str(problem)
    assert resume_conflicts(config(), config(*changed), branch=True) == ()


def test_a_stage_that_has_begun_keeps_a_schedule_of_its_own() -> None:
    """An equal schedule of the run would count steps from the start of the run."""
    own = [STAGES[0], dict(STAGES[1], schedule={"warmup_steps": 5}), STAGES[2]]
    without = [STAGES[0], {name: value for name, value in own[1].items() if name != "schedule"}, STAGES[2]]
    (problem,) = stage_conflicts(config(*own), config(*without), 2)
    assert problem.path == "stages.1.schedule"
    assert stage_conflicts(config(*own), config(*without), 1) == ()
    no_stages = parse_config(small_tree(parallel__sp_size=2, optimizer__lr=1e-3, schedule__warmup_steps=5))
    first = dict(STAGES[0], schedule={"warmup_steps": 5})
    assert [one.path for one in stage_conflicts(no_stages, config(first, *STAGES[1:]), 1)] == ["stages.0.schedule"]
    assert stage_conflicts(no_stages, config(), 1) == ()


def test_a_tile_may_be_longer_than_the_rows_of_a_short_stage() -> None:
    assert config(memory__loss_tile=512).memory.loss_tile == 512, "the first has 256 tokens per rank, the others 512"
    assert "memory.loss_tile=513: exceeds the 512 tokens" in refused(memory__loss_tile=513)
    # A stage whose rows are shared by fewer ranks has the longest.
    assert config({"name": "a", "steps": 3}, {"name": "b", "sp_size": 1}, memory__loss_tile=1024).stages
