"""Relative paths in a Ray job are refused, with the absolute path to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.config import parse_config
from ray_ulysses.config.job_paths import refuse_relative_in_job, relative_path_problems
from ray_ulysses.errors import UserError
from tests.unit.config.trees import small_tree

JOB = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
HOME = Path("/home/ray")
UNPACKED = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_0f")
ABSOLUTE = {"run__storage": "/runs", "data__path": "/corpus"}


def test_every_setting_that_is_a_path_is_refused_at_once_with_the_path_to_write(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    relative = {
        "run.storage": "runs", "model.path": "model", "model.resume_from": "runs/first", "data.path": "corpus",
        "memory.nvme_path": "swap", "checkpoint.storage": "kept", "tracking.uri": "sqlite:///mlflow.db",
    }  # fmt: skip
    tree = small_tree(**{path.replace(".", "__"): value for path, value in relative.items()})
    found = relative_path_problems(parse_config(tree), tmp_path, JOB)
    assert {problem.path: problem.value for problem in found} == relative
    assert f"{tmp_path}/runs" in found[0].hint
    (problem,) = relative_path_problems(parse_config(small_tree(data__path="/corpus")), UNPACKED, JOB)
    assert str(UNPACKED) not in problem.hint, "the unpacked files disappear with the job"
    tree = small_tree(run__storage="/runs", data__path=None, data__sources=[{"path": "/a"}, {"path": "b"}])
    assert [one.path for one in relative_path_problems(parse_config(tree), HOME, JOB)] == ["data.sources.1.path"]


@pytest.mark.parametrize(
    "changes",
    [
        {"run__storage": "/mnt/runs/", "data__path": "~/corpus", "model__path": "owner/name"},
        {"checkpoint__storage": "s3://bucket/kept", "tracking__uri": "http://mlflow:5000"},
        {"data__path": "/mnt/corpora/../corpus/", "checkpoint__storage": "/mnt//kept"},
        *({"model__resume_from": one} for one in ("/runs/base/", "/base/checkpoints/step-00000200", "mlflow:base")),
    ],
    ids=lambda changes: " ".join(changes.values()),
)
def test_absolute_paths_homes_stores_and_hub_ids_pass(changes: dict[str, Any]) -> None:
    assert relative_path_problems(parse_config(small_tree(**{**ABSOLUTE, **changes})), HOME, JOB) == ()


def test_prepare_and_export_refuse_a_relative_directory_before_they_read_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    (tmp_path / "config.yaml").write_text("nothing of use")
    for command in (["prepare", "no-such-source", "--tokenizer", "bytes"], ["export", str(tmp_path)]):
        assert run(app, [*command, "--out", "corpus"]) == 2
        assert "error: --out='corpus': is relative" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"write {tmp_path}/corpus"):
        refuse_relative_in_job("--out", Path("corpus"))
    for absolute in ("/corpus", "~/corpus"):
        refuse_relative_in_job("--out", Path(absolute))
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    refuse_relative_in_job("--out", Path("corpus"))
    assert relative_path_problems(parse_config(small_tree()), HOME, {"RAY_ADDRESS": "head:6379"}) == ()
