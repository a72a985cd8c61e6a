"""What can't be done exactly is refused by name, before a step is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from ray_ulysses import apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.attention.refusals import _refuse_dropout_modules, _refuse_settings
from ray_ulysses.errors import UserError
from tests.unit.attention.meshes import ALONE, place
from tests.unit.attention.models import tiny_model

RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_hidden_layers": 4, "num_experts": 2, "head_dim": 8},
    "jamba": {"num_hidden_layers": 8, "num_experts": 2, "use_mamba_kernels": False},
    "recurrent_gemma": {"num_hidden_layers": 3, "head_dim": 8},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "llama4_text": {"num_hidden_layers": 4, "head_dim": 8, "num_local_experts": 2},
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_layers_that_carry_state_or_attend_otherwise_are_refused(kind: str) -> None:
    model = tiny_model(kind, meta=True, **RECURRENT[kind])
    with pytest.raises(UserError, match=rf"^{kind} ") as refused:
        apply_ulysses(model, ALONE)
    assert any(
        words in str(refused.value)
        for words in ("carry state along the sequence or attend otherwise", "does not take its attention from")
    )


def test_a_pure_state_space_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"^mamba does not take its attention from Transformers' attention interface"):
        apply_ulysses(tiny_model("mamba", meta=True, state_size=4, num_hidden_layers=1), ALONE)


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("llama", {"attention_dropout": 0.1}, r"attention_dropout=0\.1: dropout above 0 draws other masks .* set att"),
        ("gpt2", {"resid_pdrop": 0.2, "attn_pdrop": 0, "embd_pdrop": 0}, r"model\.config\.resid_pdrop=0\.2: dropout"),
        ("gemma2", {"head_dim": 8}, r"gemma2 sets attn_logit_softcapping=50\.0: soft-capping of attention scores is"),
        ("gpt_oss", {"num_local_experts": 2, "head_dim": 8}, r"gpt_oss uses attention sinks, which are not supported"),
        (
            "mixtral",
            {"output_router_logits": True, "num_local_experts": 2},
            r"mixtral sets output_router_logits=True: its auxiliary loss is not a sum over tokens, .* set output_",
        ),
        ("gemma3_text", {"head_dim": 8, "use_bidirectional_attention": True}, r"attend in both directions"),
    ],
)
def test_a_setting_that_is_not_exact_is_refused_with_the_way_out(kind: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        apply_ulysses(tiny_model(kind, meta=True, **changes), ALONE)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "mixtral", "phi3", "gemma3_text", "olmo2"])
def test_the_architectures_that_can_be_done_exactly_are_taken(kind: str) -> None:
    changes: dict[str, Any] = {"pad_token_id": 0} if kind == "phi3" else {}
    changes |= {"num_local_experts": 2} if kind == "mixtral" else {}
    model = apply_ulysses(tiny_model(kind, meta=True, **changes), ALONE)
    assert model.config._attn_implementation == "ray_ulysses"


def test_an_encoder_decoder_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=61,
        d_model=16,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    with pytest.raises(UserError, match=r"^t5 has an encoder; only decoders with causal self-attention can be trained"):
        apply_ulysses(model, ALONE)


def test_what_is_no_hugging_face_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"Linear is not a Hugging Face model; apply_ulysses needs a PreTrainedModel"):
        apply_ulysses(nn.Linear(2, 2), ALONE)


@pytest.mark.parametrize("sp_size", [3, 5, 8])
def test_a_size_that_does_not_divide_the_heads_is_refused_with_the_sizes_that_do(sp_size: int) -> None:
    with pytest.raises(
        UserError, match=rf"parallel\.sp_size={sp_size} does not divide the 4 attention heads of llama"
    ) as e:
        apply_ulysses(tiny_model(meta=True), place(0, sp_size))
    assert str(e.value).endswith("the sizes that do are 1, 2, 4")


def test_a_kernel_that_cannot_run_is_refused_when_it_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"model\.attention='varlen' needs a CUDA device and bf16"):
        apply_ulysses(tiny_model(), ALONE, attention="varlen")


@pytest.mark.parametrize(
    ("by_hand", "text"),
    [
        ({"attention_mask": torch.ones(1, 8)}, r"attention_mask was passed; .* Pack documents with shard_batch"),
        (
            {"labels": torch.zeros(1, 8).long()},
            r"labels were passed to the model; it would shift them again: use causal",
        ),
        ({"use_cache": True}, r"use_cache=True is for generation; under Ulysses a row is passed whole"),
    ],
)
def test_what_would_change_attention_or_the_loss_may_not_be_passed_by_hand(by_hand: dict[str, Any], text: str) -> None:
    model = apply_ulysses(tiny_model(), ALONE)
    batch = shard_batch(torch.zeros(1, 8).long(), None, None, ALONE)
    with pytest.raises(UserError, match=text):
        model(**{**batch.model_inputs(), **by_hand})


@pytest.mark.parametrize("inputs", [{}, {"ulysses": "not a batch"}])
def test_a_model_called_without_a_batch_says_what_is_missing(inputs: dict[str, Any]) -> None:
    model = apply_ulysses(tiny_model(), ALONE)
    with pytest.raises(UserError, match=r"must be called with \*\*batch\.model_inputs\(\) of shard_batch"):
        model(input_ids=torch.zeros(1, 8).long(), **inputs)


def test_a_batch_of_another_mesh_is_refused() -> None:
    model = apply_ulysses(tiny_model(), ALONE)
    batch = shard_batch(torch.zeros(1, 8).long(), None, None, place(1, 2))
    with pytest.raises(
        UserError, match=r"the batch was cut over another mesh than the one that apply_ulysses was given"
    ):
        causal_lm_loss(model, batch)


def test_an_attention_layer_called_past_the_model_says_what_is_missing() -> None:
    model: Any = apply_ulysses(tiny_model(), ALONE)
    with pytest.raises(UserError, match=r"LlamaAttention was called without the batch's tables; either the model was"):
        model.model(input_ids=torch.zeros(1, 8).long(), use_cache=False)


@pytest.mark.parametrize(
    ("model_type", "settings", "text"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ("opt", {"layerdrop": 0.5, "dropout": 0.0}, "layerdrop=0.5"),
    ],
)
def test_noise_by_another_name_than_dropout_is_refused(model_type: str, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        _refuse_settings(AutoConfig.for_model(model_type, **settings), model_type)


def test_a_dropout_module_that_the_configuration_does_not_show_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    with pytest.raises(UserError, match=r"dropout of 0\.5 at 1"):
        _refuse_dropout_modules(model, "adapter")
