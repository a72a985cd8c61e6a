"""Length-dependent rotary embeddings use each document's own length, on every layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ray_ulysses import apply_ulysses, shard_batch
from ray_ulysses.attention.batch import ShardedBatch
from ray_ulysses.attention.rope import CurrentBatch, follow_documents
from ray_ulysses.parallel.mesh import SequenceMesh
from tests.breadth import fast_only
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


ROWS = ((30, 10, 13, 7), (12, 44))
"""Documents below and above the original length in two rows; the last row has padding."""
ROW_TOKENS = 64
LAYOUTS = ((1, 1), (2, 1), (2, 2), (4, 2), (8, 4))
"""``(sp_size, ring_size)``."""


def places(sp_size: int, ring_size: int) -> list[SequenceMesh]:
    return [
        SequenceMesh(sp_size=sp_size, sp_rank=rank, ring_size=ring_size, world_size=sp_size) for rank in range(sp_size)
    ]


def rotary(kind: str, **changes: Any) -> Any:
    return tiny_model(**{**KINDS[kind], **changes}).model.rotary_emb


def batch_of(rows: Sequence[Sequence[int]], mesh: SequenceMesh = ALONE, tokens: int = ROW_TOKENS) -> ShardedBatch:
    return shard_batch(torch.zeros(len(rows), tokens, dtype=torch.long), None, rows, mesh)


def embedding(module: Any, batch: ShardedBatch, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cos_BLD, sin_BLD = module(torch.zeros(1), batch.position_ids_BL, *args)
    return cos_BLD, sin_BLD


def alone(kind: str, length: int, *args: Any, **changes: Any) -> tuple[torch.Tensor, ...]:
    """Return Transformers' own embedding of a single document, in a new model."""
    parts = rotary(kind, **changes)(torch.zeros(1), torch.arange(length).unsqueeze(0), *args)
    return tuple(part[0] for part in parts)


def mismatches(module: Any, batch: ShardedBatch, kind: str, *args: Any, **changes: Any) -> list[int]:
    """Return the lengths of local documents whose embedding differs in any bit from the document's alone."""
    ours, wrong = embedding(module, batch, *args), []
    for length in {length for row in batch.documents.lengths for length in row}:
        mine = batch.document_lengths_BL == length
        for part, wanted in zip(ours, alone(kind, length, *args, **changes), strict=True):
            if not torch.equal(part[mine], wanted[batch.position_ids_BL[mine]]):
                wrong.append(length)
    return wrong


@pytest.mark.parametrize(
    "layout", fast_only(LAYOUTS, (2, 1), (4, 2)), ids=lambda layout: f"sp{layout[0]}-ring{layout[1]}"
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_document_gets_the_frequencies_that_it_has_alone(kind: str, layout: tuple[int, int]) -> None:
    for mesh in places(*layout):
        for rows in (ROWS, ROWS[:1], ROWS[1:], ((5, 9),)):
            model = tiny_model(**KINDS[kind])
            current = CurrentBatch(batch=batch_of(rows, mesh))
            if kind != "default" and layout == (2, 1) and rows is ROWS:
                # If Transformers stops taking the length from the neighbors, follow_documents can be removed.
                assert 10 in mismatches(model.model.rotary_emb, current.batch, kind)
            follow_documents(model, current)
            assert mismatches(model.model.rotary_emb, current.batch, kind) == [], (mesh.sp_rank, rows)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_frequencies_do_not_depend_on_the_rows_that_came_before(kind: str) -> None:
    model, current = tiny_model(**KINDS[kind]), CurrentBatch()
    follow_documents(model, current)
    for tokens in (40, 24, 12, 60, 20, 8):
        current.batch = batch_of([[tokens]])
        assert mismatches(model.model.rotary_emb, current.batch, kind) == [], tokens


def test_dynamic_scaling_of_one_type_of_layer_does_not_remember_either() -> None:
    kinds = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    changes: dict[str, Any] = {"rope_parameters": kinds, "layer_types": list(kinds)}
    changes |= {"max_position_embeddings": ORIGINAL_TOKENS, "head_dim": 8, "model_type": "gemma3_text"}
    model, current = tiny_model(**changes), CurrentBatch()
    follow_documents(model, current)
    for rows in ([[40, 20]], [[24]], [[12, 17]]):
        current.batch = batch_of(rows)
        for layer_type in kinds:
            assert mismatches(model.model.rotary_emb, current.batch, "default", layer_type, **changes) == []


@pytest.mark.parametrize("rows", fast_only([ROWS, ((5, 9), (16, 3))], ROWS), ids=str)
@pytest.mark.parametrize("kind", fast_only(["longrope", "dynamic"], "longrope"))
def test_a_compiled_model_gives_each_document_its_own_frequencies(kind: str, rows: Any) -> None:
    batch = batch_of(rows)
    wanted = apply_ulysses(tiny_model(**KINDS[kind]), ALONE)(**batch.model_inputs()).logits
    model = apply_ulysses(tiny_model(**KINDS[kind]), ALONE)
    compiled = torch.compile(model, backend="aot_eager")(**batch.model_inputs()).logits
    assert torch.allclose(compiled, wanted, rtol=1e-6, atol=1e-6)
    torch.compiler.reset()


def test_applying_ulysses_again_takes_the_documents_of_the_new_mesh() -> None:
    model, again = apply_ulysses(tiny_model(**KINDS["longrope"]), ALONE), place(0, 1, world_size=2)
    short = shard_batch(torch.arange(12), None, None, again)
    with torch.no_grad():
        model(**shard_batch(torch.arange(40), None, None, ALONE).model_inputs())
        ours = apply_ulysses(model, again)(**short.model_inputs()).logits
        wanted = apply_ulysses(tiny_model(**KINDS["longrope"]), again)(**short.model_inputs()).logits
    assert torch.equal(ours, wanted)
