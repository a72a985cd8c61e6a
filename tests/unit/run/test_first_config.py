"""``init`` writes a configuration that plans, for a model, a context and a number of GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.config import load_config
from ray_ulysses.run.first_config import first_configs
from ray_ulysses.run.preflight import report_run
from tests.breadth import fast_only
from tests.unit.data.corpora import text_corpus, varied_texts

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
)  # fmt: skip


def sizes(kind: str, *values: int, **more: Any) -> dict[str, Any]:
    sizes = dict(zip(SIZES, values, strict=True))
    return {"model_type": kind, **sizes, "architectures": ["Any"], "torch_dtype": "bfloat16", **more}


# As on the hub, as far as the sizes go; context and GPUs are those of a first run.
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama-3-8b": (sizes("llama", 128256, 4096, 14336, 32, 32, 8, max_position_embeddings=8192), 131072, 8),
    "llama-3.1-70b": (
        sizes(
            "llama", 128256, 8192, 28672, 80, 64, 8, max_position_embeddings=131072, rope_theta=500000.0,
            rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192},
        ), 262144, 64,
    ),
    "qwen3-30b-a3b": (
        sizes("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, head_dim=128, max_position_embeddings=40960, num_experts=128,
              num_experts_per_tok=8, moe_intermediate_size=768), 65536, 16,
    ),
    "smollm3-3b": (sizes("smollm3", 128256, 2048, 11008, 36, 16, 4, max_position_embeddings=65536), 262144, 2),
    "granite-3.3-2b": (sizes("granite", 49152, 2048, 8192, 40, 32, 8, max_position_embeddings=131072), 131072, 1),
}  # fmt: skip


def directory(folder: Path, name: str) -> Path:
    """A model's directory as far as planning reads it."""
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODELS[name][0]))
    (path / "model.safetensors").write_bytes(b"")
    return path


def init(folder: Path, model: object, context: int, gpus: int, *more: str) -> int:
    options = ["--model", str(model), "--context", str(context), "--gpus", str(gpus), "--out", str(folder / "c.yaml")]
    return run(app, ["init", *options, *more])


@pytest.mark.parametrize("name", fast_only(MODELS, "smollm3-3b"))
def test_what_init_writes_plans_and_uses_every_gpu(tmp_path: Path, name: str) -> None:
    _, context, gpus = MODELS[name]
    assert init(tmp_path, directory(tmp_path, name), context, gpus) == 0
    config = load_config(tmp_path / "c.yaml")
    assert report_run(config, tmp_path, synthetic=True).problems == ()
    assert config.cluster.workers.min == config.cluster.workers.max == gpus
    assert config.data.context_tokens == context and config.data.rows_per_step % config.dp_size == 0
    assert config.tracking.trackers == (("tensorboard",) if gpus > 8 else ("mlflow",)) and config.data.eval_fraction
    assert config.memory.plan != "auto" and config.memory.attention_output != "auto", "what was chosen is written"
    written = (tmp_path / "c.yaml").read_text()
    assert f"path: {tmp_path / name}\n" in written and written.count("edit: ") >= 4


def test_a_laptop_gets_a_run_of_its_corpus_with_a_hundred_steps_an_evaluation_and_tracking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "tiny"
    model.mkdir()
    fields = sizes("llama", 320, 32, 64, 2, 2, 2, max_position_embeddings=512)
    (model / "config.json").write_text(json.dumps(fields))
    (model / "model.safetensors").write_bytes(b"")
    text_corpus(tmp_path, varied_texts(400))
    assert init(tmp_path, model, 256, 0, "--data", "corpus") == 0
    config = load_config(tmp_path / "c.yaml")
    report = report_run(config, tmp_path)
    assert report.problems == () and (config.run.storage, config.data.path) == ("runs", str(tmp_path / "corpus"))
    assert (config.cluster.workers.max, config.cluster.gpus_per_worker, config.model.dtype) == (1, 0, "fp32")
    assert 100 <= report.data.num_steps < 200, "a larger batch would have given fewer than 100 steps"
    assert config.run.eval_every_steps and config.data.eval_fraction > 0 and config.tracking.enabled
    (tmp_path / "c.yaml").unlink()
    # A corpus of few rows still gets a row per step, and one of few documents no evaluation.
    text_corpus(tmp_path / "few", varied_texts(9))
    assert init(tmp_path, model, 256, 0, "--data", "few/corpus") == 0
    few = load_config(tmp_path / "c.yaml")
    assert (few.data.rows_per_step, few.data.eval_fraction, few.run.eval_every_steps) == (1, 0.0, None)


def test_a_corpus_that_is_none_is_refused_by_its_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = directory(tmp_path, "smollm3-3b")
    assert init(tmp_path, model, 65536, 2, "--data", str(tmp_path / "nothing")) == 2
    assert "--data=" in capsys.readouterr().err


def test_a_model_may_lie_in_a_directory_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "new: models #2 'x'"
    folder.mkdir()
    # Of the last part nothing may stand in a run's name.
    model = directory(folder, "smollm3-3b").rename(folder / "模型")
    assert init(tmp_path, model, 65536, 2) == 0
    written = load_config(tmp_path / "c.yaml")
    assert (written.model.path, written.run.name) == (str(model), "run-64k")


def test_positions_are_extended_where_they_end_and_a_scaling_of_the_models_own_is_not_scaled_again(
    tmp_path: Path,
) -> None:
    plain, *_ = first_configs(str(directory(tmp_path, "llama-3-8b")), 131072, 8, 80.0, 200.0)
    rope = plain.config.model.rope
    assert rope is not None and rope != "unchanged" and (rope.rope_type, rope.factor) == ("yarn", 16.0)
    scaled, *_ = first_configs(str(directory(tmp_path, "llama-3.1-70b")), 262144, 64, 80.0, 200.0)
    assert scaled.config.model.rope == "unchanged" and scaled.config.run.storage_kind == "nfs"
    assert scaled.trained_positions == 131072


def test_a_model_of_the_hub_is_written_into_the_file_so_that_it_plans_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described, context, gpus = MODELS["granite-3.3-2b"]
    found = SimpleNamespace(to_dict=lambda: described)
    monkeypatch.setattr("ray_ulysses.engine.model_config.stored_config", lambda path, _=None: found)
    assert init(tmp_path, "ibm-granite/granite-3.3-2b-base", context, gpus) == 0
    config = load_config(tmp_path / "c.yaml")
    assert config.model.path == "ibm-granite/granite-3.3-2b-base" and config.run.name == "granite-3.3-2b-base-128k"
    assert config.model.config is not None and config.model.config["num_hidden_layers"] == 40
    assert "torch_dtype" not in config.model.config and "architectures" not in config.model.config


def test_what_does_not_fit_is_refused_with_the_number_of_gpus_that_hold_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = directory(tmp_path, "llama-3.1-70b")
    assert init(tmp_path, model, 131072, 4) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "--gpus=4" in error
    more = int(error.partition("use --gpus ")[2].split(",")[0])
    assert more in (8, 16, 32) and not (tmp_path / "c.yaml").exists()
    assert first_configs(str(model), 131072, more, 80.0, 200.0)


@pytest.mark.parametrize("is_taken", [True, False], ids=["file", "model"])
def test_a_file_that_is_there_and_a_directory_that_is_no_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_taken: bool
) -> None:
    if is_taken:
        (tmp_path / "c.yaml").write_text("mine")
    assert init(tmp_path, tmp_path, 8192, 1) == 2
    error = "".join(capsys.readouterr().err.split())
    assert ("alreadyexists" if is_taken else str(tmp_path / "config.json")) in error
    assert not is_taken or (tmp_path / "c.yaml").read_text() == "mine"
