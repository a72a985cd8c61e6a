"""Models and calls that can't be exact are refused with the reason, before a step is taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from ray_ulysses import apply_ulysses, shard_batch
from ray_ulysses.attention.kernels import Demand, table
from ray_ulysses.attention.kernels.sdpa import SDPA
from ray_ulysses.attention.kernels.varlen import VARLEN
from ray_ulysses.attention.probe import probe_model
from ray_ulysses.attention.refusals import refuse_inexact, refuse_mixed_devices
from ray_ulysses.config.loading import parse_config
from ray_ulysses.engine.model import build_model, refuse_architecture
from ray_ulysses.errors import UserError
from ray_ulysses.parallel.mesh import SequenceMesh
from tests.breadth import fast_only
from tests.unit.attention.meshes import ALONE, place
from tests.unit.attention.models import ARCHITECTURES, HYBRIDS, tiny_model
from tests.unit.config.trees import small_tree

STATEFUL = "has unsupported recurrent or attention layers"

BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("falcon_mamba", {}, rf"{STATEFUL} \(linear_attention\); sharding the sequence would silently produce wrong"),
        ("t5", {"dropout_rate": 0.0}, "has an encoder"),
        ("mllama", {}, r"sets cross_attention_layers=\[3, "),
        ("stablelm", {}, "does not use Transformers' attention interface"),
        ("doge", {}, "DogeAttention builds its own attention mask"),
        ("bert", BERT, r"has bidirectional attention at bert\.encoder\.layer\.0.* is_decoder: true"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ("llama", {"attention_dropout": 0.1}, r"attention_dropout=0\.1"),
        ("gpt2", {"resid_pdrop": 0.2, "attn_pdrop": 0, "embd_pdrop": 0}, r"model\.config\.resid_pdrop=0\.2"),
        (
            "gemma3_text",
            {"use_bidirectional_attention": True},
            r"has bidirectional attention at model\.layers\.0\.self_attn",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_an_architecture_is_refused_from_its_configuration_alone(kind: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        refuse_architecture(AutoConfig.for_model(kind, **changes))


def test_a_built_model_is_refused_by_the_rules_for_configurations_and_modules() -> None:
    for kind, changes, text in (
        ("falcon_mamba", {}, "^falcon_mamba "),
        ("recurrent_gemma", {"num_hidden_layers": 3, "head_dim": 8}, "^recurrent_gemma "),
        ("llama", {"attention_dropout": 0.1}, r"attention_dropout=0\.1"),
    ):
        with pytest.raises(UserError, match=text):
            apply_ulysses(tiny_model(kind, meta=True, **changes), ALONE)
    model = tiny_model(meta=True)
    model.model.layers[1].mlp.add_module("noise", nn.Dropout(0.5))
    with pytest.raises(UserError, match=r"^llama has dropout 0\.5 at model\.layers\.1\.mlp\.noise"):
        apply_ulysses(model, ALONE)
    model.model.norm.register_parameter("spare", nn.Parameter(torch.empty(0, device="meta")))
    with pytest.raises(UserError, match=r"^llama: parameter model\.norm\.spare is empty"):
        apply_ulysses(model, ALONE)
    with pytest.raises(UserError, match=r"Linear is not a Hugging Face model; pass a PreTrainedModel"):
        apply_ulysses(nn.Linear(2, 2), ALONE)


def test_a_hybrid_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    AutoConfig.for_model("falcon_mamba").save_pretrained(tmp_path)
    # Reading this file would fail with another error.
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    tree = small_tree(model__init="pretrained", model__path=str(tmp_path), model__config=None)
    with pytest.raises(UserError, match=rf"^falcon_mamba {STATEFUL}"):
        build_model(parse_config(tree))


@pytest.mark.parametrize("architecture", fast_only([*ARCHITECTURES, *HYBRIDS], "llama", "gemma4_text", "jamba"))
def test_the_architectures_that_can_be_done_exactly_are_taken(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = {**ARCHITECTURES, **HYBRIDS}[architecture]()
    refuse_architecture(config)
    assert "could not be looked through" not in caplog.text
    assert config._attn_implementation != "ray_ulysses_probe"


@pytest.mark.parametrize(("sp_size", "ring"), [(5, 5), (6, 2), (64, 16)])
def test_more_ranks_than_heads_are_refused_with_the_ring_that_would_fit(sp_size: int, ring: int) -> None:
    model = tiny_model(meta=True)
    text = rf"parallel\.sp_size={sp_size} .*set parallel\.ring_size: {ring}, or parallel\.sp_size to at most 4"
    with pytest.raises(UserError, match=text):
        refuse_inexact(model, model.config, place(0, sp_size))
    # Heads need not divide.
    refuse_inexact(model, model.config, place(0, 3))


def test_a_model_on_several_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UserError, match=r"on several devices \(0\.weight on cpu, 1\.weight on meta\), .* device_map"):
        refuse_mixed_devices(model)
    refuse_mixed_devices(tiny_model())


def test_a_kernel_of_half_precision_takes_fp32_weights_until_a_forward_attends_in_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(demand: Demand) -> str | None:
        return None if demand.dtype == torch.bfloat16 else "it needs half precision"

    here = replace(SDPA, name=VARLEN.name, runs_on=lambda _: True, refuses=refuses)
    monkeypatch.setattr(table, "by_speed", lambda: (here,))
    batch = shard_batch(torch.zeros(1, 8).long(), None, None, ALONE)
    table.choose_kernel.cache_clear()
    try:
        model = apply_ulysses(tiny_model(), ALONE, attention="varlen")
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            model(**batch.model_inputs())
        with pytest.raises(UserError, match=r"model\.attention='varlen' can't be used: it needs half precision"):
            model(**batch.model_inputs())
    finally:
        table.choose_kernel.cache_clear()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"attention_mask": torch.ones(1, 8)}, r"^attention_mask is not supported, .* shard_batch"),
        ({"labels": torch.zeros(1, 8).long()}, r"^labels were passed to the model, .* causal_lm_loss"),
        ({"use_cache": True}, r"\(use_cache=True or past_key_values\); to generate"),
        ({"ulysses": None}, r"call the model with \*\*batch\.model_inputs\(\)"),
        ({"ulysses": "not a batch"}, r"call the model with \*\*batch\.model_inputs\(\)"),
        (
            {"ulysses": shard_batch(torch.zeros(1, 8).long(), None, None, place(1, 2))},
            r"^shard_batch and apply_ulysses were called with different meshes",
        ),
    ],
)
def test_a_call_without_a_batch_of_the_mesh_or_with_more_is_refused(changes: dict[str, Any], text: str) -> None:
    model: Any = apply_ulysses(tiny_model(), ALONE)
    batch = shard_batch(torch.zeros(1, 8).long(), None, None, ALONE)
    with pytest.raises(UserError, match=text):
        model(**{**batch.model_inputs(), **changes})
    with pytest.raises(UserError, match=r"^LlamaAttention did not receive the document tables"):
        model.model(input_ids=batch.input_ids_BL, use_cache=False)


NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"), 0.0)


@pytest.mark.parametrize(
    ("kind", "changes", "num_positions"),
    [
        ("gpt2", {"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, **NO_DROPOUT}, 64),
        # Its table reserves two entries before the first position.
        ("opt", {"max_position_embeddings": 64, "ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32}, 64),
        ("ctrl", {"max_position_embeddings": 64, "n_embd": 32, "dff": 48, **NO_DROPOUT}, 64),
        ("llama", {"max_position_embeddings": 64}, None),
    ],
)
def test_the_size_of_a_position_table_is_found(kind: str, changes: dict[str, Any], num_positions: int | None) -> None:
    assert probe_model(tiny_model(kind, meta=True, **changes)).num_positions == num_positions


@pytest.mark.parametrize(
    ("token", "label", "lengths", "text"),
    [
        (61, 0, (50, 50), "input_ids contain token id 61, but the model's embedding covers ids 0 to 60"),
        (0, 61, (50, 50), "labels contain token id 61, but the model's output head covers ids 0 to 60"),
        (0, 0, (80, 20), "document of 80 tokens, but the model's position table has 64 entries"),
    ],
    ids=["token", "label", "position"],
)
def test_an_impossible_look_up_is_refused_on_every_rank_alike(
    token: int, label: int, lengths: tuple[int, int], text: str
) -> None:
    """Only the second rank has the token, and both ranks raise the same error before any collective."""
    for rank in range(2):
        group: Any = SimpleNamespace(group_name="nowhere")
        mesh = SequenceMesh(sp_size=2, sp_rank=rank, ring_size=1, world_size=2, groups={"ulysses": group})
        model: Any = tiny_model("gpt2", max_position_embeddings=64, bos_token_id=0, eos_token_id=0, **NO_DROPOUT)
        apply_ulysses(model, mesh)
        ids = torch.zeros(1, 100, dtype=torch.int64)
        labels = ids.clone()
        ids[0, 99], labels[0, 99] = token, label
        with pytest.raises(UserError, match=text):
            model(**shard_batch(ids, labels, lengths, mesh).model_inputs())
