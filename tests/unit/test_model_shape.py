import contextlib
import json

import pytest

from ray_ulysses.engine.model_config import inline_config, stored_config
from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import EXACT_FAMILIES, HEAD_NORMS, TIED_BY_DEFAULT, ModelShape, refuse_implausible
from tests.unit.attention.models import ARCHITECTURES, HYBRIDS, SIZES

LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
}  # fmt: skip
SMALL = {
    "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "vocab_size": 97,
}  # fmt: skip
BOTH = {**ARCHITECTURES, **HYBRIDS}


def _on_meta(config):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def counted_by_transformers(config: dict) -> int:
    from transformers import AutoConfig

    fields = dict(config)
    model = _on_meta(AutoConfig.for_model(fields.pop("model_type"), **fields))
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


def test_llama_counts_the_bias_of_its_mlp_and_has_its_published_parameters():
    config = {**SMALL, "model_type": "llama", "mlp_bias": True}
    assert ModelShape.from_config_dict(config).num_parameters == counted_by_transformers(config)
    assert ModelShape.from_config_dict(LLAMA_3_8B).num_parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"hidden_size": 50}, "hidden_size"),
        ({"num_experts": "many"}, "num_experts"),
        ({"layer_types": 5}, "layer_types"),
        ({"per_layer_config": {"0": "wide"}}, "per_layer_config.0"),
        ({"per_layer_config": {"3": {"head_dim": 16}}}, "per_layer_config"),
        ({"intermediate_size": [128, "a"]}, "intermediate_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sizes_that_can_not_be_are_refused(change, name):
    with pytest.raises(UserError, match=name):
        ModelShape.from_config_dict({**SMALL, "model_type": "llama", **change})
    with pytest.raises(UserError, match="intermediate_size, num_hidden_layers, vocab_size not found"):
        ModelShape.from_config_dict({"model_type": "llama", "hidden_size": 48, "num_attention_heads": 6})


def test_a_model_directory_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_3_8B, "architectures": ["LlamaForCausalLM"]}))
    assert ModelShape.from_path(tmp_path) == ModelShape.from_config_dict(LLAMA_3_8B)


@pytest.mark.parametrize("architecture", sorted({*BOTH} - {"gpt2"}))
def test_what_transformers_saves_is_read(architecture):
    config = BOTH[architecture]()
    assert ModelShape.from_config_dict(config.to_diff_dict()).num_layers == config.num_hidden_layers


def test_heads_may_differ_from_layer_to_layer():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    for described in (
        {"per_layer_config": {"01": {"head_dim": 16, "num_key_value_heads": 1}}},
        {"layer_types": kinds, "global_head_dim": 16, "num_global_key_value_heads": 1},
    ):
        shape = ModelShape.from_config_dict({**SMALL, "model_type": "gemma4_text", "head_dim": 8, **described})
        assert (shape.head_dim, shape.num_kv_heads) == (16, 2)
        assert shape.attention_width == 6 * (8 + 16 + 8)


def _has_head_norms(model) -> bool:
    from torch import nn

    attention = [one for one in model.modules() if type(one).__name__.endswith("Attention")]
    children = [child for one in attention for child in one.children()]
    return any("Norm" in type(child).__name__ and not isinstance(child, nn.LayerNorm) for child in children)


# Latent attention normalizes what keys are made of, and lightning attention its result.
_OTHER_NORMS = {"bailing_hybrid", "deepseek_v3", "kimi_linear", "minimax"}


@pytest.mark.parametrize("architecture", sorted({*BOTH} - _OTHER_NORMS))
def test_whether_queries_are_normalized_is_as_in_transformers_own_modules(architecture):
    config = BOTH[architecture]()
    assert (config.model_type in HEAD_NORMS) == _has_head_norms(_on_meta(config))


@pytest.mark.parametrize("model_type", sorted(HEAD_NORMS - {*BOTH}))
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


# Latent attention has keys and values for each query head; Transformers stores its rotary part as head_dim.
LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}


@pytest.mark.parametrize(
    ("model_type", "own", "heads", "widths"),
    [
        ("deepseek_v3", LATENT, 6, (192, 128, 3 * 6 * 160, 3 * 6 * 128)),
        ("mimo_v2_flash", {"head_dim": 192}, 2, (192, 128, 3 * 6 * 160, 3 * 6 * 128)),
        ("diffllama", {"head_dim": 64}, 2, (64, 64, 2 * 3 * 6 * 64, 2 * 3 * 6 * 64)),
        ("gemma3n_text", {"altup_num_inputs": 4, "intermediate_size": [80, 40, 80]}, 2, (8, 8, 3 * 6 * 8, 3 * 6 * 8)),
    ],
)
def test_sizes_of_families_that_differ_are_read(model_type, own, heads, widths):
    shape = ModelShape.from_config_dict({**SMALL, "model_type": model_type, **own})
    assert shape.num_kv_heads == heads and shape.intermediate_size == 80
    assert (shape.head_dim, shape.value_dim, shape.attention_width, shape.output_width) == widths
    assert shape.streams == own.get("altup_num_inputs", 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", float("nan")),
        ("hidden_size", 10**30),
        ("vocab_size", -(10**9)),
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


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '{"a": "\\ud800"}', '{"a": ' + "9" * 5000, "\xff"])
def test_a_config_that_no_parser_reads_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="can't be read as JSON"):
        ModelShape.from_path(tmp_path)
    with pytest.raises(UserError, match=r"Transformers rejects|no config\.json"):
        stored_config(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        ModelShape.from_path(tmp_path)


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
