"""A run with `model.adapter`: trained, resumed on another world, and exported as adapter and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_cli
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import build_model
from ray_ulysses.evaluation.model_source import find_model
from ray_ulysses.evaluation.report import EvaluationRequest
from ray_ulysses.tracking.history import read_history
from tests import apart
from tests.distributed.run_case import SMALL_FILES, make_config, make_corpus, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
STEPS = 4

ADAPTERS: dict[str, dict[str, Any]] = {
    "linear": {"rank": 4},
    "extension": {"rank": 4, "alpha": 4, "rslora": True, "train_embeddings": True, "train_norms": True},
    "head": {"rank": 2, "targets": ["lm_head", "q_proj"], "modules_to_save": ["mlp"]},
}
ROPE = {"rope_type": "linear", "factor": 4.0}
CASES = {
    "extension-tied-fp32": ("extension", True, "fp32", None),
    "linear-untied-fp32-rope": ("linear", False, "fp32", ROPE),
    "head-untied-bf16": ("head", False, "bf16", None),
}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"cluster__workers": 1, "parallel__sp_size": 1, "memory__zero_stage": 2, "memory__offload_optimizer": "cpu"},
    {"cluster__workers": 2, "parallel__sp_size": 2, "memory__zero_stage": 3, "memory__mlp_tile": 40},
    {"cluster__workers": 2, "parallel__sp_size": 1, "memory__zero_stage": 1, "memory__gradient_checkpointing": False},
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"), SMALL_FILES)


def logits_of(model: Any) -> torch.Tensor:
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    ids = torch.randint(0, 264, (1, 48), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return found


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_tied", "dtype", "rope"), CASES.values(), ids=CASES)
def test_an_adapter_is_trained_resumed_elsewhere_and_loaded_by_peft(
    tmp_path: Path, corpus: Path, kind: str, is_tied: bool, dtype: str, rope: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    described = make_config(tmp_path, corpus).model_dump(mode="json")["model"]["config"]
    tree = make_config(tmp_path, corpus, model__config=described | {"tie_word_embeddings": is_tied}, run__seed=5)
    base: Any = build_model(parse_config(tree.model_dump(mode="json")))
    base.to(torch.bfloat16 if dtype == "bf16" else torch.float32).save_pretrained(tmp_path / "base")
    settings: dict[str, Any] = {
        "model__init": "pretrained", "model__path": str(tmp_path / "base"), "model__config": None,
        "model__dtype": dtype, "model__adapter": ADAPTERS[kind], "model__rope": rope,
        "optimizer__lr": 3e-2, "checkpoint__every_steps": 1,
    }  # fmt: skip

    def trained(folder: str, stop: int, layout: dict[str, Any]) -> Path:
        config = make_config(tmp_path / folder, corpus, run__stop_step=stop, **settings, **layout)
        train(config, f"until-{stop}")
        return config.run_dir

    unbroken = trained("unbroken", STEPS, LAYOUTS[0])
    for stop, layout in zip((1, 3, STEPS), LAYOUTS, strict=True):
        run = trained("changing", stop, layout)
    assert [attempt.first_step for attempt in read_history(run).attempts] == [1, 2, 4]
    wanted, ours = ([step.loss for step in read_history(one).steps] for one in (unbroken, run))
    assert len(ours) == len(wanted) == STEPS
    assert ours[-1] < ours[0] - 0.01
    tolerance = 1e-5 if dtype == "fp32" else 1e-3
    assert apart.relative(ours, wanted) <= tolerance

    assert run_cli(app, ["export", str(run), "--out", str(tmp_path / "adapter")]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert run_cli(app, ["export", str(run), "--merge", "--out", str(tmp_path / "merged")]) == 0, (
        capsys.readouterr().err
    )
    settings_file = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert settings_file["base_model_name_or_path"] == str(tmp_path / "base")

    # The files alone, as anyone loads them.
    options = {"config": AutoConfig.from_pretrained(tmp_path / "adapter")} if rope else {}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto", **options)
    before = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto", **options))
    adapted = logits_of(PeftModel.from_pretrained(loaded, tmp_path / "adapter"))
    said_names: dict[str, Any] = {}
    exec("\n".join(said.split("\n\n")[1].splitlines()), said_names)
    merged = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto"))
    assert relative(adapted, before) > 1e-3, "nothing was learned"
    assert relative(logits_of(said_names["model"]), adapted) <= 1e-6
    evaluated = find_model(EvaluationRequest(model=run, is_run=True, dtype="fp32"))._built()
    assert relative(logits_of(evaluated), adapted) <= (1e-5 if dtype == "fp32" else 3e-2)
    # The merged weights are rounded once more in bf16.
    assert relative(merged, adapted) <= (1e-5 if dtype == "fp32" else 3e-2)
