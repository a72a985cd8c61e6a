"""A user's file may extend others and refer to environment variables; what a run stores does neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.config import Config, load_config
from ray_ulysses.config.yaml_text import dump_yaml
from ray_ulysses.errors import ConfigError, Problem
from tests.unit.config.trees import small_tree

_VARIABLES = {
    "ROOT": "/corpora",
    "STEPS": "70",
    "JOB": "12",
    "EMPTY": "",
    "ODD": "a: b #",
    "CODE": "https://me:pw@host",
}


def _load(folder: Path, *overrides: str, **files: Any) -> Config:
    """Load ``top.yaml`` of these files; a value is a tree, or the text of a file."""
    for name, content in files.items():
        text = content if isinstance(content, str) else dump_yaml(content)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return load_config(folder / "top.yaml", overrides, environment=_VARIABLES)


def _problems(folder: Path, *overrides: str, **files: Any) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        _load(folder, *overrides, **files)
    return caught.value.problems


def test_a_file_changes_settings_of_the_file_that_it_extends(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    middle = {"extends": "shared/${NAME:-lowest}.yaml", "run": {"name": "middle", "seed": 3}}
    base = small_tree(tracking__tags={"a": "1"}, cluster__workers={"min": 2, "max": 6}, parallel__sp_size=2)
    (tmp_path / "shared/lowest.yaml").write_text(dump_yaml(base), encoding="utf-8")
    top = "extends: middle.yaml\nrun: {name: top}\ndata:\ncluster: {workers: 2}\ntracking: {tags: {b: '2'}}\n"
    config = _load(tmp_path, "run.stop_step=9", middle=middle, top=top)
    assert (config.run.name, config.run.seed, config.run.stop_step) == ("top", 3, 9)
    assert (config.data.path, config.cluster.workers.max, config.tracking.tags) == ("runs/corpus", 2, {"b": "2"})


@pytest.mark.parametrize(
    ("files", "path", "value"),
    [
        ({"top": {"extends": "none.yaml"}}, "extends", "none.yaml"),
        ({"top": {"extends": "top.yaml"}}, "extends", "top.yaml"),
        ({"top": {"extends": "b.yaml"}, "b": {"extends": "top.yaml"}}, "extends", "top.yaml"),
        ({"top": {"extends": "b.yaml"}, "b": "[1, 2]"}, "extends", "b.yaml"),
        ({"top": {"extends": ["b.yaml"]}}, "extends", "b.yaml"),
        ({"top": {"extends": "${UNSET}"}}, "extends", "${UNSET}"),
        ({"top": {"extends": "b.yaml"}, "b": "run: [\n"}, "b.yaml:2:1", ""),
        ({"top": {"extends": "b.yaml"}, "b": "run: {}\nrun: {}\n"}, "b.yaml:2", "run"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_cannot_be_extended_is_named(files: Any, path: str, value: str, tmp_path: Path) -> None:
    first = _problems(tmp_path, **files)[0]
    assert first.path == path and value in str(first) and first.hint


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("data: {path: '${ROOT}/${NAME:-code}'}", "data.path", "/corpora/code"),
        ("run:\n  stop_step: ${STEPS}", "run.stop_step", 70),
        ("run:\n  stop_step: ${UNSET:-80}", "run.stop_step", 80),
        ("run:\n  stop_step: ${EMPTY:-}", "run.stop_step", None),
        ("run: {name: '${JOB}'}", "run.name", "12"),
        ("run:\n  name: job-${JOB}", "run.name", "job-12"),
        ("tracking:\n  tags: {a: '${ODD}'}", "tracking.tags", {"a": "a: b #"}),
        ("tracking:\n  tags:\n    a: ${ODD}", "tracking.tags", {"a": "a: b #"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_variables_are_expanded_and_the_stored_configuration_has_their_values(
    text: str, path: str, value: object, tmp_path: Path
) -> None:
    top = f"extends: base.yaml\n{text}\n"
    config = _load(tmp_path, base=small_tree(), top=top)
    section, _, name = path.partition(".")
    assert getattr(getattr(config, section), name) == value
    for stored in (config.to_yaml(), config.as_written()):
        (tmp_path / "stored.yaml").write_text(stored, encoding="utf-8")
        assert load_config(tmp_path / "stored.yaml") == load_config(tmp_path / "stored.yaml", environment={}) == config


def test_overrides_refer_to_variables_too(tmp_path: Path) -> None:
    overrides = ("data.path=${ROOT}/x", "run.stop_step=${STEPS}", "run.name='${JOB}'")
    config = _load(tmp_path, *overrides, top=small_tree(data__path="${UNSET}/x"))
    assert (config.data.path, config.run.stop_step, config.run.name) == ("/corpora/x", 70, "12")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("${UNSET}/x", "UNSET is not set; set it, or write ${UNSET:-default}"),
        ("${HF_TOKEN}", "cluster.secrets_file"),
        ("${MY_API_KEY:-a}", "MY_API_KEY looks like a secret"),
        ("${pg_password}", "looks like a secret"),
        ("${CODE}/x", "may not contain credentials"),
        ("${STEPS:?}/x", "only ${NAME} and ${NAME:-default} are expanded"),
        ("${STEPS", "only ${NAME} and ${NAME:-default} are expanded"),
        ("$ROOT/x", "only ${NAME} and ${NAME:-default} are expanded"),
    ],
)
def test_a_reference_that_cannot_be_expanded_is_refused_once_with_the_setting(
    value: str, said: str, tmp_path: Path
) -> None:
    (problem,) = _problems(tmp_path, top=small_tree(tracking__tags={"place": value}))
    assert problem.path == "tracking.tags.place" and said in str(problem) and "pw" not in str(problem)
    # A setting of another type isn't reported for its type as well.
    found = _problems(tmp_path, top=small_tree(run__stop_step=value, data__context_tokens=0))
    assert {problem.path for problem in found} == {"run.stop_step", "data.context_tokens"}


@pytest.mark.parametrize("name", ["TOKENIZER", "MAX_TOKENS", "KEYWORDS", "CORPUS"])
def test_a_name_without_a_secret_is_expanded(name: str, tmp_path: Path) -> None:
    (tmp_path / "top.yaml").write_text(dump_yaml(small_tree(data__path=f"${{{name}}}")), encoding="utf-8")
    assert load_config(tmp_path / "top.yaml", environment={name: "there"}).data.path == "there"


def test_a_stored_configuration_neither_extends_nor_refers(tmp_path: Path) -> None:
    stored = {"extends": "b.yaml", **small_tree(data__path="${ROOT}")}
    (tmp_path / "config.yaml").write_text(dump_yaml(stored), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.yaml")
    assert {problem.path for problem in caught.value.problems} == {"extends", "data.path"}
