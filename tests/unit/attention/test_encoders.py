"""Masked language models: bidirectional attention within documents, and the tiled loss of their heads."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ray_ulysses import apply_ulysses, causal_lm_loss, remove_ulysses, shard_batch, unshard
from ray_ulysses.attention.batch import IGNORE_INDEX, ShardedBatch
from ray_ulysses.attention.probe import probe_model
from ray_ulysses.engine.model import refuse_architecture
from ray_ulysses.engine.model_config import without_noise
from ray_ulysses.engine.model_parts import find_parts
from ray_ulysses.errors import UserError
from tests.breadth import fast_only
from tests.unit.attention.meshes import ALONE
from tests.unit.attention.models import ENCODERS, SIZES, VOCAB, encoder_model

LENGTHS = (9, 1, 17, 5)
_CHOSEN = ["roberta", "modernbert", "esm-token_dropout"]
FAMILIES = [*_CHOSEN, *fast_only([name for name in ENCODERS if name not in _CHOSEN], "bert", "esm-rotary")]


def make_batch(ids: torch.Tensor, **options: Any) -> ShardedBatch:
    """Return a row with labels at every third token, and padding."""
    labels = torch.where(torch.arange(ids.shape[1]) % 3 == 1, ids, IGNORE_INDEX)
    return shard_batch(ids, labels, LENGTHS, ALONE, **{"shift_labels": False, **options})


def draw_ids(seed: int = 1) -> torch.Tensor:
    ids = torch.randint(0, VOCAB, (1, sum(LENGTHS) + 4), generator=torch.Generator().manual_seed(seed))
    # The mask token of ESM, of which documents have different shares.
    ids[:, [2, 12, 13, 20, 33]] = 7
    return ids


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    batch = make_batch(ids)
    with torch.no_grad():
        return unshard(model(**batch.model_inputs()).logits, batch)[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_have_the_logits_of_each_alone_and_do_not_depend_on_their_neighbours(name: str) -> None:
    ids, starts = draw_ids(), [0, 9, 10, 27, 32]
    alone: Any = encoder_model(name).eval()
    with torch.no_grad():
        parts = [alone(input_ids=ids[:, a:b]).logits[0] for a, b in pairwise(starts)]
    model = apply_ulysses(encoder_model(name), ALONE)
    ours = logits_of(model, ids)
    assert float((ours - torch.cat(parts)).norm() / ours.norm()) < 1e-6
    # Each document is one kernel call, so other neighbours change no bit.
    others = ids.clone()
    others[:, :10], others[:, 27:] = draw_ids(2)[:, :10], draw_ids(2)[:, 27:]
    again = logits_of(model, others)
    assert torch.equal(again[10:27], ours[10:27])
    assert not torch.equal(again[:9], ours[:9])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_of_a_head_with_a_transform_is_the_same_over_tiles(name: str) -> None:
    results = []
    for tile in ("off", 5):
        model = apply_ulysses(encoder_model(name), ALONE)
        loss_sum, num_tokens = causal_lm_loss(model, make_batch(draw_ids()), tile=tile)
        loss_sum.backward()
        assert int(num_tokens) == 11
        results.append(
            (loss_sum.detach(), {key: one.grad for key, one in model.named_parameters() if one.grad is not None})
        )
    (whole, wanted), (tiled, ours) = results
    assert float((tiled - whole).abs() / whole) < 1e-6
    assert wanted.keys() == ours.keys()
    for key, gradient in wanted.items():
        assert float((ours[key] - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-6, key


def test_the_head_of_an_encoder_is_its_transform_and_its_decoder() -> None:
    found = {name: list(find_parts(encoder_model(name)).heads) for name in ENCODERS}
    assert found == {
        "bert": ["cls"],
        "roberta": ["lm_head"],
        "esm": ["lm_head"],
        "esm-rotary": ["lm_head"],
        "esm-token_dropout": ["lm_head"],
        "eurobert": ["lm_head"],
        "modernbert": ["head", "decoder"],
    }


@pytest.mark.parametrize(
    ("name", "first", "longest"),
    [("bert", 0, 256), ("roberta", VOCAB + 1, 255 - VOCAB), ("esm", VOCAB + 1, 255 - VOCAB), ("esm-rotary", 0, None)],
)
def test_positions_start_where_the_model_starts_them(name: str, first: int, longest: int | None) -> None:
    found = probe_model(encoder_model(name))
    assert (found.problems, found.first_position, found.num_positions) == ([], first, longest)
    with torch.device("meta"):
        planned = AutoModelForCausalLM.from_config(_decoder("roberta"))
    assert probe_model(planned).first_position == VOCAB + 1


def test_a_document_beyond_the_position_table_is_refused() -> None:
    model: Any = apply_ulysses(encoder_model("roberta", max_position_embeddings=VOCAB + 1 + 39), ALONE)
    batch = shard_batch(torch.zeros(1, 40).long(), None, None, ALONE, shift_labels=False)
    with pytest.raises(UserError, match="a document of 40 tokens, but the model's position table has 39 entries"):
        model(**batch.model_inputs())


def test_the_layers_of_modernbert_have_the_windows_of_its_mask() -> None:
    layers = probe_model(encoder_model("modernbert")).layers.values()
    assert [(layer.window, layer.causal) for layer in layers] == [(None, False), (7, False), (7, False)]


def _decoder(kind: str, **changes: Any) -> PreTrainedConfig:
    sizes = SIZES | {"vocab_size": VOCAB + 3, "pad_token_id": VOCAB, "is_decoder": True}
    return _without_noise(AutoConfig.for_model(kind, **sizes, **changes))


def _without_noise(config: PreTrainedConfig) -> PreTrainedConfig:
    without_noise(config)
    return config


def test_a_decoder_whose_positions_start_after_padding_is_trained_as_alone() -> None:
    torch.manual_seed(7)
    model: Any = AutoModelForCausalLM.from_config(_decoder("roberta"), attn_implementation="eager").eval()
    ids = draw_ids()
    with torch.no_grad():
        wanted = model(input_ids=ids[:, 10:27]).logits[0]
        batch = shard_batch(ids, None, LENGTHS, ALONE)
        apply_ulysses(model, ALONE)
        ours = unshard(model(**batch.model_inputs()).logits, batch)[0, 10:27]
    assert float((ours - wanted).norm() / wanted.norm()) < 1e-6


def test_next_tokens_as_labels_of_bidirectional_attention_are_refused() -> None:
    model = apply_ulysses(encoder_model("bert"), ALONE)
    with pytest.raises(UserError, match=r"bidirectional attention sees; call shard_batch\(\.\.\., shift_labels=False"):
        causal_lm_loss(model, make_batch(draw_ids(), shift_labels=True))


@pytest.mark.parametrize(
    ("config", "task", "text"),
    [
        (ENCODERS["bert"](), "causal_lm", r"bidirectional attention at bert\.encoder\.layer\.0.*masked language model"),
        (_decoder("bert"), "masked_lm", r"causal attention at bert\.encoder\.layer\.0.*modernbert"),
        (ENCODERS["bert"](hidden_dropout_prob=0.1), "masked_lm", r"hidden_dropout_prob=0\.1"),
        (AutoConfig.for_model("llama", **SIZES), "masked_lm", "no masked language model for this type.*modernbert"),
        (ENCODERS["modernbert"](), "causal_lm", "no causal language model for this type"),
    ],
    ids=["leak", "causal", "dropout", "no-encoder", "no-decoder"],
)
def test_a_model_that_does_not_fit_its_task_is_refused(config: PreTrainedConfig, task: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        refuse_architecture(config, "whole", task)


def test_token_dropout_is_taken_over_again_and_given_back() -> None:
    model: Any = encoder_model("esm-token_dropout").eval()
    with torch.no_grad():
        wanted = model(input_ids=draw_ids()[:, 10:27]).logits
        apply_ulysses(model, ALONE)
        first = logits_of(model, draw_ids())
        assert torch.equal(logits_of(apply_ulysses(model, ALONE), draw_ids()), first)
        remove_ulysses(model)
        assert torch.equal(model(input_ids=draw_ids()[:, 10:27]).logits, wanted)


def test_dropout_is_set_to_0_and_named() -> None:
    config = AutoConfig.for_model("bert")
    assert without_noise(config) == {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    assert (config.hidden_dropout_prob, without_noise(config)) == (0.0, {})
