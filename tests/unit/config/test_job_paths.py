"""A run whose paths mean something else at each submission of a Ray job is refused, with the paths to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.config import load_config, parse_config
from ray_ulysses.config.job_paths import refuse_relative_in_job, relative_path_problems
from ray_ulysses.errors import UserError
from tests.unit.config.trees import small_tree

JOB = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
HOME = Path("/home/ray")
UNPACKED = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_0f")
CONFIGS = Path(__file__).parents[3] / "configs"


def test_every_setting_that_is_a_path_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tree = small_tree(
        run__storage="runs", data__path="corpus", model__path="model", checkpoint__storage="kept",
        tracking__uri="sqlite:///mlflow.db", memory__nvme_path="swap", model__resume_from="runs/first",
    )  # fmt: skip
    found = relative_path_problems(parse_config(tree), tmp_path, JOB)
    assert {problem.path: problem.value for problem in found} == {
        "run.storage": "runs",
        "model.path": "model",
        "model.resume_from": "runs/first",
        "data.path": "corpus",
        "memory.nvme_path": "swap",
        "checkpoint.storage": "kept",
        "tracking.uri": "sqlite:///mlflow.db",
    }
    assert str(found[0]) == (
        "run.storage='runs': is relative, and a Ray job has a new working directory at each submission; write "
        f"{tmp_path}/runs, if every node can access it, or another absolute path"
    )


def test_sources_are_paths_too() -> None:
    tree = small_tree(run__storage="/runs", data__path=None, data__sources=[{"path": "/a"}, {"path": "b"}])
    assert [problem.path for problem in relative_path_problems(parse_config(tree), HOME, JOB)] == [
        "data.sources.1.path"
    ]


def test_what_a_job_has_unpacked_is_not_recommended() -> None:
    (problem,) = relative_path_problems(parse_config(small_tree(data__path="/corpus")), UNPACKED, JOB)
    assert problem.path == "run.storage"
    assert problem.hint == "write an absolute path that every node can access, such as /mnt/shared/runs"


def test_absolute_paths_homes_stores_and_hub_ids_pass() -> None:
    tree = small_tree(
        run__storage="/mnt/shared/runs", data__path="~/corpus", model__path="owner/name",
        checkpoint__storage="s3://bucket/kept", tracking__uri="http://mlflow:5000",
    )  # fmt: skip
    assert relative_path_problems(parse_config(tree), HOME, JOB) == ()


def test_an_absolute_path_may_be_written_in_any_way() -> None:
    tree = small_tree(
        run__storage="/mnt/shared/runs/", data__path="/mnt/shared/corpora/../corpus/", checkpoint__storage="/mnt//kept",
        model__resume_from="/mnt/shared/runs/base/",
    )  # fmt: skip
    assert relative_path_problems(parse_config(tree), HOME, JOB) == ()


@pytest.mark.parametrize("reference", ["/mnt/runs/base", "/mnt/runs/base/checkpoints/step-00000200", "mlflow:base"])
def test_a_checkpoint_that_is_named_absolutely_passes_without_its_step(reference: str) -> None:
    tree = small_tree(run__storage="/runs", data__path="/corpus", model__resume_from=reference)
    assert relative_path_problems(parse_config(tree), HOME, JOB) == ()


def test_outside_of_a_job_relative_paths_are_as_good_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    assert relative_path_problems(parse_config(small_tree()), HOME, {"RAY_ADDRESS": "head:6379"}) == ()
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    refuse_relative_in_job("--out", Path("corpus"))


def test_the_demo_is_refused_in_a_job() -> None:
    (demo,) = CONFIGS.glob("llama-tiny*_8k.yaml")
    found = relative_path_problems(load_config(demo, is_users=True), UNPACKED, JOB)
    assert {problem.path for problem in found} == {"run.storage", "data.path"}


def test_what_is_written_to_a_relative_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        refuse_relative_in_job("--out", Path("corpus"))
    assert str(refused.value).startswith("--out='corpus': is relative, and")
    assert f"write {tmp_path}/corpus" in str(refused.value)
    refuse_relative_in_job("--out", Path("/corpus"))
    refuse_relative_in_job("--out", Path("~/corpus"))


def test_prepare_and_export_refuse_it_before_they_read_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert run(app, ["prepare", "no-such-source", "--out", "corpus", "--tokenizer", "bytes"]) == 2
    assert "error: --out='corpus': is relative, and a Ray job has" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("nothing of use")
    assert run(app, ["export", str(tmp_path), "--out", "model"]) == 2
    assert "error: --out='model': is relative, and a Ray job has" in capsys.readouterr().err
