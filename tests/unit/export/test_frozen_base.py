"""Exports and evaluations of runs with a quantized base read the base again, with the values used in training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.base_fingerprint import model_fingerprint
from ray_ulysses.engine.model import build_model, differs_from_stored
from ray_ulysses.engine.quantized_base import dequantize_layers
from ray_ulysses.errors import UserError
from ray_ulysses.evaluation.model_source import find_model
from ray_ulysses.evaluation.report import ModelRequest
from tests.unit.attention.models import ARCHITECTURES, zoo_model
from tests.unit.config.trees import small_tree
from tests.unit.export.runs import export, fields_of, write_checkpoint
from tests.unit.export.test_adapters import logits_of

_ADAPTER = {"rank": 3, "targets": ["q_proj", "v_proj"], "train_norms": True}


def make_run(folder: Path, kind: str, base_dtype: str, dtype: str, init: str = "pretrained") -> Any:
    """Write a base model and a run over it; return the trained model with dequantized weights."""
    torch.manual_seed(4)
    zoo_model(kind).save_pretrained(folder / "base")
    tree = small_tree(
        run__name="run", run__storage=str(folder), model__dtype=dtype, model__adapter=_ADAPTER,
        model__base_dtype=base_dtype,
    )  # fmt: skip
    tree["model"] |= {"init": "random", "config": fields_of(ARCHITECTURES[kind]())}
    if init == "pretrained":
        tree["model"] |= {"path": str(folder / "base"), "config": None, "init": init}
    config = parse_config(tree)
    (folder / "run").mkdir()
    (folder / "run/config.yaml").write_text(config.to_yaml())
    model: Any = build_model(config)
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one.add_(torch.randn(one.shape) * 0.05)
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    fingerprint = model_fingerprint(model)
    write_checkpoint(folder / "run", model, dtype=dtype, frozen=frozen, base_fingerprint=fingerprint)
    dequantize_layers(model)
    return model


@pytest.mark.parametrize(
    ("kind", "base_dtype", "dtype", "init"),
    [
        ("llama", "nf4", "bf16", "pretrained"),
        ("mixtral", "int8", "fp32", "pretrained"),
        ("qwen2", "fp8", "bf16", "random"),
    ],
)
def test_the_merged_and_the_evaluated_model_have_the_weights_that_were_trained(
    tmp_path: Path, kind: str, base_dtype: str, dtype: str, init: str
) -> None:
    trained = make_run(tmp_path, kind, base_dtype, dtype, init).float()
    wanted = logits_of(trained)
    evaluated = find_model(ModelRequest(model=tmp_path / "run", is_run=True, dtype="fp32")).build()
    bound = 1e-5 * float(wanted.abs().max())
    assert float((logits_of(evaluated) - wanted).abs().max()) <= bound

    merged = export(tmp_path / "run", weights="fp32", out=tmp_path / "merged", merge=True)
    assert merged.check is not None and merged.check.holds
    assert f"dequantized from {base_dtype}" in (tmp_path / "merged/README.md").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert float((logits_of(loaded) - wanted).abs().max()) <= bound
    if init == "pretrained":
        adapter = export(tmp_path / "run", weights="fp32", out=tmp_path / "adapter")
        assert adapter.check is not None and adapter.check.holds


def test_a_base_that_was_changed_since_is_refused_and_nothing_is_published(tmp_path: Path) -> None:
    make_run(tmp_path, "llama", "nf4", "bf16")
    other = zoo_model("llama")
    other.get_output_embeddings().weight.data[3, 5] += 0.1
    other.save_pretrained(tmp_path / "base")
    with pytest.raises(UserError, match=r"model\.path=.*base.*another fingerprint"):
        export(tmp_path / "run", out=tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()
    with pytest.raises(UserError, match=r"model\.path=.*base.*another fingerprint"):
        find_model(ModelRequest(model=tmp_path / "run", is_run=True)).build()
    # The files of an adapter do not contain the base.
    assert export(tmp_path / "run", out=tmp_path / "adapter", check=False).parameters


def test_a_checkpoint_without_frozen_weights_can_be_continued_with_a_quantized_base_only(tmp_path: Path) -> None:
    make_run(tmp_path, "llama", "nf4", "bf16")
    found = find_model(ModelRequest(model=tmp_path / "run", is_run=True))
    assert found.checkpoint is not None
    whole = found.checkpoint[1].state
    stored = replace(whole, tensors={key: one for key, one in whole.tensors.items() if not key.startswith("frozen/")})
    assert differs_from_stored(found.config, stored) is None
    model = found.config.model.model_copy(update={"base_dtype": "bf16"})
    assert "is not in the checkpoint" in str(
        differs_from_stored(found.config.model_copy(update={"model": model}), stored)
    )
    assert "is in the checkpoint only" in str(differs_from_stored(found.config, whole))
