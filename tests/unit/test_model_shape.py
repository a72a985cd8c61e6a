"""The parameter count must be the one of Transformers' own modules: memory and MFU rest on it."""

import contextlib
import json
import subprocess
import sys
from typing import Any

import pytest

from ray_ulysses.engine.model_config import inline_config, stored_config
from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import EXACT_FAMILIES, HEAD_NORMS, TIED_BY_DEFAULT, ModelShape, refuse_implausible
from tests.unit.attention.models import ARCHITECTURES, HYBRIDS, SIZES

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 97,
}


def counted_by_transformers(config: dict) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(config)
    hf_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("head_dim", [None, 16], ids=["head_dim_left_out", "head_dim_given"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "attention_bias"])
@pytest.mark.parametrize("family", EXACT_FAMILIES)
def test_parameters_are_those_of_transformers(family, bias, head_dim, tied):
    config = {**SMALL, "model_type": family, "tie_word_embeddings": tied, "attention_bias": bias}
    if head_dim is not None:
        config["head_dim"] = head_dim
    shape = ModelShape.from_config_dict(config)
    assert shape.is_exact
    assert shape.num_parameters == counted_by_transformers(config)


@pytest.mark.parametrize("family", EXACT_FAMILIES)
def test_parameters_are_those_of_transformers_with_kv_heads_left_out(family):
    config = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    config |= {"model_type": family, "num_attention_heads": 32, "hidden_size": 64}
    shape = ModelShape.from_config_dict(config)
    assert shape.num_parameters == counted_by_transformers(config)
    assert shape.num_kv_heads == (8 if family == "mistral" else 32)


def test_llama_counts_the_bias_of_its_mlp():
    config = {**SMALL, "model_type": "llama", "mlp_bias": True}
    assert ModelShape.from_config_dict(config).num_parameters == counted_by_transformers(config)


def test_llama_3_8b_has_its_published_parameters():
    assert ModelShape.from_config_dict(LLAMA_3_8B).num_parameters == 8_030_261_248


def test_another_family_is_said_to_be_an_estimate():
    shape = ModelShape.from_config_dict({**SMALL, "model_type": "olmo2"})
    assert not shape.is_exact
    assert shape.num_parameters > 0


def test_experts_are_counted_in_an_estimate():
    plain = ModelShape.from_config_dict({**SMALL, "model_type": "mixtral"})
    experts = ModelShape.from_config_dict({**SMALL, "model_type": "mixtral", "num_local_experts": 8})
    assert experts.layer_parameters - plain.layer_parameters == 7 * 3 * 48 * 80 + 8 * 48


def test_experts_that_differ_from_layer_to_layer_count_as_the_most():
    described = {**SMALL, "model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": [1, 2, 4]}
    experts = ModelShape.from_config_dict({**described, "moe_intermediate_size": [16, 32, 16]}).experts
    assert experts is not None and (experts.count, experts.active, experts.width) == (8, 4, 32)


def test_level_sp_sizes_are_the_divisors_of_the_query_heads():
    assert ModelShape.from_config_dict({**SMALL, "model_type": "llama"}).level_sp_sizes() == (1, 2, 3, 6)


def test_missing_sizes_are_all_named():
    with pytest.raises(UserError) as caught:
        ModelShape.from_config_dict({"model_type": "llama", "hidden_size": 48, "num_attention_heads": 6})
    assert str(caught.value).startswith("model.config: intermediate_size, num_hidden_layers, vocab_size missing; ")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"vocab_size": 0}, "model.config.vocab_size=0: must be a whole number of at least 1"),
        ({"num_hidden_layers": "3"}, "model.config.num_hidden_layers='3': must be a whole number of at least 1"),
        (
            {"num_key_value_heads": 4},
            "model.config.num_key_value_heads=4: must divide num_attention_heads=6; each",
        ),
        (
            {"hidden_size": 50},
            "model.config.hidden_size=50: is not a multiple of num_attention_heads=6; give head_dim, or",
        ),
        (
            {"num_experts": "many"},
            "model.config.num_experts='many': must be a whole number, or a list with one per layer",
        ),
        ({"layer_types": 5}, "model.config.layer_types=5: must be a list of kinds, one per layer"),
        ({"per_layer_config": {"0": "wide"}}, "model.config.per_layer_config.0='wide': must be a mapping of sizes"),
    ],
    ids=["zero", "text", "kv_heads", "hidden_size", "experts", "layer_types", "per_layer"],
)
def test_sizes_that_can_not_be_are_refused(change, text):
    with pytest.raises(UserError) as caught:
        ModelShape.from_config_dict({**SMALL, "model_type": "llama", **change})
    assert str(caught.value).startswith(text)


def test_a_model_directory_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_3_8B, "architectures": ["LlamaForCausalLM"]}))
    assert ModelShape.from_path(tmp_path) == ModelShape.from_config_dict(LLAMA_3_8B)


def test_a_directory_without_config_is_named(tmp_path):
    with pytest.raises(UserError, match=r"there is no .*config\.json; give the directory of a Hugging Face model"):
        ModelShape.from_path(tmp_path)


@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES, *HYBRIDS} - {"gpt2"}))
def test_what_transformers_saves_is_read(architecture):
    config = {**ARCHITECTURES, **HYBRIDS}[architecture]()
    assert ModelShape.from_config_dict(config.to_diff_dict()).num_layers == config.num_hidden_layers


@pytest.mark.parametrize(("content", "text"), [("{", "can't be read as JSON"), ("[]", "must hold a JSON object")])
def test_a_broken_config_is_named(tmp_path, content, text):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=text):
        ModelShape.from_path(tmp_path)


def test_torch_is_not_imported():
    code = "import sys, ray_ulysses.model_shape; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "described",
    [
        {"per_layer_config": {"01": {"head_dim": 16, "num_key_value_heads": 1}}},
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
        },
    ],
    ids=["per-layer", "gemma4"],
)
def test_heads_may_differ_from_layer_to_layer(described):
    config = {
        "model_type": "gemma4_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 61,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    shape = ModelShape.from_config_dict({**config, **described})
    assert (shape.head_dim, shape.num_kv_heads) == (16, 2)
    assert shape.attention_width == 4 * (8 + 16 + 8)
    assert ModelShape.from_config_dict(config).attention_width == 4 * 3 * 8


def test_a_layer_that_is_not_there_can_not_differ():
    config = {
        "model_type": "gemma4_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 61,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "per_layer_config": {"2": {"head_dim": 16}},
    }
    with pytest.raises(UserError, match=r"per_layer_config has layer 2, but there are 2 layers"):
        ModelShape.from_config_dict(config)


def _has_head_norms(model) -> bool:
    from torch import nn

    attention = [one for one in model.modules() if type(one).__name__.endswith("Attention")]
    children = [child for one in attention for child in one.children()]
    return any("Norm" in type(child).__name__ and not isinstance(child, nn.LayerNorm) for child in children)


def _on_meta(config):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


# Latent attention normalizes what keys are made of, and lightning attention its result.
_OTHER_NORMS = {"bailing_hybrid", "deepseek_v3", "kimi_linear", "minimax"}


@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES, *HYBRIDS} - _OTHER_NORMS))
def test_whether_queries_are_normalized_is_as_in_transformers_own_modules(architecture):
    config = {**ARCHITECTURES, **HYBRIDS}[architecture]()
    assert (config.model_type in HEAD_NORMS) == _has_head_norms(_on_meta(config))


@pytest.mark.parametrize("model_type", sorted(HEAD_NORMS - {*ARCHITECTURES, *HYBRIDS}))
def test_each_family_with_norms_of_heads_has_them(model_type):
    from transformers import AutoConfig

    own = {
        "dots1": {"n_routed_experts": 2, "n_shared_experts": 1},
        "hunyuan_v1_dense": {"head_dim": 8},
        "hunyuan_v1_moe": {"head_dim": 8},
    }
    config = AutoConfig.for_model(model_type, **SIZES, **{"pad_token_id": 0, **own.get(model_type, {})})
    assert _has_head_norms(_on_meta(config))


def test_embeddings_are_tied_by_default_where_transformers_own_class_ties_them():
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    tied = set()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        with contextlib.suppress(Exception):  # a few classes have no default configuration
            config = kind()
            if all(isinstance(getattr(config, size, None), int) for size in sizes) and config.tie_word_embeddings:
                tied.add(config.model_type)
    assert tied == TIED_BY_DEFAULT
    gemma = {"model_type": "gemma2", **SIZES, "head_dim": 8}
    assert ModelShape.from_config_dict(gemma).tied_embeddings
    assert not ModelShape.from_config_dict(gemma | {"tie_word_embeddings": False}).tied_embeddings


EXPERTS = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 56,
    },
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 0,
    },
    "lfm2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1},
}  # fmt: skip


@pytest.mark.parametrize("model_type", EXPERTS)
def test_a_token_goes_through_its_own_experts_and_the_shared_ones(model_type):
    config = {**SMALL, **EXPERTS[model_type], "model_type": model_type, "pad_token_id": 0}
    config["tie_word_embeddings"] = False
    if model_type == "lfm2_moe":
        config["layer_types"] = ["full_attention"] * 3
    one = {**config, next(name for name in config if name in ("num_experts_per_tok", "moe_k")): 8}
    shape, every = ModelShape.from_config_dict(config), ModelShape.from_config_dict(one)
    # Norms and biases of heads and routers differ by family.
    assert shape.num_parameters == pytest.approx(counted_by_transformers(config), rel=0.01)
    assert every.num_parameters == shape.num_parameters and every.idle_parameters == 0
    experts = shape.experts
    assert experts is not None
    sparse = 3 - experts.dense_layers
    assert shape.idle_parameters == sparse * (8 - experts.active) * 3 * 48 * experts.width
    assert shape.mlp_width == experts.active * experts.width + experts.shared
    assert (experts.shared > 0) == (model_type in ("qwen2_moe", "ernie4_5_moe"))


def test_a_dense_model_has_no_idle_parameters():
    shape = ModelShape.from_config_dict({**SMALL, "model_type": "llama"})
    assert shape.experts is None and shape.idle_parameters == 0 and shape.mlp_width == 80


@pytest.mark.parametrize(
    ("own", "heads", "widths"),
    [
        # DeepSeek-V3's latent attention makes keys and values of each of its query heads.
        (
            {"model_type": "deepseek_v3", "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
            16,
            (192, 128, 8 * 16 * 160, 8 * 16 * 128),
        ),
        # Transformers' own files have its rotary part as the size of a head.
        (
            {
                "model_type": "deepseek_v3", "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
                "head_dim": 64,
            },
            16,
            (192, 128, 8 * 16 * 160, 8 * 16 * 128),
        ),
        ({"model_type": "mimo_v2_flash", "head_dim": 192}, 4, (192, 128, 8 * 16 * 160, 8 * 16 * 128)),
        ({"model_type": "diffllama", "head_dim": 64}, 4, (64, 64, 2 * 8 * 16 * 64, 2 * 8 * 16 * 64)),
        ({"model_type": "llama", "head_dim": 64}, 4, (64, 64, 8 * 16 * 64, 8 * 16 * 64)),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_values_may_have_another_width_than_queries(
    own: dict[str, Any], heads: int, widths: tuple[int, int, int, int]
) -> None:
    sizes = {
        "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4,
        "num_hidden_layers": 8, "vocab_size": 1000,
    }  # fmt: skip
    shape = ModelShape.from_config_dict({**sizes, **own})
    assert shape.num_kv_heads == heads
    assert (shape.head_dim, shape.value_dim, shape.attention_width, shape.output_width) == widths


def test_a_width_of_the_mlp_per_layer_is_read_as_the_largest() -> None:
    """Gemma 3n's files give a list, and its layers take four residual streams."""
    sizes = {
        "model_type": "gemma3n_text", "hidden_size": 64, "intermediate_size": [128, 256], "num_attention_heads": 4,
        "num_hidden_layers": 2, "vocab_size": 100, "altup_num_inputs": 4,
    }  # fmt: skip
    shape = ModelShape.from_config_dict(sizes)
    assert (shape.intermediate_size, shape.streams) == (256, 4)
    with pytest.raises(UserError, match="intermediate_size"):
        ModelShape.from_config_dict({**sizes, "intermediate_size": [128, "a"]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("num_hidden_layers", "hidden_size", "vocab_size")
            for value in (10**9, 10**30, -(10**9))
        ),
        ("num_hidden_layers", 1e9),
        ("num_hidden_layers", float("nan")),
        ("num_attention_heads", 10**9),
        ("head_dim", 10**9),
        ("num_local_experts", 10**9),
        ("num_experts_per_tok", 10**9),
        ("moe_topk", [10**20]),
        ("intermediate_size", [1, 10**9]),
        ("layer_types", ["full_attention"] * 100_000),
        ("layers_block_type", ["mamba"] * 10_000),
        ("text_config", {"num_hidden_layers": 10**9}),
        ("sliding_window", 10**400),
    ],
)
def test_a_size_that_no_model_has_is_refused_before_a_model_is_made_of_it(tmp_path, name, value):
    fields = {**LLAMA_3_8B, name: value}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for read in (
        lambda: ModelShape.from_path(tmp_path),
        lambda: ModelShape.from_config_dict(fields),
        lambda: inline_config(fields),
        lambda: stored_config(str(tmp_path)),
    ):
        with pytest.raises(UserError, match=name):
            read()


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"a":' * 100_000, '{"a": "\\ud800"}', '{"a": ' + "9" * 5000, "\xff"]
)
def test_a_config_that_no_parser_reads_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="can't be read as JSON"):
        ModelShape.from_path(tmp_path)
    with pytest.raises(UserError, match=r"no model can be made|there is no config\.json"):
        stored_config(str(tmp_path))


def test_the_defaults_of_every_class_of_transformers_are_plausible():
    from transformers import CONFIG_MAPPING

    made = {}
    for kind in CONFIG_MAPPING:
        # Some need arguments or other packages.
        with contextlib.suppress(Exception):
            made[kind] = CONFIG_MAPPING[kind]().to_dict()
    assert len(made) > 300
    for kind, fields in made.items():
        refuse_implausible(fields, kind)


@pytest.mark.parametrize("kind", [[], {}, ["llama"], 7, True])
def test_a_model_type_that_is_no_text_is_refused(kind):
    with pytest.raises(UserError, match=r"model\.config\.model_type"):
        inline_config({**LLAMA_3_8B, "model_type": kind})
