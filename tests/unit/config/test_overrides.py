from __future__ import annotations

import pytest

from ray_ulysses.config import parse_config
from ray_ulysses.config.loading import apply_overrides
from ray_ulysses.config.yaml_text import parse_yaml
from ray_ulysses.errors import ConfigError
from tests.unit.config.trees import small_tree

STAGES = [{"name": "short", "steps": 3}, {"name": "long", "sources": [{"path": "a"}]}]


def test_values_are_read_as_yaml_at_any_depth_and_later_overrides_win() -> None:
    overrides = [
        *("optimizer.lr=3e-4", "parallel.allowed_sp=[1, 2]", "schedule.horizon_steps=", "tracking.tags={a: b=c}"),
        *("model.config.num_hidden_layers=1", "memory.offload_optimizer=cpu", "run.seed=1", "run.seed=2"),
    ]
    tree = small_tree()
    config = parse_config(tree, overrides)
    assert tree == small_tree() and config.run.seed == 2
    assert (config.optimizer.lr, config.parallel.allowed_sp) == (3e-4, (1, 2))
    assert (config.schedule.horizon_steps, config.tracking.tags) == (None, {"a": "b=c"})
    assert config.model.config is not None
    assert (config.model.config["num_hidden_layers"], config.model.config["hidden_size"]) == (1, 96)
    assert config.memory.offload_optimizer == "cpu", "a section that is not in the file"


@pytest.mark.parametrize("override", ["run", "run=1", "run.seed", ".seed=1", "run.=1", "=1", ""])
def test_an_override_of_another_form_is_refused(override: str) -> None:
    _, (problem,) = apply_overrides(small_tree(), [override])
    assert (problem.path, problem.value) == ("--set", override)


def test_a_list_entry_is_selected_by_its_name_or_its_number() -> None:
    overrides = ["stages.0.lr=1e-5", "stages.long.schedule.kind=linear", "stages.long.sources.0.weight=2.0"]
    tree = {**small_tree(), "stages": STAGES}
    config = parse_config(tree, overrides)
    assert (config.stages[0].lr, config.stages[1].lr) == (1e-5, None)
    assert config.stages[1].schedule is not None and config.stages[1].schedule.kind == "linear"
    assert config.stages[1].sources is not None and config.stages[1].sources[0].weight == 2.0
    assert tree["stages"] == STAGES
    stages = [{"name": "8192", "steps": 3}, {"name": "0"}]
    config = parse_config({**small_tree(), "stages": stages}, ["stages.8192.lr=1e-5", "stages.0.lr=2e-5"])
    assert [stage.lr for stage in config.stages] == [1e-5, 2e-5], "names come before numbers"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("stages.2.lr", "no entry '2'; use a number from 0 to 1, or a name: short, long"),
        ("stages.long.sources.1.path", "no entry '1'; use a number from 0 to 0"),
        ("stages.0.name.x", "stages.0.name is a value"),
        ("run.name.first", "run.name is a value"),
    ],
)
def test_a_path_to_a_missing_entry_is_refused(path: str, said: str) -> None:
    _, (problem,) = apply_overrides({**small_tree(), "stages": STAGES}, [f"{path}=1"])
    assert (problem.path, problem.value) == ("--set", path) and said in str(problem)


def test_an_override_that_is_not_yaml_is_refused_by_its_path() -> None:
    _, (problem,) = apply_overrides(small_tree(), ["parallel.allowed_sp=[1, 2"])
    assert problem.path.startswith("--set parallel.allowed_sp")


@pytest.mark.parametrize("path", ["run.\x1b[31m", "run.\udcff", "run." + "x" * 300, "run.na\nme"])
def test_an_unprintable_or_long_name_is_refused(path: str) -> None:
    _, (problem,) = apply_overrides({}, [f"{path}=1"])
    assert str(problem).isprintable()


def test_thousands_of_unknown_settings_are_refused_in_little_time_and_space() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({f"k{number}q": 1 for number in range(9000)})
    assert len(str(refused.value)) < 20_000 and "more" in str(refused.value)


def test_an_override_changes_only_one_of_several_aliases() -> None:
    (shared,) = parse_yaml("&short {name: short, steps: 3, schedule: {warmup_steps: 1}}", "text")[:1]
    tree = {**small_tree(), "stages": [shared, {**shared, "name": "long", "steps": None}]}
    config = parse_config(tree, ["stages.short.schedule.warmup_steps=2"])
    assert [stage.schedule and stage.schedule.warmup_steps for stage in config.stages] == [2, 1]
