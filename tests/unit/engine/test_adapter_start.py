"""A run continues from an adapter that PEFT saved, and refuses an adapter that does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import build_model, check_adapter_start
from ray_ulysses.errors import ConfigError, UserError
from ray_ulysses.run.settings import model_shape
from tests.unit.attention.models import zoo_model
from tests.unit.config.trees import small_tree

# What PEFT is given, and our settings for it.
_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "experts": (
        "mixtral",
        {
            "r": 3, "lora_alpha": 5, "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 2},
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
        {"rank": 3, "alpha": 5, "targets": ["q_proj", "experts"], "ranks": {"q_proj": 2}},
    ),
    "dora": (
        "qwen3",
        {"r": 2, "lora_alpha": 3, "target_modules": ["v_proj"], "use_dora": True, "modules_to_save": ["up_proj"]},
        {"rank": 2, "alpha": 3, "targets": ["v_proj"], "dora": True, "modules_to_save": ["up_proj"]},
    ),
}  # fmt: skip


def save(folder: Path, kind: str, options: dict[str, Any]) -> Any:
    """Save a base model, and an adapter with random weights that PEFT made for it."""
    torch.manual_seed(3)
    base = zoo_model(kind)
    base.save_pretrained(folder / "base")
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one.add_(torch.randn(one.shape) * 0.05)
    model.save_pretrained(folder / "adapter")
    return model


def config_of(folder: Path, adapter: dict[str, Any], **changes: Any) -> Any:
    tree = small_tree(**changes)
    tree["model"] |= {"init": "pretrained", "config": None, "path": str(folder / "base")}
    tree["model"]["adapter"] = {"from": str(folder / "adapter"), **adapter}
    return parse_config(tree)


def check(config: Any) -> tuple[str, ...]:
    return check_adapter_start(config, config.model.adapter)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(24)[None], use_cache=False).logits
    return found


@pytest.mark.parametrize("case", _CASES)
def test_a_run_starts_with_the_logits_of_the_adapter_in_peft(tmp_path: Path, case: str) -> None:
    kind, options, settings = _CASES[case]
    trained = save(tmp_path, kind, options)
    config = config_of(tmp_path, settings)
    started = build_model(config)
    wanted = logits_of(trained)
    assert float((logits_of(started) - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    named = {name: one for name, one in started.named_parameters() if one.requires_grad}
    assert model_shape(config).trained_parameters == sum(one.numel() for one in named.values())
    assert isinstance(started, PeftModel) and not any("modules_to_save" in name for name in named)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save(folder, "qwen3", {"r": 2, "lora_alpha": 3, "target_modules": ["v_proj"]})
    return folder


_PLAIN = {"rank": 2, "alpha": 3, "targets": ["v_proj"]}


@pytest.mark.parametrize(
    ("changed", "settings", "said"),
    [
        ({}, {"rank": 4}, "self_attn.v_proj has the rank 2 in the adapter, and model.adapter sets 4"),
        ({}, {"alpha": 4}, "self_attn.v_proj has the alpha 3 in the adapter, and model.adapter sets 4"),
        ({}, {"rslora": True}, "set model.adapter.rslora: false"),
        ({}, {"targets": ["q_proj"]}, "q_proj.lora_A.weight is"),
        ({}, {"targets": ["q_proj", "v_proj"]}, "q_proj.lora_A.weight is .* lacks it"),
        ({"peft_type": "LOHA"}, {}, "peft_type='LOHA': only LoRA is supported"),
        ({"bias": "all"}, {}, "bias='all'"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "changes the base weights"),
        ({"alora_invocation_tokens": [3]}, {}, "alora_invocation_tokens"),
    ],
)
def test_an_adapter_that_differs_is_refused(
    plain: Path, tmp_path: Path, changed: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    for name in ("base", "adapter"):
        (tmp_path / name).symlink_to(plain / name)
    if changed:
        (tmp_path / "adapter").unlink()
        (tmp_path / "adapter").mkdir()
        fields = json.loads((plain / "adapter/adapter_config.json").read_text())
        (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(fields | changed))
        (tmp_path / "adapter/adapter_model.safetensors").symlink_to(plain / "adapter/adapter_model.safetensors")
    with pytest.raises(UserError, match=rf"^model\.adapter\.from=.*{said}"):
        check(config_of(tmp_path, {**_PLAIN, **settings}))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_check_notes_that_dropout_is_not_applied(plain: Path, tmp_path: Path, dropout: float) -> None:
    (tmp_path / "base").symlink_to(plain / "base")
    shutil.copytree(plain / "adapter", tmp_path / "adapter")
    fields = json.loads((plain / "adapter/adapter_config.json").read_text())
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(fields | {"lora_dropout": dropout}))
    noted = check(config_of(tmp_path, _PLAIN))
    assert [note.startswith("model.adapter.from=") and "=0.1, which is not applied" in note for note in noted] == (
        [True] if dropout else []
    )


def test_an_adapter_of_another_base_is_refused_with_the_tensor(plain: Path, tmp_path: Path) -> None:
    zoo_model("qwen3", hidden_size=64).save_pretrained(tmp_path / "base")
    (tmp_path / "adapter").symlink_to(plain / "adapter")
    with pytest.raises(UserError, match=r"v_proj\.lora_A\.weight is \[2, 64\] .* has \[2, 32\]; use the adapter's own"):
        check(config_of(tmp_path, _PLAIN))


def test_pickled_and_incomplete_weights_are_refused(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "base").symlink_to(plain / "base")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text((plain / "adapter/adapter_config.json").read_text())
    with pytest.raises(UserError, match=r"adapter_model\.safetensors not found; pickled weights .* are never loaded"):
        check(config_of(tmp_path, _PLAIN))
    tensors = load_file(plain / "adapter/adapter_model.safetensors")
    gone = next(name for name in tensors if "layers.1" in name)
    kept = {name: one for name, one in tensors.items() if name != gone}
    save_file(kept, tmp_path / "adapter/adapter_model.safetensors")
    with pytest.raises(UserError, match=rf"{gone} is .* lacks it"):
        check(config_of(tmp_path, _PLAIN))


def test_random_base_weights_have_no_adapter_to_continue() -> None:
    tree = small_tree(model__adapter={"from": "someone/adapter"})
    with pytest.raises(ConfigError, match=r"continues from an adapter of pretrained weights"):
        parse_config(tree)
