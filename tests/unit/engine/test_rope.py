"""`model.rope` builds the model that Transformers builds from a configuration with these positions, and exports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.config.resume import resume_conflicts, resume_settings
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.model_config import described_config, trained_positions
from ray_ulysses.errors import ConfigError, UserError
from ray_ulysses.export.architecture import describe
from ray_ulysses.planner.problems import context_problems
from tests.unit.config.trees import small_tree

TRAINED, CONTEXT, HEAD = 64, 256, 16
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HEAD, "max_position_embeddings": TRAINED,
}  # fmt: skip
GEMMA: dict[str, Any] = LLAMA | {
    "model_type": "gemma3_text", "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e4, "beta_fast": 16.0},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * (HEAD // 2), "long_factor": [2.0] * (HEAD // 2),
    },
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}  # fmt: skip


def config_of(model: dict[str, Any], rope: Any = None, **changes: Any) -> Config:
    tree = small_tree(data__context_tokens=CONTEXT, memory__gradient_checkpointing=False)
    tree["model"] = {"init": "random", "dtype": "fp32", "config": model, "rope": rope, **changes}
    return parse_config(tree)


def wanted(rope: dict[str, Any]) -> Any:
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, **rope}
    if rope.get("rope_type") in ("yarn", "longrope", "llama3"):
        parameters["original_max_position_embeddings"] = TRAINED
    fields = {name: value for name, value in LLAMA.items() if name != "model_type"}
    most = TRAINED if rope.get("rope_type") == "dynamic" else CONTEXT
    return AutoConfig.for_model("llama", **fields | {"rope_parameters": parameters, "max_position_embeddings": most})


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(0, LLAMA["vocab_size"], (1, CONTEXT), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return found


def assert_same_logits(model: Any, hf_config: Any) -> None:
    reference: Any = AutoModelForCausalLM.from_config(hf_config).float()
    reference.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_logits_equal_those_of_transformers_also_after_export(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = config_of(LLAMA, rope)
    model = build_model(config)
    assert_same_logits(model, wanted(rope))
    ours = logits(model)
    assert (logits(build_model(config_of(LLAMA))) - ours).norm() > 1e-3 * ours.norm(), "rope has no effect"
    for name, content in describe(config, "fp32").files().items():
        (tmp_path / name).write_bytes(content)
    assert_same_logits(model, AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("rope", [ROPES["theta"], ROPES["linear"]], ids=["theta", "linear"])
def test_layers_with_windows_keep_their_positions_and_the_others_get_the_new_ones(rope: dict[str, Any]) -> None:
    config = config_of(GEMMA, rope)
    default = {"rope_type": "default", "rope_theta": 10_000.0}
    kinds = {"sliding_attention": default, "full_attention": default | {"rope_theta": 1e6} | rope}
    fields = {name: value for name, value in GEMMA.items() if name != "model_type"}
    fields |= {"rope_parameters": kinds, "max_position_embeddings": CONTEXT}
    assert_same_logits(build_model(config), AutoConfig.for_model("gemma3_text", **fields))
    assert described_config(config).max_position_embeddings == CONTEXT


def test_pretrained_weights_get_the_positions_and_model_config_describes_the_original(tmp_path: Path) -> None:
    fields = {name: value for name, value in LLAMA.items() if name != "model_type"}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields)).save_pretrained(tmp_path)
    config = config_of(LLAMA, ROPES["yarn"], init="pretrained", path=str(tmp_path))
    model: Any = build_model(config)
    assert model.config.rope_parameters["rope_type"] == "yarn" and trained_positions(config) == TRAINED
    assert_same_logits(model, wanted(ROPES["yarn"]))


@pytest.mark.parametrize(
    ("rope", "text"),
    [
        ({"rope_type": "ntk"}, ""),
        ({"theta": 5e5}, ""),
        ({"factor": 0.5}, ""),
        ({}, ": no field is set"),
        ({"factor": 8.0}, ": factor has no effect with rope_type=default"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 16.0}, ": beta_fast has no effect"),
        ({"rope_type": "yarn"}, ": rope_type=yarn requires factor"),
        ({"rope_type": "llama3", "factor": 4.0}, ": Transformers does not accept .*low_freq_factor"),
    ],
    ids=["type", "name", "shorter", "nothing", "factor-alone", "of-another-type", "no-factor", "incomplete"],
)
def test_a_setting_that_is_unknown_incomplete_or_without_effect_is_refused(rope: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=rf"model\.rope.*{text}"):
        described_config(config_of(LLAMA, rope))


def test_a_larger_base_keeps_the_scaling_that_the_model_has() -> None:
    scaled = LLAMA | {"rope_parameters": wanted(ROPES["llama3"]).rope_parameters}
    for rope in ({"rope_theta": 5e6}, {"rope_theta": 5e6, "rope_type": "llama3"}):
        found = described_config(config_of(scaled, rope)).rope_parameters
        assert found == scaled["rope_parameters"] | {"rope_theta": 5e6}


def test_positions_of_a_part_and_of_a_model_without_rotary_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.part=text exports into a copy of the complete checkpoint"):
        config_of(LLAMA, ROPES["yarn"], part="text", init="pretrained", path="/model")
    learned = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 64}
    with pytest.raises(UserError, match=r"model\.rope: gpt2 has no rotary embeddings"):
        described_config(config_of(learned | LLAMA | {"model_type": "gpt2"}, ROPES["theta"]))


def test_documents_beyond_the_trained_positions_need_a_choice() -> None:
    config = config_of(LLAMA, init="pretrained", path="/model")
    (problem,) = context_problems(config, CONTEXT, TRAINED)
    assert problem.path == "data.context_tokens"
    assert "{rope_type: yarn, factor: 4.0}, or set model.rope: unchanged" in problem.hint
    assert not [*context_problems(config, TRAINED, TRAINED)] and not [*context_problems(config, CONTEXT, None)]
    for rope in ("unchanged", ROPES["yarn"]):
        assert not [*context_problems(config_of(LLAMA, rope, init="pretrained", path="/model"), CONTEXT, TRAINED)]


def test_a_run_keeps_its_positions() -> None:
    plain, unchanged, yarn = config_of(LLAMA), config_of(LLAMA, "unchanged"), config_of(LLAMA, ROPES["yarn"])
    assert not resume_conflicts(plain, unchanged) and resume_settings(plain) == resume_settings(unchanged)
    (conflict,) = resume_conflicts(plain, yarn)
    assert "model.rope" in str(conflict) and "a change would alter the positions" in str(conflict)
