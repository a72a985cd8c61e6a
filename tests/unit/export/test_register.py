"""The whole command ``export --mlflow``, to its end."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ray_ulysses.cli import app, run
from ray_ulysses.data.tokenize.tokenizers import ByteTokenizer
from ray_ulysses.tracking.mlflow_client import open_client
from ray_ulysses.tracking.mlflow_models import KEY_TAG
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity
from tests.unit.export.runs import TINY_LLAMA, write_checkpoint, write_config

TEXT = "def f(): ..."


@pytest.mark.slow
def test_an_export_is_registered_loads_from_mlflow_and_its_uri_is_in_the_json(
    tmp_path: Path, mlflow_tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, uri = tmp_path / "run", f"sqlite:///{tmp_path}/mlflow.db"
    write_config(folder, TINY_LLAMA.to_diff_dict() | {"model_type": "llama"})
    write_checkpoint(folder, AutoModelForCausalLM.from_config(TINY_LLAMA))
    shutil.copy(mlflow_tables, tmp_path / "mlflow.db")
    client = open_client(uri)
    experiment = client.create_experiment("e", artifact_location=(tmp_path / "mlartifacts").as_uri())
    key = uuid.uuid4().hex
    run_id = client.create_run(experiment, tags={KEY_TAG: key}).info.run_id
    TrackingIdentity(uri=uri, experiment="e", key=key, run_id=run_id, experiment_id=experiment).save(folder)
    arguments = ["export", str(folder), "--mlflow", "tiny", "--tokenizer", "bytes", "--json"]
    for version in ("1", "2"):
        # Registering again needs no second export.
        code = run(app, arguments)
        said = capsys.readouterr()
        assert code == 0, said.err
        found = json.loads(said.out)
        assert (found["mlflow_model"], found["was_there"]) == (f"models:/tiny/{version}", version == "2")
        made = client.get_model_version("tiny", version)
        assert (made.run_id, made.tags) == (run_id, {"step": "4"})
    loaded = mlflow.transformers.load_model(made.source, return_type="components")
    exported = AutoModelForCausalLM.from_pretrained(found["out"], dtype="auto").state_dict()
    ours = loaded["model"].state_dict()
    assert ours.keys() == exported.keys() and all(torch.equal(ours[name], exported[name]) for name in exported)
    assert np.array_equal(loaded["tokenizer"](TEXT)["input_ids"], ByteTokenizer().encode_all([TEXT])[0])
