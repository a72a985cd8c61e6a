from __future__ import annotations

import pytest

from ray_ulysses.config import parse_config
from ray_ulysses.config.overrides import apply_overrides
from ray_ulysses.errors import ConfigError
from tests.unit.config.trees import small_tree


def test_later_overrides_win_and_the_tree_is_left_alone() -> None:
    tree = small_tree()
    changed, problems = apply_overrides(tree, ["run.seed=1", "run.seed=2"])
    assert not problems
    assert changed["run"] == {"name": "first", "storage": "runs", "seed": 2}
    assert tree == small_tree()


def test_values_are_read_as_yaml() -> None:
    overrides = [
        "optimizer.lr=3e-4",
        "parallel.allowed_sp=[1, 2]",
        "schedule.horizon_steps=",
        "tracking.tags={a: b=c}",
    ]
    config = parse_config(small_tree(), overrides)
    assert (config.optimizer.lr, config.parallel.allowed_sp) == (3e-4, (1, 2))
    assert (config.schedule.horizon_steps, config.tracking.tags) == (None, {"a": "b=c"})


def test_a_value_inside_the_model_configuration_can_be_set() -> None:
    config = parse_config(small_tree(), ["model.config.num_hidden_layers=1"])
    assert config.model.config is not None
    assert config.model.config["num_hidden_layers"] == 1
    assert config.model.config["hidden_size"] == 96


def test_a_section_that_is_not_in_the_file_is_made() -> None:
    assert parse_config(small_tree(), ["memory.offload_optimizer=cpu"]).memory.offload_optimizer == "cpu"


@pytest.mark.parametrize("override", ["run", "run=1", "run.seed", ".seed=1", "run.=1", "=1", ""])
def test_what_is_not_of_the_form_is_refused_with_an_example(override: str) -> None:
    _, (problem,) = apply_overrides(small_tree(), [override])
    assert (problem.path, problem.value) == ("--set", override)
    assert "such as --set run.stop_step=200" in str(problem)


def test_a_path_through_a_value_is_refused() -> None:
    _, (problem,) = apply_overrides(small_tree(), ["run.name.first=1"])
    assert str(problem) == "--set='run.name.first': run.name is a value, not a group of settings; set run.name itself"


def test_an_override_that_is_not_yaml_is_refused_by_its_path() -> None:
    _, (problem,) = apply_overrides(small_tree(), ["parallel.allowed_sp=[1, 2"])
    assert problem.path.startswith("--set parallel.allowed_sp")
    assert "not valid YAML" in problem.rule


@pytest.mark.parametrize("path", ["run.\x1b[31m", "run.\udcff", "run." + "x" * 300, "run.na\nme"])
def test_a_name_that_no_terminal_can_show_is_refused(path: str) -> None:
    _, (problem,) = apply_overrides({}, [f"{path}=1"])
    assert problem.rule == "is not of the form a.b=c"
    assert str(problem).isprintable()


def test_thousands_of_unknown_settings_are_counted_within_seconds() -> None:
    """Each was compared with every setting, and every one was printed."""
    with pytest.raises(ConfigError) as refused:
        parse_config({f"k{number}q": 1 for number in range(9000)})
    assert len(str(refused.value)) < 20_000
    assert "more" in str(refused.value)
