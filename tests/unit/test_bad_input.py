"""Bad input: each is refused with exit code 2 before Ray is started, says the way out, and nothing is written over."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_ulysses.cli import app, run
from ray_ulysses.config import Config
from tests.distributed.run_case import make_config, make_corpus

Refused = Callable[..., str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Ray was started before the input was refused")

    monkeypatch.setattr(ray, "init", refuse)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must be refused, and returns what it says; `plan` says it in its report."""

    def call(*arguments: object) -> str:
        code = run(app, [str(argument) for argument in arguments])
        said = " ".join("".join(capsys.readouterr()).split())
        assert code == 2, said
        assert "Traceback" not in said
        return said

    return call


def write(folder: Path, config: Config | str) -> Path:
    path = folder / "config.yaml"
    path.write_text(config if isinstance(config, str) else config.to_yaml())
    return path


def files(folder: Path) -> dict[str, bytes]:
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.parent.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_every_wrong_setting_is_named_at_once_with_the_nearest_name(
    refused: Refused, corpus: Path, tmp_path: Path
) -> None:
    text = make_config(tmp_path / "runs", corpus).to_yaml().replace("sp_size: 2", "sp_sise: 2")
    said = refused("train", write(tmp_path, text), "--set", "optimizer.lr=-1", "--set", "dta.path=x")
    assert "parallel.sp_sise" in said
    assert "did you mean" in said and "sp_size" in said
    assert "optimizer.lr" in said
    assert "dta" in said and "data" in said
    assert not (tmp_path / "runs").exists()


def test_a_worker_count_that_is_no_multiple_of_sp_size(refused: Refused, corpus: Path, tmp_path: Path) -> None:
    path = write(tmp_path, make_config(tmp_path / "runs", corpus))
    said = refused("train", path, "--set", "cluster.workers=3")
    assert "parallel.sp_size=2" in said and "cluster.workers=3" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_ring_that_leaves_more_ranks_than_heads(refused: Refused, corpus: Path, tmp_path: Path, command: str) -> None:
    path = write(tmp_path, make_config(tmp_path / "runs", corpus))
    eight = ("--set", "cluster.workers=8", "--set", "parallel.sp_size=8")
    said = refused(command, path, *eight, "--set", "parallel.ring_size=1")
    assert "parallel.ring_size=1" in said and "4 attention heads" in said and "use 2, 4, 8, or null" in said
    said = refused(command, path, *eight, "--set", "parallel.ring_size=3")
    assert "parallel.ring_size=3: does not divide parallel.sp_size=8; use 1, 2, 4, 8" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("sp_size", [3, 8])
def test_a_resume_whose_slices_do_not_fit_the_runs_rows(
    refused: Refused, corpus: Path, tmp_path: Path, command: str, sp_size: int
) -> None:
    config = make_config(tmp_path / "runs", corpus)
    started_run(config)
    before = files(config.run_dir)
    change = ("--set", f"parallel.sp_size={sp_size}", "--set", f"cluster.workers={sp_size}")
    said = refused(command, write(tmp_path, config), *change)
    assert f"parallel.sp_size={sp_size}" in said and "multiples of 4" in said
    assert "use 1, 2, 4 to resume" in said
    assert "parallel.allowed_sp" in said and "new run" in said
    assert files(config.run_dir) == before


def test_a_missing_tokenizer_source_or_an_empty_corpus(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources/a.txt").write_text("some text")
    out = tmp_path / "out"
    said = refused("prepare", tmp_path / "sources", "--out", out, "--tokenizer", tmp_path / "nothing")
    assert "tokenizer" in said and str(tmp_path / "nothing") in said
    assert not out.exists()
    said = refused("prepare", tmp_path / "absent", "--out", out, "--tokenizer", "bytes")
    assert str(tmp_path / "absent") in said
    assert not out.exists()
    (tmp_path / "empty").mkdir()
    said = refused("prepare", tmp_path / "empty", "--out", out, "--tokenizer", "bytes")
    assert str(tmp_path / "empty") in said and "nothing was written" in said
    assert not out.exists()
    said = refused("prepare", tmp_path / "sources", "--out", out, "--tokenizer", "bytes", "--kind", "pdf")
    assert "--kind" in said and "parquet" in said


def test_a_missing_model_or_one_without_weights(refused: Refused, corpus: Path, tmp_path: Path) -> None:
    path = write(tmp_path, make_config(tmp_path / "runs", corpus))
    pretrained = ("--set", "model.init=pretrained")
    said = refused("train", path, *pretrained, "--set", f"model.path={tmp_path}/no/model")
    assert "model.path" in said and "no such directory" in said
    folder = tmp_path / "model"
    folder.mkdir()
    said = refused("train", path, *pretrained, "--set", f"model.path={folder}")
    assert "config.json" in said
    config = make_config(tmp_path / "runs", corpus).model.config
    (folder / "config.json").write_text(json.dumps(config))
    said = refused("train", path, *pretrained, "--set", f"model.path={folder}")
    assert "safetensors" in said and "model.init: random" in said
    # An adapter as an export without --merge leaves it.
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_bytes(b"{}")
    said = refused("train", path, *pretrained, "--set", f"model.path={folder}")
    assert "holds an adapter without its model" in said and "export --merge" in said
    (folder / "adapter_config.json").unlink()
    said = refused("train", path, *pretrained, "--set", f"model.path={folder}")
    assert "holds no *.safetensors weights (model.safetensors, or model.safetensors.index.json with its files)" in said
    assert not (tmp_path / "runs").exists()


def test_a_missing_corpus_or_a_damaged_shard_of_it(refused: Refused, corpus: Path, tmp_path: Path) -> None:
    path = write(tmp_path, make_config(tmp_path / "runs", corpus))
    said = refused("train", path, "--set", f"data.path={tmp_path}/nothing")
    assert "data.path" in said and "prepare" in said
    damaged = make_corpus(tmp_path)
    (shard,) = (damaged / "shards").glob("*.tokens")
    content = shard.read_bytes()
    for broken in (content[: len(content) // 2], b"\0" * len(content)):
        shard.write_bytes(broken)
        for command in ("plan", "train"):
            said = refused(command, path, "--set", f"data.path={damaged}")
            assert shard.name in said
    assert not (tmp_path / "runs").exists()


def test_a_token_id_beyond_the_vocabulary(refused: Refused, corpus: Path, tmp_path: Path) -> None:
    text = make_config(tmp_path / "runs", corpus).to_yaml().replace("vocab_size: 264", "vocab_size: 100")
    path = write(tmp_path, text)
    said = refused("train", path)
    assert "vocab_size=100" in said and "token id" in said
    assert run(app, ["plan", str(path)]) == 2
    assert not (tmp_path / "runs").exists()


def test_a_storage_that_can_not_be_written(refused: Refused, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    path = write(tmp_path, make_config(tmp_path / "file/runs", corpus))
    said = refused("train", path)
    assert "run.storage" in said
    assert (tmp_path / "file").read_text() == "not a directory"


@pytest.mark.parametrize(
    ("setting", "value"),
    [("run.seed", "7"), ("model.dtype", "bf16"), ("data.context_tokens", "128"), ("data.rows_per_step", "4")],
)
def test_a_resume_that_contradicts_the_run(
    refused: Refused, corpus: Path, tmp_path: Path, setting: str, value: str
) -> None:
    config = make_config(tmp_path / "runs", corpus)
    started_run(config)
    before = files(config.run_dir)
    said = refused("train", write(tmp_path, config), "--set", f"{setting}={value}")
    assert setting in said and "run.name" in said and "new run" in said
    assert files(config.run_dir) == before


def test_a_resume_on_another_corpus(refused: Refused, corpus: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path / "runs", make_corpus(tmp_path / "own"))
    started_run(config)
    before = files(config.run_dir)
    said = refused("train", write(tmp_path, config), "--set", f"data.path={corpus}")
    assert "data.path" in said and "run.name" in said
    assert files(config.run_dir) == before


def test_two_live_runs_of_the_same_name_and_storage(refused: Refused, corpus: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path / "runs", corpus)
    started_run(config)
    before = files(config.run_dir)
    hold = (
        "import sys, time, pathlib; from ray_ulysses.storage import run_claim; "
        "run_claim(pathlib.Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(config.run_dir)], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            said = refused("train", write(tmp_path, config))
        finally:
            holder.kill()
    assert f"process {holder.pid}" in said and "since" in said and "run.name" in said
    assert files(config.run_dir) == before


def test_inspecting_what_is_no_run(refused: Refused, tmp_path: Path) -> None:
    said = refused("inspect", tmp_path)
    assert str(tmp_path) in said and "config.yaml" in said


@pytest.mark.parametrize("command", ["prepare", "plan", "train", "inspect", "doctor"])
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run(app, [command, "--help"]) == 0
    assert f"Example: ray-ulysses {command}" in " ".join(capsys.readouterr().out.split())


def test_plan_says_layout_rows_padding_and_memory(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    path = write(tmp_path, make_config(tmp_path / "runs", corpus))
    assert run(app, ["plan", str(path)]) == 0
    said = capsys.readouterr().out
    for word in ("dp 2 x sp 2", "other worker counts", "multiples of 2", "rows", "padding", "memory per rank"):
        assert word in said
    assert run(app, ["plan", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layout"]["dp_size"] == 2
    assert report["problems"] == []
    assert not (tmp_path / "runs").exists()


def started_run(config: Config) -> None:
    """Leave what a run's driver leaves before its first step."""
    from ray_ulysses.run.preflight import prepare_run
    from tests.distributed.run_case import claim_run

    claim_run(prepare_run(config, Path("/")))
