from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.config import load_config, parse_config
from ray_ulysses.config.schema import section_models
from ray_ulysses.errors import ConfigError, Problem
from tests.configuration_page import PAGE, anchor, render_reference
from tests.unit.config.trees import setting_paths, small_tree


def problems_of(tree: object, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree, overrides)
    return caught.value.problems


def test_the_stored_configuration_holds_every_setting_and_loads_into_an_equal_one(tmp_path: Path) -> None:
    tags = {"owner": "no", "when": "2026-01-31"}
    config = parse_config(small_tree(tracking__tags=tags, optimizer__lr=3e-4, parallel__allowed_sp=[1, 2]))
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml") == config
    stored = config.model_dump(mode="json")
    assert {f"{section}.{name}" for section, values in stored.items() for name in values} == set(setting_paths())


def test_every_setting_and_default_is_documented() -> None:
    for section, model in section_models().items():
        assert model.__doc__
        for name, info in model.model_fields.items():
            text = info.description
            assert text, f"{section}.{name} has no docstring"
            has_reason = info.is_required() or name == "ring_size" or "Default" in text or "null" in text
            assert has_reason, f"the description of {section}.{name} does not mention the default"


def test_paths_that_workers_open_become_absolute() -> None:
    tree = small_tree(memory__nvme_path="swap", tracking__uri="sqlite:///mlflow.db", checkpoint__storage="kept")
    config = parse_config(tree).with_absolute_paths(Path("/home/me"))
    assert (config.run.storage, config.data.path) == ("/home/me/runs", "/home/me/runs/corpus")
    assert (config.memory.nvme_path, config.checkpoint.storage) == ("/home/me/swap", "/home/me/kept")
    assert config.tracking.uri == config.tracking_uri == "sqlite:////home/me/mlflow.db"
    for uri in ("sqlite:////srv/mlflow.db", "http://mlflow:5000"):
        assert parse_config(small_tree(tracking__uri=uri)).with_absolute_paths(Path("/home/me")).tracking.uri == uri


def test_all_errors_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        "run: {name: first, namee: again, seed: yes}\n"
        "model: {init: randm}\n"
        "data: {path: c, context_tokens: 0, rows_per_step: 2}\n"
        "data: {path: c, context_tokens: 0, rows_per_step: 2}\n"
        "parallel: {sp_size: 3}\n"
        "optimiser: {}\n"
        "cluster: {workers: 4}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["run.stop_step=soon", "nonsense"])
    assert [problem.path for problem in caught.value.problems] == [
        *("bad.yaml:4", "--set", "run.storage", "run.seed", "run.stop_step", "run.namee", "model.init"),
        *("data.context_tokens", "optimiser", "parallel.sp_size"),
    ]
    assert str(caught.value).startswith(f"{file}: 10 problems\n  - bad.yaml:4='data': the key occurs twice")


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("run.stop-step", "run.stop_step"),
        ("parallel.workers", "cluster.workers"),
        ("paralll.sp_size", "parallel"),
        ("zzz.zzz", None),
        ("run.zzz", None),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(path: str, nearest: str | None) -> None:
    (problem,) = problems_of(small_tree(), f"{path}=1")
    assert ("did you mean" in str(problem)) == (nearest is not None)
    assert nearest is None or f"(did you mean '{nearest}'?)" in str(problem)


@pytest.mark.parametrize(
    "override",
    [
        *("run.name=a/b", "run.name=..", "run.name=12", "run.storage=", "run.storage=ftp://host/runs"),
        *("run.storage=/proc/x", "run.storage=/sys/x", "run.storage=~nobody-knows/x", "data.path=~nobody-knows/x"),
        *("cluster.secrets_file=~nobody-knows/secrets", "model.path=''", "run.seed=-1", "run.stop_step=1.5"),
        *("model.dtype=fp16", "model.config={a: 1}", "data.eval_fraction=0.6", "data.context_tokens=true"),
        *("data.rows_per_step='4'", "parallel.sp_size=0", "parallel.ring_size=0", "parallel.allowed_sp=[2, 1]"),
        *("parallel.allowed_sp=[]", "memory.offload_activations=[attention_outputs, layer_inputs]"),
        *("memory.offload_activations=[layer_inputs, layer_inputs]", "optimizer.lr=.inf"),
        *("memory.gradient_checkpointing=no", "cluster.gpus_per_worker=2", "cluster.workers="),
        *(
            f"tracking.uri={uri}"
            for uri in ("mlflow", "http://", "https:///page", "http://:5000", "http://mlflow:port", "http://[::1")
        ),
        *(
            f"cluster.address={url}"
            for url in ("foo://", "http://head:8265", "ray://10.0.0.1:10001", ":6379", "head:port", "a head:6379")
        ),
        # Values that would exhaust a machine's memory.
        *("data.epochs=1000000000", "data.rows_per_step=1000000000", "data.balance_steps=100000000"),
        *("parallel.sp_size=1000000007", "cluster.workers=1000000000"),
    ],
)
def test_a_bad_value_is_refused_by_its_path_with_the_way_out(override: str) -> None:
    (problem,) = problems_of(small_tree(), override)
    assert problem.path == override.partition("=")[0] and problem.rule and problem.hint
    if problem.path == "data.balance_steps":
        assert str(problem) == "data.balance_steps=100000000: must be at most 1024; use 1024 or less"


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"optimizer__betas": [0.9, 1.0]}, "optimizer.betas.1"),
        ({"optimizer__betas": [0.9]}, "optimizer.betas.1"),
        ({"tracking__tags": {"a": 1}}, "tracking.tags.a"),
        ({"data__path": None, "data__sources": []}, "data.sources"),
        ({"data__path": None, "data__sources": [{"path": "a", "weight": 1e308}]}, "data.sources.0.weight"),
        ({"data__path": None, "data__sources": [{"path": "a", "weight": -1}]}, "data.sources.0.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_nested_value_is_reported_with_its_path(changes: dict[str, Any], path: str) -> None:
    assert [problem.path for problem in problems_of(small_tree(**changes))] == [path]


@pytest.mark.parametrize(
    "override",
    [
        *(f"cluster.address={one}" for one in ("auto", "head:6379", "'[::1]:6379'", "head.a-b")),
        *(f"tracking.uri={one}" for one in ("http://mlflow:5000", "https://host/path", "http://[::1]:5000")),
        *("tracking.uri=databricks", "run.storage=/processed/runs"),
    ],
)
def test_an_address_or_directory_that_may_exist_is_taken(override: str) -> None:
    assert parse_config(small_tree(), (override,))


@pytest.mark.parametrize("tree", [[], 3, "run"])
def test_a_file_without_sections_is_refused(tree: object, tmp_path: Path) -> None:
    (problem,) = problems_of(tree)
    assert "sections such as run, model and data" in str(problem)
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize("tree", [None, {}, {"run": None, "model": None}])
def test_each_required_setting_of_an_empty_file_is_reported(tree: object) -> None:
    assert [problem.path for problem in problems_of(tree)] == [
        *("run.name", "run.storage", "data.context_tokens", "data.rows_per_step", "cluster.workers"),
        *("model.path", "optimizer.lr", "data.path"),
    ]


def test_the_reference_page_is_current_and_has_an_anchor_for_every_setting() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == render_reference(), "run `make docs`"
    anchors = re.findall(r'<a id="([^"]+)">', page)
    assert len(anchors) == len(set(anchors))
    nested = {"model-adapter-rank", "data-sources-weight", "cluster-device-gib", "stages-lr"}
    assert nested <= set(anchors)
    for path in setting_paths():
        assert anchor(path) in anchors
        assert page.count(f"| [`{path}`](#{anchor(path)}) | ") == 1, path
