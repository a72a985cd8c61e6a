"""Tiles and activations in host memory on a GPU: the same gradients, less memory, and no step that waits for a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch

from ray_ulysses import SequenceMesh, apply_ulysses, causal_lm_loss, shard_batch
from ray_ulysses.attention.recompute import checkpoint_contexts
from ray_ulysses.data.read.reader import RowSlice
from ray_ulysses.engine import activation_offload
from ray_ulysses.engine.activation_offload import ActivationOffload, CudaCopies, PinnedRange, host_range
from ray_ulysses.engine.fused_norms import fuse_norms
from ray_ulysses.engine.tiled_mlp import tile_mlps
from ray_ulysses.trainer.step import batch_of, read_back
from tests.unit.attention.models import VOCAB, tiny_model

DEVICE = torch.device("cuda")
LAYERS, TOKENS, HIDDEN = 8, 2048, 1024
DOCUMENTS = (1200, 1, 500, 347)
ROOM = 512 << 20
Kinds = tuple[Literal["layer_inputs", "attention_outputs"], ...]
BOTH: Kinds = ("layer_inputs", "attention_outputs")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pin in pieces that tensors cross the borders of, and leave the device empty."""
    monkeypatch.setattr(activation_offload, "PIECE_BYTES", 3 << 20)
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def make_model(
    kinds: Kinds = (),
    tile: int | Literal["off"] = "off",
    attention: Any = "math",
    dtype: torch.dtype = torch.bfloat16,
    *,
    fused_norms: bool = False,
    compiled: bool = False,
) -> tuple[Any, ActivationOffload | None]:
    torch.manual_seed(0)
    model: Any = tiny_model(
        "llama", hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=TOKENS,
    ).to(DEVICE, torch.bfloat16).to(dtype)  # fmt: skip
    apply_ulysses(model, SequenceMesh.from_group(None), attention=attention).train()
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": checkpoint_contexts("both")}
    )
    if fused_norms:
        assert len(fuse_norms(model)) == 2 * LAYERS + 1
    tile_mlps(model, tile, compiled=compiled)
    if not kinds:
        return model, None
    offload = ActivationOffload(CudaCopies(ROOM, DEVICE), kinds, keep="both", budget_bytes=ROOM)
    for layer in model.modules():
        if getattr(layer, "gradient_checkpointing", False):
            layer._gradient_checkpointing_func = partial(offload.checkpoint, layer._gradient_checkpointing_func)
    return model, offload


def row() -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def stepper(model: Any, loss_tile: int | Literal["off"] = "off") -> Callable[[], torch.Tensor]:
    batch = shard_batch(row(), None, DOCUMENTS, SequenceMesh.from_group(None))

    def step() -> torch.Tensor:
        loss, _ = causal_lm_loss(model, batch, tile=loss_tile)
        (loss / TOKENS).backward()
        return loss.detach()

    return step


def gradients(model: Any, step: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = step()
    return {"loss": loss, **{name: one.grad.clone() for name, one in model.named_parameters()}}


def peak_bytes(step: Callable[[], torch.Tensor]) -> int:
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("kinds", [BOTH, BOTH[:1], BOTH[1:]], ids="+".join)
def test_a_step_with_activations_in_host_memory_has_the_same_bits(kinds: Kinds) -> None:
    model, _ = make_model()
    wanted, again = (gradients(model, stepper(model)) for _ in range(2))
    assert all(torch.equal(wanted[name], again[name]) for name in wanted), "the reference is not deterministic"
    model, offload = make_model(kinds)
    assert offload is not None
    step = stepper(model)
    # Later steps meet slabs and buffers that earlier copies may still use.
    for _ in range(5):
        ours = gradients(model, step)
        assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == []
    assert offload.bytes_in_use == 0


def test_activations_in_host_memory_leave_the_device() -> None:
    peaks = {kinds: peak_bytes(stepper(make_model(kinds)[0])) for kinds in ((), BOTH)}
    # Per layer: the input, and attention's output in two layouts, in bf16. Two layers' stay, and what is made.
    layer = 3 * TOKENS * HIDDEN * 2
    assert peaks[()] - peaks[BOTH] >= 0.8 * (LAYERS - 3) * layer


@pytest.mark.parametrize("kinds", [(), BOTH], ids=lambda kinds: "+".join(kinds) or "on the device")
def test_a_step_with_tiles_and_copies_waits_for_nothing(kinds: Kinds) -> None:
    model, _ = make_model(kinds, tile=512, attention="auto")
    step = stepper(model, loss_tile=512)
    step()  # Kernels are chosen and loaded, and memory is pinned.
    model.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_batch_reaches_the_model_and_is_read_back_without_a_wait() -> None:
    def row() -> RowSlice:
        ids, places = (np.arange(TOKENS, dtype=np.int64) for _ in range(2))
        return RowSlice(
            row=0, sp_rank=0, sp_size=1, row_tokens=TOKENS, document_lengths=DOCUMENTS, input_ids=ids,
            labels=ids.copy(), position_ids=places,
        )  # fmt: skip

    mesh = SequenceMesh.from_group(None)
    wanted = read_back(batch_of(row(), mesh, torch.device("cpu")))()
    read_back(batch_of(row(), mesh, DEVICE))  # Memory is pinned.
    torch.cuda.set_sync_debug_mode("error")
    try:
        checksum = read_back(batch_of(row(), mesh, DEVICE))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert checksum() == wanted


def test_memory_that_cannot_be_pinned_is_used_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    class Refuses:
        def cudaHostRegister(self, *_: object) -> int:
            return 2

    pinned = PinnedRange(host_range(16 << 20), DEVICE, Refuses)
    source = torch.randint(0, 255, (10 << 20,), dtype=torch.uint8, device=DEVICE)
    for host, part in pinned.pieces(1 << 20, len(source)):
        host.copy_(source[part], non_blocking=True)
    back = torch.empty_like(source)
    for host, part in pinned.pieces(1 << 20, len(source)):
        back[part].copy_(host, non_blocking=True)
    assert torch.equal(back, source)
    assert "can't be pinned" in caplog.text


def _relative(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((ours.double() - wanted.double()).norm() / wanted.double().norm())


def test_tiles_in_bf16_are_as_close_to_fp32_as_the_whole() -> None:
    tiles = 8
    truth_model, _ = make_model(attention="math")
    truth_model = truth_model.float()
    truth = gradients(truth_model, stepper(truth_model))
    errors = []
    for mlp_tile, loss_tile in (("off", "off"), (TOKENS // tiles, TOKENS // tiles)):
        model, _ = make_model(tile=mlp_tile)  # type: ignore[arg-type]
        ours = gradients(model, stepper(model, loss_tile))  # type: ignore[arg-type]
        errors.append({name: _relative(ours[name], truth[name]) for name in truth})
    whole, tiled = errors
    assert {name: one for name, one in tiled.items() if one > 1.1 * whole[name] + 1e-4} == {}


def test_the_logits_of_a_row_are_never_whole() -> None:
    vocabulary, tokens = 64_000, 4096

    model: Any = tiny_model(
        "llama", vocab_size=vocabulary, hidden_size=256, intermediate_size=512, num_hidden_layers=1,
        tie_word_embeddings=False, max_position_embeddings=tokens,
    ).to(DEVICE, torch.bfloat16)  # fmt: skip

    apply_ulysses(model, SequenceMesh.from_group(None)).train()
    ids = torch.randint(0, vocabulary, (1, tokens), device=DEVICE)
    batch = shard_batch(ids, None, (tokens,), SequenceMesh.from_group(None))

    def step(tile: int | Literal["off", "auto"]) -> torch.Tensor:
        model.zero_grad(set_to_none=False)
        loss, _ = causal_lm_loss(model, batch, tile=tile)
        (loss / tokens).backward()
        return loss.detach()

    peaks = {tile: peak_bytes(partial(step, tile)) for tile in ("off", 256)}  # type: ignore[arg-type]
    assert peaks["off"] >= 2 * tokens * vocabulary * 4
    assert peaks[256] <= 0.25 * peaks["off"]  # type: ignore[index]


def test_fused_norms_and_compiled_tiles_in_bf16_are_as_close_to_fp32_as_without() -> None:
    def found(dtype: torch.dtype, **options: Any) -> torch.Tensor:
        model, _ = make_model(tile=500, dtype=dtype, **options)
        values = gradients(model, stepper(model))
        return torch.cat([values[name].flatten().double() for name in sorted(values) if name != "loss"])

    truth = found(torch.float32)
    plain, fused, compiled = (
        float((found(torch.bfloat16, **options) - truth).norm() / truth.norm())
        for options in ({}, {"fused_norms": True}, {"fused_norms": True, "compiled": True})
    )
    print(f"bf16 against fp32: {plain:.2e}, with fused norms {fused:.2e}, and compiled tiles {compiled:.2e}")
    assert max(fused, compiled) <= 1.1 * plain


def test_fused_norms_take_no_more_memory_than_tiled_ones() -> None:
    tiled, fused = (peak_bytes(stepper(make_model(tile=500, fused_norms=one)[0])) for one in (False, True))
    print(f"peak with tiled norms {tiled >> 20} MiB, with fused norms {fused >> 20} MiB")
    assert fused <= 1.02 * tiled
