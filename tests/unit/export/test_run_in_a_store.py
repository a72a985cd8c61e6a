"""Commands that read a run work on a run in an object store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_command
from ray_ulysses.run_names import REPORT_FILE
from ray_ulysses.storage import LocalStore
from ray_ulysses.storage.location import ObjectLocation
from ray_ulysses.storage.place import open_store, place_of
from tests.distributed.run_case import make_corpus
from tests.s3_server import S3Server
from tests.unit.export.runs import TINY_LLAMA, write_checkpoint, write_config


@pytest.fixture
def run(s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectLocation:
    """Copy a run with a checkpoint from disk to an object store."""
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "node"))
    local = tmp_path / "run"
    write_config(local, TINY_LLAMA.to_diff_dict() | {"model_type": "llama"})
    write_checkpoint(local, AutoModelForCausalLM.from_config(TINY_LLAMA))
    place = place_of(s3.uri(prefix)) / "run"
    assert isinstance(place, ObjectLocation)
    there = open_store(place)
    for path in sorted(local.rglob("*")):
        if path.is_file():
            key = str(path.relative_to(local))
            there.create(key, [LocalStore(local).read_whole(key)])
    return place


def test_a_run_in_a_store_is_exported_evaluated_and_reported(
    run: ObjectLocation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run_command(app, [*map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    store = open_store(run)
    place = run / "export/step-00000004"
    code, out, err = ask("export", run)
    assert code == 0 and f"copying to {place}" in err, err
    names = {key.rpartition("/")[2] for key in store.list("export/step-00000004")}
    assert {"config.json", "model.safetensors", "ray_ulysses_export.json"} <= names
    assert not list((tmp_path / "node" / "exports").rglob("*.safetensors")), "the staged copy is deleted"
    code, out, err = ask("export", run)
    assert code == 0 and "copying to" not in err, "an identical export exists"
    code, out, err = ask("export", run, "--dtype", "bf16")
    assert code == 2 and "add --overwrite to replace it" in err
    code, out, err = ask("export", run, "--out", tmp_path / "out")
    assert code == 0 and (tmp_path / "out" / "model.safetensors").is_file()

    corpus = make_corpus(tmp_path / "data", ("bisect.py",))
    code, out, err = ask("evaluate", run, "--task", "loss", "--lengths", 32, "--max-tokens", 500, "--data", corpus)
    assert code == 0, err
    found = json.loads(store.read_whole("evaluation/step-00000004/evaluation.json"))
    assert found["step"] == 4 and found["position_loss"]["loss"] > 0

    code, out, err = ask("report", run)
    assert code == 0, err
    page = store.read_whole(REPORT_FILE)
    assert page.startswith(b"<!") and b"position" in page
    code, out, err = ask("inspect", run, "--checkpoints", "--json")
    assert code == 0 and [one["step"] for one in json.loads(out)["checkpoints"]] == [4]
    code, out, err = ask("inspect", place_of(str(run)).parent / "nobody")
    assert code == 2 and "is not a run directory" in err
