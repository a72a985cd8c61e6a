"""Length-dependent rotary embeddings take their frequencies from whole rows, whatever slice a rank holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ray_ulysses import apply_ulysses, shard_batch
from ray_ulysses.attention.rope import RowLength, follow_row_length
from tests.unit.attention.meshes import ALONE, place
from tests.unit.attention.models import tiny_model

ORIGINAL_TOKENS = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_TOKENS,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
KINDS: dict[str, dict[str, Any]] = {
    "longrope": {"rope_parameters": LONGROPE, "max_position_embeddings": 64},
    "dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL_TOKENS},
    "default": {},
}


def rotary(kind: str) -> Any:
    return tiny_model(**KINDS[kind]).model.rotary_emb


def positions(first: int, last: int) -> torch.Tensor:
    return torch.arange(first, last).unsqueeze(0)


@pytest.mark.parametrize("tokens", [12, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_every_slice_gets_the_frequencies_of_the_whole_row(kind: str, tokens: int) -> None:
    x = torch.zeros(1)
    wanted = rotary(kind)(x, positions(0, tokens))
    model = tiny_model(**KINDS[kind])
    row_length = RowLength(max_position=tokens - 1)
    follow_row_length(model, row_length)
    for first in range(0, tokens, 4):
        ours = model.model.rotary_emb(x, positions(first, first + 4))
        for one, whole in zip(ours, wanted, strict=True):
            assert torch.equal(one, whole[:, first : first + 4])


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_without_it_the_slices_of_one_row_would_disagree(kind: str) -> None:
    """The trap itself: should Transformers close it, ``follow_row_length`` can go."""
    x = torch.zeros(1)
    wanted = rotary(kind)(x, positions(0, 40))[0]
    assert not torch.equal(rotary(kind)(x, positions(4, 8))[0], wanted[:, 4:8])


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_frequencies_do_not_depend_on_the_rows_that_came_before(kind: str) -> None:
    x = torch.zeros(1)
    model = tiny_model(**KINDS[kind])
    row_length = RowLength()
    follow_row_length(model, row_length)
    for tokens in (40, 24, 12, 60, 20, 8):
        row_length.max_position = tokens - 1
        ours = model.model.rotary_emb(x, positions(0, tokens))
        for one, fresh in zip(ours, rotary(kind)(x, positions(0, tokens)), strict=True):
            assert torch.equal(one, fresh), tokens


def test_dynamic_scaling_of_one_type_of_layer_does_not_remember_either() -> None:
    kinds = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    changes: dict[str, Any] = {"rope_parameters": kinds, "layer_types": list(kinds)}
    changes |= {"max_position_embeddings": ORIGINAL_TOKENS, "head_dim": 8}
    model = tiny_model("gemma3_text", **changes)
    row_length = RowLength()
    follow_row_length(model, row_length)
    x = torch.zeros(1)
    for tokens in (40, 24, 12):
        row_length.max_position = tokens - 1
        fresh = tiny_model("gemma3_text", **changes).model.rotary_emb
        for layer_type in kinds:
            ours = model.model.rotary_emb(x, positions(0, tokens), layer_type)
            for one, wanted in zip(ours, fresh(x, positions(0, tokens), layer_type), strict=True):
                assert torch.equal(one, wanted), (tokens, layer_type)


def test_padding_longer_than_its_documents_changes_no_frequency() -> None:
    model = tiny_model(**KINDS["longrope"])
    follow_row_length(model, RowLength(max_position=9))
    row = torch.cat([positions(0, 10), positions(0, 30)], dim=1)
    ours = model.model.rotary_emb(torch.zeros(1), row)
    for one, wanted in zip(ours, rotary("longrope")(torch.zeros(1), positions(0, 10)), strict=True):
        assert torch.equal(one[:, :10], wanted)


def test_applying_ulysses_again_forgets_the_rows_of_the_first_mesh() -> None:
    model = apply_ulysses(tiny_model(**KINDS["longrope"]), ALONE)
    with torch.no_grad():
        model(**shard_batch(torch.arange(40), None, None, ALONE).model_inputs())
        again = place(0, 1, world_size=2)
        short = shard_batch(torch.arange(12), None, None, again)
        ours = apply_ulysses(model, again)(**short.model_inputs()).logits
        wanted = apply_ulysses(tiny_model(**KINDS["longrope"]), again)(**short.model_inputs()).logits
    assert torch.equal(ours, wanted)


def test_other_rotary_embeddings_are_left_alone() -> None:
    model = tiny_model()
    follow_row_length(model, RowLength())
    assert "forward" not in vars(model.model.rotary_emb)
