from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.config import Config, load_config, parse_config
from ray_ulysses.config.schema import section_models, setting_paths
from ray_ulysses.errors import ConfigError, UserError
from tests.unit.config.trees import small_tree


def errors_of(tree: object, overrides: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree, overrides)
    return [str(problem) for problem in caught.value.problems]


def test_the_smallest_tree_is_valid_and_defaults_are_filled_in() -> None:
    config = parse_config(small_tree())
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.run_dir == Path("runs/first")
    assert config.dp_size == 6
    assert config.tracking_uri == "sqlite:///runs/mlflow.db"


def test_the_stored_configuration_loads_into_an_equal_one(tmp_path: Path) -> None:
    config = parse_config(
        small_tree(
            tracking__tags={"owner": "no", "when": "2026-01-31"},
            optimizer__lr=3e-4,
            parallel__allowed_sp=[1, 2],
        )
    )
    stored = tmp_path / "config.yaml"
    stored.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(stored) == config


def test_every_setting_is_written_into_the_stored_configuration() -> None:
    stored = parse_config(small_tree()).model_dump(mode="json")
    assert {f"{section}.{name}" for section, values in stored.items() for name in values} == set(setting_paths())


def test_every_setting_is_documented_and_a_default_says_why() -> None:
    for section, model in section_models().items():
        assert model.__doc__
        for name, info in model.model_fields.items():
            assert info.description, f"{section}.{name} has no docstring"
            assert (
                info.is_required()
                or name == "ring_size"
                or "Default" in info.description
                or "null" in (info.description)
            ), f"{section}.{name} does not say its default's reason"


def test_a_configuration_can_not_be_changed() -> None:
    config = parse_config(small_tree())
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 3  # type: ignore[misc]


def test_relative_paths_become_absolute_and_absolute_ones_stay() -> None:
    config = parse_config(small_tree(data__path="/corpora/a")).with_absolute_paths(Path("/home/me"))
    assert (config.run.storage, config.data.path) == ("/home/me/runs", "/corpora/a")


def test_what_each_node_and_each_worker_opens_is_absolute_too() -> None:
    """A worker has a working directory of its own, in which a relative database or swap folder is another one."""
    tree = small_tree(memory__nvme_path="swap", tracking__uri="sqlite:///mlflow.db", checkpoint__storage="kept")
    config = parse_config(tree).with_absolute_paths(Path("/home/me"))
    assert config.memory.nvme_path == "/home/me/swap"
    assert config.tracking.uri == config.tracking_uri == "sqlite:////home/me/mlflow.db"
    assert config.checkpoint.storage == "/home/me/kept"
    for uri in ("sqlite:////srv/mlflow.db", "http://mlflow:5000"):
        assert parse_config(small_tree(tracking__uri=uri)).with_absolute_paths(Path("/home/me")).tracking.uri == uri


def test_all_errors_of_a_file_come_at_once(tmp_path: Path) -> None:
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
    paths = [problem.path for problem in caught.value.problems]
    assert paths == [
        "bad.yaml:4",
        "--set",
        "run.storage",
        "run.seed",
        "run.stop_step",
        "run.namee",
        "model.init",
        "data.context_tokens",
        "optimiser",
        "parallel.sp_size",
    ]
    assert str(caught.value).startswith(f"{file}: 10 problems\n  - bad.yaml:4='data': the key is given twice")


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("memory.attention_chunks", "memory.attention_head_groups"),
        ("run.stop_stpe", "run.stop_step"),
        ("run.stop-step", "run.stop_step"),
        ("parallel.workers", "cluster.workers"),
        ("optimizer.warmup_steps", "schedule.warmup_steps"),
        ("paralll.sp_size", "parallel"),
        ("zzz.zzz", None),
        ("run.zzz", None),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(path: str, nearest: str | None) -> None:
    (error,) = errors_of(small_tree(), (f"{path}=1",))
    assert "there is no such setting" in error
    assert (f"(did you mean '{nearest}'?)" in error) == (nearest is not None)
    assert ("did you mean" in error) == (nearest is not None)


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("run.name=a/b", "run.name='a/b': may have only letters, digits"),
        ("run.name=..", "run.name='..': may have only letters, digits"),
        ("run.name=12", "run.name=12: must be text; write it in quotes"),
        ("run.storage=", "run.storage=null: must be text"),
        (
            "run.storage=ftp://host/runs",
            "run.storage='ftp://host/runs': ftp:// is not a storage; give a path, file://, s3://bucket/prefix",
        ),
        *(
            (f"run.storage={root}/x", f"run.storage='{root}/x': is on a file system of the kernel")
            for root in ("/proc", "/sys")
        ),
        (
            "run.storage=~nobody-knows/x",
            "run.storage='~nobody-knows/x': names the home directory of a user that this machine does not know",
        ),
        ("model.path=''", "model.path='': must not be empty; give a text"),
        ("run.seed=-1", "run.seed=-1: must be at least 0; use 0 or more"),
        ("run.stop_step=1.5", "run.stop_step=1.5: must be a whole number"),
        ("model.dtype=fp16", "model.dtype='fp16': must be 'bf16' or 'fp32'; use one of these"),
        (
            "model.config={a: 1}",
            "model.config={'a': 1}: an inline model configuration must have a model_type",
        ),
        ("data.eval_fraction=0.6", "data.eval_fraction=0.6: must be at most 0.5"),
        ("data.context_tokens=true", "data.context_tokens=true: must be a whole number"),
        ("data.rows_per_step='4'", "data.rows_per_step='4': must be a whole number; write a number without"),
        ("parallel.sp_size=0", "parallel.sp_size=0: must be at least 1"),
        ("parallel.ring_size=0", "parallel.ring_size=0: must be at least 1"),
        (
            "parallel.allowed_sp=[2, 1]",
            "parallel.allowed_sp=[2, 1]: must be different numbers in ascending order",
        ),
        *(
            (
                f"memory.offload_activations=[{first}, layer_inputs]",
                f"memory.offload_activations=['{first}', 'layer_inputs']: must be different kinds in the order "
                "layer_inputs, attention_outputs; write one of them, both, or []",
            )
            for first in ("attention_outputs", "layer_inputs")
        ),
        ("parallel.allowed_sp=[]", "parallel.allowed_sp=[]: must be different numbers"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1=1.0: must be below 1.0"),
        ("optimizer.lr=.inf", "optimizer.lr=inf: must be a finite number"),
        ("memory.gradient_checkpointing=no", "memory.gradient_checkpointing='no': must be true or false"),
        *(
            (f"tracking.uri={uri}", f"tracking.uri={uri!r}: must be the URI of an MLflow server")
            for uri in ("mlflow", "http://", "https:///page", "http://:5000", "http://mlflow:port", "http://[::1")
        ),
        *(
            (f"cluster.address={url}", f"cluster.address={url!r}: is not the address of a Ray head; give its host:port")
            for url in ("foo://", "http://head:8265", "ray://10.0.0.1:10001", ":6379", "head:port", "a head:6379")
        ),
        ("tracking.tags={a: 1}", "tracking.tags.a=1: must be text; write it in quotes"),
        ("cluster.gpus_per_worker=2", "cluster.gpus_per_worker=2: must be at most 1"),
        (
            "cluster.workers=",
            "cluster.workers=null: must be a whole number from 1 to 65,536, or a mapping of min and max",
        ),
    ],
)
def test_a_bad_value_is_refused_by_path_value_rule_and_hint(override: str, error: str) -> None:
    (found,) = errors_of(small_tree(), (override,))
    assert found.startswith(error)
    assert "; " in found


@pytest.mark.parametrize(
    "override",
    [
        *(f"cluster.address={one}" for one in ("auto", "head:6379", "'[::1]:6379'", "head.a-b")),
        *(
            f"tracking.uri={one}"
            for one in ("http://mlflow:5000", "https://host/path", "http://[::1]:5000", "databricks")
        ),
        "run.storage=/processed/runs",
    ],
)
def test_an_address_or_directory_that_may_exist_is_taken(override: str) -> None:
    assert parse_config(small_tree(), (override,))


def test_betas_of_the_wrong_length_are_refused() -> None:
    assert any(error.startswith("optimizer.betas") for error in errors_of(small_tree(), ("optimizer.betas=[0.9]",)))
    assert errors_of(small_tree(), ("optimizer.betas=[0.9, 0.9, 0.9]",))[0].startswith("optimizer.betas")


@pytest.mark.parametrize(
    ("section", "name", "value", "expected"),
    [
        *(("data", name, 10**9, f"data.{name}=1000000000: must be at most") for name in ("epochs", "rows_per_step")),
        ("data", "balance_steps", 10**8, "data.balance_steps=100000000: must be at most 1024; use 1024 or less"),
        ("parallel", "sp_size", 10**9 + 7, "parallel.sp_size=1000000007: must be at most 65536"),
        ("cluster", "workers", 10**9, "cluster.workers=1000000000: must be a whole number from 1 to 65,536"),
        ("data", "sources", [], "data.sources=[]: must have at least 1; give one, or null"),
        ("data", "sources", [{"path": "a", "weight": 1e308}], "data.sources.0.weight=1e+308: must be at most"),
        ("data", "sources", [{"path": "a", "weight": -1}], "data.sources.0.weight=-1: must be at least 0.0"),
    ],
)
def test_what_would_exhaust_a_machine_or_has_no_value_is_refused_in_words(
    section: str, name: str, value: object, expected: str
) -> None:
    (error,) = errors_of(
        small_tree(**{f"{section}__{name}": value, **({"data__path": None} if name == "sources" else {})})
    )
    assert error.startswith(expected)


def test_a_home_that_nobody_knows_is_refused() -> None:
    tree = small_tree(run__storage="~nobody-knows/runs", data__path="~nobody-knows/corpus")
    tree["cluster"]["secrets_file"] = "~nobody-knows/secrets"
    rule = "names the home directory of a user that this machine does not know; write an absolute path"
    assert errors_of(tree) == [
        f"run.storage='~nobody-knows/runs': {rule}",
        f"data.path='~nobody-knows/corpus': {rule}",
        f"cluster.secrets_file='~nobody-knows/secrets': {rule}",
    ]


@pytest.mark.parametrize("tree", [[], 3, "run"])
def test_a_file_without_sections_is_refused(tree: object) -> None:
    (error,) = errors_of(tree)
    assert "the file must hold sections such as run, model and data" in error


@pytest.mark.parametrize("tree", [None, {}, {"run": None, "model": None}])
def test_an_empty_file_is_told_each_setting_that_it_needs(tree: object) -> None:
    paths = [error.partition(":")[0] for error in errors_of(tree)]
    assert paths == [
        "run.name",
        "run.storage",
        "data.context_tokens",
        "data.rows_per_step",
        "cluster.workers",
        "model.path",
        "data.path",
    ]


def test_a_missing_file_is_the_users_error_and_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml'?: the file does not exist"):
        load_config(tmp_path / "none.yaml")


def test_config_needs_its_sections_even_without_the_loader() -> None:
    with pytest.raises(ValueError, match="run"):
        Config.model_validate({})
