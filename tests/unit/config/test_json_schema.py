"""The JSON schema that editors read accepts what we accept, and knows each setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.config.yaml_text import parse_yaml
from tests.config_schema import FILE, render_schema
from tests.unit.config.trees import setting_paths, small_tree

_CHECKER = jsonschema.Draft202012Validator(json.loads(render_schema()))
_CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


def test_the_shipped_schema_is_current_and_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert FILE.read_text(encoding="utf-8") == render_schema(), "run `make docs`"
    assert run(app, ["init", "--schema"]) == 0
    assert capsys.readouterr().out == render_schema()


def test_every_setting_is_described() -> None:
    known = json.loads(render_schema())
    for path in setting_paths():
        section, _, name = path.partition(".")
        reference = known["properties"][section]["anyOf"][0]["$ref"].rpartition("/")[2]
        assert known["$defs"][reference]["properties"][name]["description"]


@pytest.mark.parametrize("path", _CONFIGS, ids=[path.stem for path in _CONFIGS])
def test_shipped_configurations_are_valid(path: Path) -> None:
    _CHECKER.validate(parse_yaml(path.read_text(encoding="utf-8"), path.name)[0])


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"extends": "base.yaml"}, None),
        ({"data": None, "cluster": {"workers": {"min": 2, "max": 4}}}, None),
        ({"run": {"name": "a-${JOB}", "stop_step": "${STEPS:-5}"}, "model": {"init": "${INIT}"}}, None),
        ({"stages": [{"name": "a", "steps": 3, "rope": {"rope_type": "yarn", "factor": 2.0}}]}, None),
        ({"data": {"validation": "corpus"}}, None),
        ({"data": {"validation": ["a", "s3://bucket/b"]}}, None),
        ({"memory": {"zero_stage": 2, "offload_activations": ["layer_inputs"]}}, None),
        ({"optimiser": {}}, "optimiser"),
        ({"run": {"stop_step": "five"}}, "five"),
        ({"run": {"stop_step": 0}}, "0"),
        ({"cluster": {"workers": "4"}}, "4"),
        ({"model": {"adapter": {"r": 4}}}, "'r'"),
        ({"stages": [{"steps": 3}]}, "'name'"),
    ],
    ids=str,
)
def test_it_accepts_what_a_file_may_contain_and_marks_mistakes(changes: dict[str, Any], wrong: str | None) -> None:
    tree = small_tree() | changes
    found = [*_CHECKER.iter_errors(tree)]
    assert bool(found) == (wrong is not None)
    assert wrong is None or wrong in "\n".join(map(str, found))
