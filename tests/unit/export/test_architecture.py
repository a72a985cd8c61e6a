"""config.json and generation_config.json describe the trained model for both old and new tools."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ray_ulysses.config.loading import parse_config
from ray_ulysses.config.model import RopeSection
from ray_ulysses.engine.model_config import set_rope
from ray_ulysses.errors import UserError
from ray_ulysses.export.architecture import Architecture, describe, merged_ends, with_older_names
from tests.unit.attention.models import ARCHITECTURES, HYBRIDS, plain_config
from tests.unit.config.trees import small_tree


def config_of(kind: str, **changes: Any) -> PreTrainedConfig:
    zoo = {**ARCHITECTURES, **HYBRIDS}
    return zoo[kind](dtype="float32", **changes) if kind in zoo else plain_config(kind, dtype="float32", **changes)


def scaled(kind: str) -> PreTrainedConfig:
    """Return a configuration with changed rotary positions if its class supports them."""
    config = config_of(kind)
    rope = RopeSection(rope_theta=5000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
    try:
        set_rope(config, rope, 300)
    except UserError:
        return config_of(kind)
    return config


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *HYBRIDS, "gemma3n_text", "olmo3", "modernbert-decoder", "mellum"])
def test_older_names_change_nothing_for_transformers_5(tmp_path: Path, kind: str) -> None:
    for config in (config_of(kind), scaled(kind)):
        loaded = []
        for fields in (json.loads(config.to_json_string()), with_older_names(config)):
            (tmp_path / "config.json").write_text(json.dumps(fields))
            loaded.append(AutoConfig.from_pretrained(tmp_path).to_dict())
        # Classes without such a field keep it as an unused attribute.
        unread = {"rope_theta", "partial_rotary_factor"}
        plain, older = ({name: value for name, value in one.items() if name not in unread} for one in loaded)
        if kind == "phi3-longrope":
            # The value follows from the factor.
            assert older["rope_parameters"].pop("attention_factor") == pytest.approx((7 / 6) ** 0.5)
        assert older == plain


_FULL: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 5e6, "factor": 4.0, "original_max_position_embeddings": 64}
_LOCAL: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
_SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "rope", "older"),
    [
        ("llama", _LOCAL, {"rope_theta": 1e4, "rope_scaling": None}),
        ("llama", _FULL, {"rope_theta": 5e6, "rope_scaling": _SCALING}),
        (
            "glm4",
            {**_LOCAL, "partial_rotary_factor": 0.5},
            {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.5},
        ),
        ("gpt_neox", {**_FULL, "partial_rotary_factor": 0.5}, {"rotary_emb_base": 5e6, "rotary_pct": 0.5}),
        ("bailing_hybrid", _FULL, {"rope_theta": 5e6, "rope_scaling": _SCALING}),
        *(
            (kind, rope, {"rope_theta": rope["rope_theta"], "rope_local_base_freq": 1e4, "rope_scaling": scaling})
            for kind in ("gemma3_text", "gemma3n_text")
            for rope, scaling in ((_FULL, _SCALING), ({**_LOCAL, "rope_theta": 7e5}, None))
        ),
        ("olmo3", (_FULL, {**_LOCAL, "rope_theta": 5e6}), {"rope_theta": 5e6, "rope_scaling": _SCALING}),
        (
            "modernbert-decoder",
            (_FULL, _FULL),
            {"global_rope_theta": 5e6, "local_rope_theta": 5e6, "rope_scaling": _SCALING},
        ),
        # A null base makes Transformers 4 fail instead of computing wrong positions.
        ("gemma3_text", (_FULL, _FULL), {"rope_theta": None}),
        ("olmo3", (_FULL, _LOCAL), {"rope_theta": None}),
        ("modernbert-decoder", (_FULL, {**_LOCAL, "rope_theta": 5e6}), {"global_rope_theta": None}),
    ],
)
def test_older_tools_find_rope_under_their_names(kind: str, rope: Any, older: dict[str, Any]) -> None:
    config = config_of(kind)
    if "full_attention" in config.rope_parameters:
        full, sliding = rope if isinstance(rope, tuple) else (rope, _LOCAL)
        rope = {"full_attention": dict(full), "sliding_attention": dict(sliding)}
    config.rope_parameters = dict(rope)
    found = with_older_names(config)
    assert {name: found[name] for name in older} == older
    assert ("rope_scaling" in found) == (None not in older.values() or "rope_scaling" in older)


_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.3, 2.6, 2.9]}
_LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64, **_FACTORS}


@pytest.mark.parametrize(
    ("kind", "own", "scaling"),
    [
        # The ratio of the lengths is 4.
        ("phi3", {}, {"type": "longrope", **_FACTORS}),
        ("phi3", {"factor": 4.0}, {"type": "longrope", **_FACTORS}),
        ("llama", {}, _LONG),
        ("llama", {"factor": 4.0}, {**_LONG, "factor": 4.0}),
        ("llama", {"factor": 16.0}, {**_LONG, "factor": 16.0, "attention_factor": (5 / 3) ** 0.5}),
        ("llama", {"factor": 0.5}, {**_LONG, "factor": 0.5, "attention_factor": 1.0}),
        ("llama", {"factor": 16.0, "attention_factor": 1.5}, {**_LONG, "factor": 16.0, "attention_factor": 1.5}),
        ("gemma3_text", {}, _LONG),
    ],
)
def test_older_tools_read_longrope(tmp_path: Path, kind: str, own: dict[str, Any], scaling: dict[str, Any]) -> None:
    config, rope = config_of(kind, max_position_embeddings=256), {**_LONG, **own, "rope_theta": 1e4}
    config.rope_parameters = {"full_attention": rope, "sliding_attention": _LOCAL} if kind == "gemma3_text" else rope
    config.original_max_position_embeddings = 64
    config.standardize_rope_params()
    found = with_older_names(config)
    assert found["rope_scaling"].keys() == scaling.keys()
    assert all(value == pytest.approx(scaling[name]) for name, value in found["rope_scaling"].items())
    assert found["original_max_position_embeddings"] == 64
    (tmp_path / "config.json").write_text(json.dumps(found))
    layers = {"layer_type": "full_attention"} if kind == "gemma3_text" else {}
    for seq_len in (32, 128):
        there, here = (
            ROPE_INIT_FUNCTIONS["longrope"](one, seq_len=seq_len, **layers)
            for one in (AutoConfig.from_pretrained(tmp_path), config)
        )
        assert torch.equal(there[0], here[0]) and there[1] == pytest.approx(here[1])


@pytest.mark.parametrize(
    ("kind", "older"),
    [
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 4}),
        ("mellum", {"num_experts": 4, "num_local_experts": 4}),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}),
        ("zamba", {"layers_block_type": ["mamba", "hybrid"] * 2}),
        ("zamba2", {"layers_block_type": ["mamba", "hybrid"] * 2}),
        ("nemotron_h", {"hybrid_override_pattern": "M*-"}),
    ],
)
def test_older_tools_find_experts_and_layers_under_their_names(kind: str, older: dict[str, Any]) -> None:
    found = with_older_names(config_of(kind, **({"num_experts": 4} if kind == "mellum" else {})))
    assert {name: found[name] for name in older} == older


def test_rope_is_described_for_two_kinds_of_layers() -> None:
    def words(full: dict[str, Any], sliding: dict[str, Any]) -> str:
        config = config_of("olmo3", rope_parameters={"full_attention": full, "sliding_attention": sliding})
        return Architecture(model=SimpleNamespace(config=config), generation=None).rope

    said = "rope yarn, factor 4, theta 5e+06 in layers with full attention"
    assert words(dict(_FULL), {**_LOCAL, "rope_theta": 5e6}) == said
    assert words(dict(_FULL), dict(_LOCAL)) == f"{said}, which Transformers 4 can't represent"


def test_generation_ends_with_the_trained_end_tokens() -> None:
    cases: list[Any] = [(None, (), None), (2, (), 2), (None, (5,), 5), (6, (5, 6), [5, 6])]
    for known, trained, ends in [*cases, ([2, 5], (5,), [2, 5]), ([2, 3], (5,), [5, 2, 3])]:
        assert merged_ends(known, trained) == ends


def test_an_inline_model_gets_its_corpus_end_token_unless_it_has_one() -> None:
    tree = small_tree()
    found = describe(parse_config(tree), "model", (256,))
    # Llama's defaults, 1 and 2, are bytes of text here.
    assert (found.model.config.bos_token_id, found.model.config.eos_token_id) == (None, 256)
    assert found.generation is not None and found.generation["eos_token_id"] == 256
    assert "bos_token_id" not in found.generation
    unknown = describe(parse_config(tree), "model")
    assert (unknown.model.config.bos_token_id, unknown.model.config.eos_token_id) == (None, None)
    assert unknown.generation is not None and "eos_token_id" not in unknown.generation
    tree["model"]["config"]["eos_token_id"] = 7
    found = describe(parse_config(tree), "model", (256,))
    assert found.model.config.eos_token_id == 7
    assert found.generation is not None and found.generation["eos_token_id"] == [256, 7]
