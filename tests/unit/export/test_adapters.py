"""Adapters are exported as PEFT files, or merged exactly like PEFT merges them, for every kind of linear layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ray_ulysses.config.loading import parse_config
from ray_ulysses.config.model import AdapterSection
from ray_ulysses.engine.adapter import add_adapter
from ray_ulysses.engine.base_fingerprint import model_fingerprint
from ray_ulysses.engine.model import build_model
from ray_ulysses.errors import UserError
from ray_ulysses.export.report import python_lines, serve_line
from tests.breadth import fast_cases
from tests.unit.attention.models import ARCHITECTURES, zoo_model
from tests.unit.config.trees import small_tree
from tests.unit.engine.quantized_checkpoints import write_checkpoint as write_quantized
from tests.unit.export.runs import assert_same, export, fields_of, tensors_in, write_checkpoint, write_config

# Conv1D, biases, tied heads, experts, soft-caps, one fused matrix.
_KINDS = ("gpt2", "qwen2", "gemma2", "mixtral", "llama", "phi3")
_ADAPTERS: dict[str, dict[str, Any]] = {
    "linear": {"rank": 3, "alpha": 5},
    "extension": {"rank": 2, "rslora": True, "train_embeddings": True, "train_norms": True},
}
_CASES = {
    f"{kind}-{adapter}-{dtype}": (kind, adapter, dtype)
    for kind in _KINDS
    for adapter in _ADAPTERS
    for dtype in ("fp32", "bf16")
}
_EXPERTS: dict[str, Any] = {"rank": 3, "ranks": {"down_proj": 2}, "alphas": {"q_proj": 7, "experts": 9}}
_OTHER_ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral-experts": ("mixtral", {**_EXPERTS, "targets": ["q_proj", "experts", "gate"]}),
    # Only one matrix of the experts, and dense layers with the names of experts in an older Transformers.
    "qwen3-experts": ("qwen3_moe", {**_EXPERTS, "targets": ["q_proj", "down_proj"], "rslora": True}),
    "deepseek-experts": ("deepseek_v3", {"rank": 3, "targets": ["experts", "gate_proj", "up_proj", "down_proj"]}),
    "deepseek-ranks": ("deepseek_v3", {"rank": 3, "ranks": {"gate_proj": 5}, "alphas": {"layers.0.mlp.up_proj": 1}}),
    "qwen3-all": (
        "qwen3_moe",
        {
            "rank": 3, "targets": ["q_proj", "experts", "gate"], "ranks": {"gate": 2, "gate_up_proj": 5, "q_proj": 7},
            "alphas": {"layers.0.mlp.gate": 4, "down_proj": 9}, "train_embeddings": True, "train_norms": True,
        },
    ),
    "mixtral-whole": (
        "mixtral",
        {"rank": 2, "alphas": {"experts": 9}, "targets": ["experts"], "modules_to_save": ["q_proj", "lm_head"]},
    ),
    "llama4-experts": ("llama4_text", {**_EXPERTS, "targets": ["q_proj", "experts"], "alphas": {"gate_up_proj": 5}}),
    # Biases and transposed matrices.
    "gpt-oss-experts": ("gpt_oss", {"rank": 3, "targets": ["v_proj", "experts", "router"], "train_norms": True}),
    "dora": ("qwen2", {"rank": 3, "dora": True, "ranks": {"v_proj": 5}}),
    "dora-transposed": ("gpt2", {"rank": 3, "dora": True, "alphas": {"c_proj": 3}}),
}  # fmt: skip


def make_run(folder: Path, kind: str, adapter: dict[str, Any], dtype: str, init: str = "pretrained") -> Any:
    """Write a base model and a run that trained an adapter on it; return the trained model."""
    torch.manual_seed(4)
    base = zoo_model(kind)
    for one in base.parameters():
        one.data = one.data.to(torch.bfloat16 if dtype == "bf16" else torch.float32).float()
    base.save_pretrained(folder / "base")
    model = add_adapter(base, AdapterSection(**adapter), seed=1)
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one.add_(torch.randn(one.shape) * 0.05)
    model_of = {"init": "random", "config": fields_of(ARCHITECTURES[kind]())}
    if init == "pretrained":
        model_of = {"path": str(folder / "base"), "config": None, "init": init}
    tree = small_tree(run__name="run", run__storage=str(folder), model__dtype=dtype, model__adapter=adapter)
    tree["model"] |= model_of
    (folder / "run").mkdir()
    (folder / "run/config.yaml").write_text(parse_config(tree).to_yaml())
    write_checkpoint(folder / "run", model, dtype=dtype, frozen=frozen)
    return model


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(24)[None], use_cache=False).logits
    return found


@pytest.mark.parametrize(("kind", "adapter", "dtype"), fast_cases(_CASES, "gemma2-extension-fp32", "qwen2-linear-bf16"))
def test_adapter_and_merged_model_equal_those_of_peft(tmp_path: Path, kind: str, adapter: str, dtype: str) -> None:
    _hold(tmp_path, kind, _ADAPTERS[adapter], dtype)


@pytest.mark.parametrize(
    ("kind", "adapter"),
    fast_cases(_OTHER_ADAPTERS, "mixtral-experts", "gpt-oss-experts", "deepseek-ranks", "dora-transposed"),
)
def test_adapters_of_experts_single_ranks_and_doras_equal_those_of_peft(
    tmp_path: Path, kind: str, adapter: dict[str, Any]
) -> None:
    _hold(tmp_path, kind, adapter, "fp32")


def _hold(tmp_path: Path, kind: str, adapter: dict[str, Any], dtype: str) -> None:
    trained = make_run(tmp_path, kind, adapter, dtype)
    files = export(tmp_path / "run", weights="fp32", out=tmp_path / "adapter")
    assert files.check is not None and files.check.holds
    assert files.parameters >= sum(one.numel() for one in trained.parameters() if one.requires_grad)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    wanted = logits_of(trained)
    assert float((logits_of(loaded) - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())

    merged = export(tmp_path / "run", weights="fp32", out=tmp_path / "merged", merge=True)
    assert merged.check is not None and merged.check.holds
    trained.merge_and_unload().save_pretrained(tmp_path / "wanted")
    assert_same(tensors_in(tmp_path / "merged"), tensors_in(tmp_path / "wanted"))


@pytest.mark.parametrize(
    ("name", "base_dtype"), [("qwen3-fp8", "bf16"), ("qwen3_moe-fp8", "bf16"), ("qwen3_moe-fp8", "nf4")]
)
def test_an_adapter_of_an_fp8_base_is_checked_on_the_dequantized_weights(
    tmp_path: Path, name: str, base_dtype: str
) -> None:
    write_quantized(tmp_path / "base", name)
    tree = small_tree(run__name="run", run__storage=str(tmp_path), model__dtype="fp32", model__adapter={"rank": 3})
    tree["model"] |= {"path": str(tmp_path / "base"), "config": None, "init": "pretrained", "base_dtype": base_dtype}
    config = parse_config(tree)
    model: Any = build_model(config)
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one.add_(torch.randn(one.shape) * 0.05)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(config.to_yaml())
    fingerprint = "" if base_dtype == "bf16" else model_fingerprint(model)
    write_checkpoint(tmp_path / "run", model, dtype="fp32", frozen=frozen, base_fingerprint=fingerprint)
    files = export(tmp_path / "run", out=tmp_path / "adapter")
    assert files.check is not None and files.check.holds
    merged = export(tmp_path / "run", weights="fp32", out=tmp_path / "merged", merge=True)
    assert merged.check is not None and merged.check.holds
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    for one in (files, merged):
        card = (Path(one.out) / "README.md").read_text()
        assert "the base model's files were quantized (FP8, a scale per block of 16 x 16)" in card
    wanted = logits_of(model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert float((logits_of(loaded) - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def test_the_settings_have_the_base_model_and_the_fully_trained_modules(tmp_path: Path) -> None:
    make_run(tmp_path, "gemma2", _ADAPTERS["extension"], "fp32")
    report = export(tmp_path / "run", check=False, out=tmp_path / "adapter")
    assert serve_line(report, ".").startswith("# vLLM does not load adapters with fully trained modules")
    fields = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (fields["peft_type"], fields["r"], fields["lora_dropout"], fields["use_rslora"]) == ("LORA", 2, 0.0, True)
    assert fields["base_model_name_or_path"] == str(tmp_path / "base")
    assert fields["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert {"embed_tokens", "lm_head", "norm"} < set(fields["modules_to_save"])
    names = tensors_in(tmp_path / "adapter").keys()
    assert {"base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"} < names
    assert not any("default" in name for name in names)


def test_an_adapter_has_the_end_tokens_and_its_python_lines_work(tmp_path: Path) -> None:
    make_run(tmp_path, "llama", _ADAPTERS["linear"], "fp32")
    out = tmp_path / "adapter"
    report = export(tmp_path / "run", check=False, out=out)
    settings = json.loads((out / "generation_config.json").read_text())
    assert settings["eos_token_id"] == 2
    (out / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [5, 2]}))
    names: dict[str, Any] = {}
    exec("\n".join(python_lines(report, str(out))), names)
    names["model"].generate(input_ids=torch.arange(4)[None], max_new_tokens=1)
    assert names["model"].base_model.generation_config.eos_token_id == [5, 2]
    served = f"vllm serve {tmp_path / 'base'} --enable-lora --max-lora-rank 8 --lora-modules adapter={out} "
    assert serve_line(report, str(out)).startswith(served)


def test_an_adapter_of_random_base_weights_must_be_merged_and_a_run_without_adapter_can_not(tmp_path: Path) -> None:
    make_run(tmp_path, "llama", _ADAPTERS["linear"], "fp32", init="random")
    with pytest.raises(UserError, match=r"model\.init: random.*--merge"):
        export(tmp_path / "run")
    assert export(tmp_path / "run", merge=True).check is not None
    write_config(tmp_path / "plain", fields_of(ARCHITECTURES["llama"]()))
    write_checkpoint(tmp_path / "plain", zoo_model("llama"))
    with pytest.raises(UserError, match=r"--merge: .*model\.adapter"):
        export(tmp_path / "plain", merge=True)
