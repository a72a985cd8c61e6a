"""Recurrent layers: their heads on each rank, their results for packed documents, and refusals."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ray_ulysses import SequenceMesh, apply_ulysses, shard_batch
from ray_ulysses.attention.mixer_layouts import Block, arranged, local_channels
from ray_ulysses.attention.mixers import find_mixers, shared_sizes
from ray_ulysses.attention.refusals import refuse_inexact
from ray_ulysses.errors import UserError
from tests.unit.attention.meshes import ALONE, place
from tests.unit.attention.models import HYBRIDS, VOCAB, zoo_model

VALID = {
    # 32 channels; 4 key heads; 8 heads in 1, 2 or 4 groups of states.
    "lfm2": (1, 2, 4, 8, 16, 32),
    "qwen3_next": (1, 2, 4),
    "olmo_hybrid": (1, 2, 4),
    "kimi_linear": (1, 2, 4),
    "minimax": (1, 2, 4),
    "jamba": (1, 2, 4, 8, 16, 32, 64),
    "zamba": (1, 2, 4),
    "bamba": (1, 2, 4, 8),
    "nemotron_h": (1, 2, 4, 8),
}


@pytest.mark.parametrize("architecture", VALID)
def test_ranks_share_heads_equally(architecture: str) -> None:
    assert shared_sizes(zoo_model(architecture)) == VALID[architecture]


def test_units_divide_among_ranks_or_ranks_among_units() -> None:
    assert Block(2, 5).fits(1) and Block(2, 5).fits(4) and not Block(2, 5).fits(3)
    # Three ranks would have four heads each, from two of the four groups.
    model = zoo_model("bamba", mamba_n_heads=12, mamba_expand=3, mamba_n_groups=4)
    assert shared_sizes(model) == (1, 2, 4, 12)


def test_every_channel_goes_to_the_rank_of_its_head() -> None:
    blocks = (Block(4, 3), Block(1, 2), Block(4, 1, is_exchanged=False), Block(8, 1))
    row = torch.arange(12 + 2 + 4 + 8)
    one, other = arranged(row, blocks, 2, dim=0)
    assert one.tolist() == [0, 1, 2, 3, 4, 5, 12, 13, 18, 19, 20, 21]
    assert other.tolist() == [6, 7, 8, 9, 10, 11, 12, 13, 22, 23, 24, 25]
    assert local_channels(blocks, 2) == len(one) + 2
    assert arranged(row, blocks, 1, dim=0).tolist() == [[*range(14), *range(18, 26)]]


def output_of(result: Any) -> torch.Tensor:
    output: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return output


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_layer_on_a_packed_row_gives_what_its_module_gives_each_document(architecture: str) -> None:
    # Longer than the chunks of both recurrences: 64 tokens in the delta nets, 8 in the zoo's Mamba layers.
    lengths, mesh = (70, 1, 2, 23), SequenceMesh.from_group(None)
    ours, theirs = apply_ulysses(zoo_model(architecture), mesh), zoo_model(architecture)
    (name, mixer, _), *_ = find_mixers(ours)
    (_, module, layout), *_ = find_mixers(theirs)
    called = partial(module, position_embeddings=None, attention_mask=None) if layout.is_attention else module
    taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        taken.append((args[0] if args else kwargs["hidden_states"], output_of(out)))

    mixer.register_forward_hook(take, with_kwargs=True)
    ids = torch.randint(1, VOCAB, (1, sum(lengths)), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours(**shard_batch(ids, None, lengths, mesh).model_inputs())
        ((hidden, out),) = taken
        wanted = torch.cat([output_of(called(document)) for document in hidden.split(lengths, dim=1)], dim=1)
        crossing = output_of(called(hidden))
    assert torch.allclose(out, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max())), name
    # Otherwise the layer would not look back, and the comparison would prove nothing.
    assert float((crossing - wanted).norm() / wanted.norm()) > 1e-3


@pytest.mark.parametrize(
    ("architecture", "sp_size", "text"),
    [
        ("qwen3_next", 3, r"=3 does not evenly divide the 4 key heads of the gated delta nets .* 1, 2, 4$"),
        ("bamba", 3, r"the 8 heads of the Mamba layers .* 1, 2, 4$"),
        # Attention has four heads.
        ("lfm2", 8, r"the 32 channels of the short convolutions .* 1, 2, 4$"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_the_valid_sizes(architecture: str, sp_size: int, text: str) -> None:
    model = zoo_model(architecture)
    with pytest.raises(UserError, match=text):
        refuse_inexact(model, model.config, place(0, sp_size))
    refuse_inexact(model, model.config, place(1, 4))
    with pytest.raises(UserError, match=r"^parallel\.ring_size=2 "):
        refuse_inexact(model, model.config, replace(place(0, 4), ring_size=2))


def test_an_adapter_of_a_convolution_would_be_passed_over_and_is_refused() -> None:
    class Adapted(nn.Conv1d):
        pass

    model = zoo_model("lfm2")
    model.model.layers[0].conv.conv.__class__ = Adapted
    with pytest.raises(UserError, match=r"^lfm2 has unsupported recurrent or attention layers \(Adapted\)"):
        refuse_inexact(model, model.config, None)


def test_a_layer_called_past_the_model_or_with_a_mask_is_refused() -> None:
    model = apply_ulysses(zoo_model("lfm2"), ALONE)
    (_, mixer, _), *_ = find_mixers(model)
    hidden = torch.zeros(1, 4, 32)
    with pytest.raises(UserError, match=r"^Lfm2ShortConv did not receive the document tables"):
        mixer(hidden)
    tables: list[dict[str, Any]] = []
    mixer.register_forward_pre_hook(lambda module, args, kwargs: tables.append(kwargs), with_kwargs=True)
    with torch.no_grad():
        model(**shard_batch(torch.zeros(1, 4).long(), None, None, ALONE).model_inputs())
    given = tables[0] | {"hidden_states": hidden}
    with pytest.raises(UserError, match=r"^Lfm2ShortConv received a mask or a cache"):
        mixer(**given | {"attention_mask": torch.ones(1, 4)})
    with pytest.raises(
        UserError, match=r"^Lfm2ShortConv received 3 tokens per row, but the batch's slice has 4 tokens"
    ):
        mixer(**given | {"hidden_states": hidden[:, :3]})
    model.model.layers[0].conv = zoo_model("lfm2").model.layers[0].conv
    with pytest.raises(UserError, match=r"^Lfm2ShortConv at model\.layers\.0\.conv was replaced after apply_ulysses"):
        model(**shard_batch(torch.zeros(1, 4).long(), None, None, ALONE).model_inputs())


def test_a_layer_whose_class_an_engine_replaces_computes_the_same() -> None:
    model, batch = apply_ulysses(zoo_model("lfm2"), ALONE), shard_batch(torch.arange(8)[None], None, (3, 5), ALONE)
    (_, mixer, _), *_ = find_mixers(model)
    with torch.no_grad():
        wanted = model(**batch.model_inputs()).logits
        # As fully_shard of FSDP2 does.
        mixer.__class__ = type("FSDPLfm2ShortConv", (type(mixer),), {})
        assert torch.equal(model(**batch.model_inputs()).logits, wanted)


def test_only_parameters_that_a_layout_names_are_read() -> None:
    """A parameter that a later Transformers release adds must not be used unsharded."""
    model = apply_ulysses(zoo_model("qwen3_next"), ALONE)
    (_, mixer, _), *_ = find_mixers(model)
    kind: Any = type(mixer)
    forward = kind.forward

    def with_another(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return forward(self, hidden_states) + self.extra

    mixer.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    try:
        kind.forward = with_another
        with pytest.raises(AttributeError, match="extra"):
            model(**shard_batch(torch.zeros(1, 4).long(), None, None, ALONE).model_inputs())
    finally:
        kind.forward = forward


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_an_engine_sees_as_many_calls_of_modules_whatever_the_documents(architecture: str) -> None:
    """ZeRO-3 in DeepSpeed 0.19.8 traces module calls on each rank, and the ranks' traces must be equal."""
    model, counts = apply_ulysses(zoo_model(architecture), ALONE), []
    calls: list[str] = []
    for name, module in model.named_modules():
        # To the engine, all experts of a layer are one module.
        if "experts" not in name:
            module.register_forward_pre_hook(lambda module, args, name=name: calls.append(name))
    for lengths in ((12,), (3, 1, 2, 6)):
        calls.clear()
        with torch.no_grad():
            model(**shard_batch(torch.arange(12)[None] % VOCAB, None, lengths, ALONE).model_inputs())
        counts.append(list(calls))
    assert counts[0] == counts[1]


def test_a_copy_of_a_model_has_layers_of_its_own() -> None:
    model = apply_ulysses(zoo_model("qwen3_next"), ALONE)
    copy = deepcopy(model)
    (_, mixer, _), *_ = find_mixers(copy)
    batch = shard_batch(torch.zeros(1, 4).long(), None, None, ALONE)
    with torch.no_grad():
        before = copy(**batch.model_inputs()).logits
        mixer.A_log.fill_(-3.0)
        assert not torch.equal(copy(**batch.model_inputs()).logits, before)
        assert torch.equal(model(**batch.model_inputs()).logits, before)
