"""Exported directories in Transformers 4.57: every family that it supports gives the trained model's logits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ray_ulysses.config.model import RopeSection
from ray_ulysses.engine.model_config import set_rope
from ray_ulysses.errors import UserError
from ray_ulysses.export.architecture import Architecture
from tests.architectures_page import load
from tests.distributed.sweep_case import OWN, TINY, WINDOWS
from tests.unit.attention.models import ARCHITECTURES, HYBRIDS

OLDER = "4.57.6"
_PACKAGES = (f"transformers=={OLDER}", "huggingface-hub<1.0", "tokenizers<=0.23.0")
_UNREACHABLE = ("NewConnectionError", "ConnectTimeout", "NameResolutionError", "ProxyError")
_READER = Path(__file__).with_name("older_reader.py")
_BOUND = 1e-5
_ROPES: dict[str, dict[str, Any]] = {
    "theta": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}  # fmt: skip
# Families with two kinds of layers that share one base (and scaling) in Transformers 4.
_SHARED = {"olmo3": ("rope_theta",), "modernbert-decoder": ("rope_theta", *RopeSection.model_fields)}

_OTHER_MODEL = {
    # Transformers 4 uses the window in all layers, including those past max_window_layers.
    "qwen2_moe-windows",
    # Transformers 4 uses a window, and Transformers 5 does not.
    "moshi-windows",
}
_FAILS = {
    # Transformers 4 has one base for two kinds of layers.
    **dict.fromkeys(("modernbert-decoder-default", "modernbert-decoder-windows", "olmo3-two-bases"), "NoneType"),
    # Transformers 4 supports fewer kinds of scaling for these families.
    **{f"{kind}-{rope}": "`rope_scaling`" for kind in ("olmo", "olmo2") for rope in _ROPES if rope != "theta"},
    **{f"{kind}-longrope": "`rope_scaling`" for kind in ("olmo", "olmo2")},
    **{f"llama4_text-{rope}": "low_freq_factor" for rope in ("linear", "dynamic", "yarn", "longrope")},
    "hunyuan_v1_dense-dynamic": "alpha",
    "hunyuan_v1_moe-dynamic": "alpha",
}


def tiny(kind: str, **settings: Any) -> PreTrainedConfig:
    """Return a small configuration of a type, with only the fields that its class has."""
    zoo = {**ARCHITECTURES, **HYBRIDS}
    # Transformers 4 loses precision from one chunk of Zamba 2's scan to the next.
    settings |= {"chunk_size": 64} if kind == "zamba2" else {}
    if kind in zoo:
        return zoo[kind](**settings)
    plain, own = AutoConfig.for_model(kind), OWN.get(kind, {})
    # Otherwise Transformers 5.23 raises an error for Gemma 4, which has one head_dim per layer.
    plain.allow_global_per_layer_attribute_access = True
    chosen = {name: value for name, value in TINY.items() if hasattr(plain, name)} | own | settings
    return AutoConfig.for_model(kind, **{name: value for name, value in chosen.items() if value is not None})


def longrope(config: PreTrainedConfig) -> dict[str, Any]:
    """Return LongRoPE settings. Only for Phi 3 is the factor the ratio of the lengths."""
    head_dim = config.hidden_size // config.num_attention_heads
    head_dim = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None) or head_dim
    parameters = config.rope_parameters.get("full_attention") or config.rope_parameters
    count = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
    return {
        "rope_type": "longrope",
        "factor": 300 / 16 if config.model_type == "phi3" else 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": tuple(1.0 + 0.1 * number for number in range(count)),
        "long_factor": tuple(2.0 + 0.3 * number for number in range(count)),
    }


def with_rope(config: PreTrainedConfig, settings: dict[str, Any]) -> bool:
    """Change the rotary positions of a configuration; return False if it does not support them."""
    try:
        set_rope(config, RopeSection(rope_theta=5000.0, **settings), 300)
    except UserError:
        return False
    return True


def cases() -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield every exactly trained family of decoders: default, with windows, and with changed rotary positions."""
    for outcome in load()["outcomes"]:
        kind, variant = outcome["model_type"], outcome["variant"]
        if outcome["kind"] != "exact" or variant == "masked":
            continue
        if variant == "windows":
            plain = tiny(kind)
            yield f"{kind}-windows", tiny(kind, **{key: value for key, value in WINDOWS.items() if hasattr(plain, key)})
            continue
        yield f"{kind}-default", tiny(kind)
        if not getattr(tiny(kind), "rope_parameters", None):
            continue
        # Gemma 4 has one head_dim per layer, and Transformers 4 does not know it.
        long = {} if kind.startswith("gemma4") else {"longrope": longrope(tiny(kind))}
        for rope, settings in (_ROPES | long).items():
            config = tiny(kind)
            if not with_rope(config, settings):
                continue
            parameters = config.rope_parameters
            for name in _SHARED.get(kind, ()):
                if name in parameters["full_attention"]:
                    parameters["sliding_attention"][name] = parameters["full_attention"][name]
            yield f"{kind}-{rope}", config
    config = tiny("olmo3")
    with_rope(config, {})
    yield "olmo3-two-bases", config


def shown(model: Any) -> Any:
    """Make positions matter in a model, with weights that are exact in bf16."""
    for parameter in model.float().eval().parameters():
        if parameter.dim() > 1:
            # Nearly uniform attention would hide wrong positions.
            parameter.data.mul_(3.0)
        parameter.data = parameter.data.bfloat16().float()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def write(folder: Path, config: PreTrainedConfig) -> bool:
    """Export a model and its logits; return False if the configuration can't be computed."""
    torch.manual_seed(7)
    ids = torch.randint(3, config.get_text_config(decoder=True).vocab_size, (1, 33))
    try:
        model = shown(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
        with torch.no_grad():
            logits = model(input_ids=ids).logits
    except (RuntimeError, TypeError, ZeroDivisionError):
        # The family does not support these rotary positions, which Transformers 5 detects only here.
        return False
    model.config.dtype = "float32"
    model.save_pretrained(folder)
    loaded = [AutoConfig.from_pretrained(folder).to_dict()]
    model.config.architectures = [type(model).__name__]
    (folder / "config.json").write_bytes(Architecture(model=model, generation=None).files()["config.json"])
    loaded.append(AutoConfig.from_pretrained(folder).to_dict())
    # Fields that are unused next to rope_parameters.
    unread = {"rope_theta", "partial_rotary_factor", "rope_scaling"}
    if folder.name.endswith("-longrope"):
        # LongRoPE's factors have different names.
        unread |= {"rope_parameters", "original_max_position_embeddings"}
        with torch.no_grad():
            again = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")(input_ids=ids).logits
        torch.testing.assert_close(again, logits)
    plain, older = ({name: value for name, value in one.items() if name not in unread} for one in loaded)
    assert older == plain, folder.name
    torch.save({"ids": ids, "logits": logits}, folder / "expected.pt")
    return True


@pytest.fixture(scope="module")
def older_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install a Python with Transformers 4 that uses this environment for all other packages."""
    folder = tmp_path_factory.mktemp("transformers-4")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", *_PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode and any(one in done.stderr for one in _UNREACHABLE):
        pytest.skip(f"the package registry can't be reached: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(str(Path(torch.__file__).parents[1]))
    return python


@pytest.mark.slow
def test_transformers_4_computes_the_same_logits_in_every_family_or_fails(older_python: Path, tmp_path: Path) -> None:
    written = [name for name, config in cases() if write(tmp_path / name, config)]
    subprocess.run([older_python, _READER, tmp_path], check=True, timeout=600, stderr=subprocess.DEVNULL)
    outcomes: dict[str, float | str] = json.loads((tmp_path / "outcomes.json").read_text())
    assert outcomes.keys() == set(written)
    known = {name: found for name, found in outcomes.items() if found != "unknown"}
    assert len({name.split("-")[0] for name in known}) >= 60, "families that both versions know"
    other = {name: found for name, found in known.items() if not isinstance(found, float) or found > _BOUND}
    failed = {name: found for name, found in other.items() if isinstance(found, str)}
    assert other.keys() - failed.keys() == _OTHER_MODEL, other
    assert failed.keys() == _FAILS.keys(), failed
    assert all(_FAILS[name] in str(found) for name, found in failed.items()), failed
