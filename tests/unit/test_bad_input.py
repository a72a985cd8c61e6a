from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from ray_ulysses.cli import app, run
from ray_ulysses.config import Config
from ray_ulysses.run.preflight import prepare_run
from tests.distributed.run_case import claim_run, make_config, make_corpus

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
    """Runs a command that must exit with code 2, and returns its output."""

    def call(*arguments: object, sets: tuple[str, ...] = ()) -> str:
        options = [word for one in sets for word in ("--set", one)]
        code = run(app, [*map(str, arguments), *options])
        said = " ".join("".join(capsys.readouterr()).split())
        assert code == 2, said
        assert "Traceback" not in said
        return said

    return call


def write(folder: Path, config: Config) -> Path:
    path = folder / "config.yaml"
    path.write_text(config.to_yaml())
    return path


@pytest.fixture
def file(corpus: Path, tmp_path: Path) -> Iterator[Path]:
    """A configuration of a run that never begins."""
    yield write(tmp_path, make_config(tmp_path / "runs", corpus))
    assert not (tmp_path / "runs").exists()


def files(folder: Path) -> dict[str, bytes]:
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.parent.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Config]:
    """A run as its driver leaves it before its first step; a command that is refused changes no file of it."""
    config = make_config(tmp_path / "runs", make_corpus(tmp_path / "own"))
    claim_run(prepare_run(config, Path("/")))
    before = files(config.run_dir)
    yield config
    assert files(config.run_dir) == before


def test_every_wrong_setting_is_named_at_once_with_the_nearest_name(refused: Refused, file: Path) -> None:
    file.write_text(file.read_text().replace("sp_size: 2", "sp_sise: 2"))
    said = refused("train", file, sets=("optimizer.lr=-1", "dta.path=x"))
    assert all(name in said for name in ("parallel.sp_sise", "did you mean", "sp_size", "optimizer.lr", "dta", "data"))


def test_a_missing_tokenizer_source_or_an_empty_corpus(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources/a.txt").write_text("some text")
    (tmp_path / "empty").mkdir()
    for source, tokenizer, named in (
        ("sources", tmp_path / "nothing", tmp_path / "nothing"),
        ("absent", "bytes", tmp_path / "absent"),
        ("empty", "bytes", tmp_path / "empty"),
    ):
        said = refused("prepare", tmp_path / source, "--out", tmp_path / "out", "--tokenizer", tokenizer)
        assert str(named) in said
        assert not (tmp_path / "out").exists()


def test_a_missing_model_or_one_without_weights(refused: Refused, corpus: Path, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def said(path: Path = folder) -> str:
        return refused("train", file, sets=("model.init=pretrained", f"model.path={path}"))

    missing = said(tmp_path / "no/model")
    assert "model.path" in missing and "no such directory" in missing
    folder.mkdir()
    assert "config.json" in said()
    (folder / "config.json").write_text(json.dumps(make_config(tmp_path / "runs", corpus).model.config))
    assert "safetensors" in said()
    # An adapter as an export without --merge leaves it.
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_bytes(b"{}")
    assert "export --merge" in said()
    (folder / "adapter_config.json").unlink()
    assert "safetensors" in said()


def test_a_missing_corpus_or_a_damaged_shard_of_it(refused: Refused, file: Path, tmp_path: Path) -> None:
    said = refused("train", file, sets=(f"data.path={tmp_path}/nothing",))
    assert "data.path" in said and "prepare" in said
    damaged = make_corpus(tmp_path)
    (shard,) = (damaged / "shards").glob("*.tokens")
    content = shard.read_bytes()
    for broken in (content[: len(content) // 2], b"\0" * len(content)):
        shard.write_bytes(broken)
        for command in ("plan", "train"):
            assert shard.name in refused(command, file, sets=(f"data.path={damaged}",))


def test_a_token_id_beyond_the_vocabulary(refused: Refused, file: Path) -> None:
    for command in ("plan", "train"):
        assert "vocab_size=100" in refused(command, file, sets=("model.config.vocab_size=100",))


def test_a_storage_that_can_not_be_written(refused: Refused, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    assert "run.storage" in refused("train", write(tmp_path, make_config(tmp_path / "file/runs", corpus)))
    assert (tmp_path / "file").read_text() == "not a directory"


def test_a_resume_that_contradicts_the_run(refused: Refused, started: Config, corpus: Path, tmp_path: Path) -> None:
    path = write(tmp_path, started)
    for change in ("run.seed=7", "model.dtype=bf16", "data.context_tokens=128", f"data.path={corpus}"):
        said = refused("train", path, sets=(change,))
        assert change.partition("=")[0] in said and "run.name" in said
    for command, sp_size in (("plan", 3), ("train", 8)):
        said = refused(command, path, sets=(f"parallel.sp_size={sp_size}", f"cluster.workers={sp_size}"))
        assert f"parallel.sp_size={sp_size}" in said and "use 1, 2, 4 to resume" in said


def test_two_live_runs_of_the_same_name_and_storage(refused: Refused, started: Config, tmp_path: Path) -> None:
    hold = (
        "import sys, time, pathlib; from ray_ulysses.storage import run_claim; "
        "run_claim(pathlib.Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", hold, str(started.run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            said = refused("train", write(tmp_path, started))
        finally:
            holder.kill()
    assert f"process {holder.pid}" in said and "run.name" in said
