"""The estimate is arithmetic: every term is held against one that is done by hand here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_ulysses.model_shape import Experts, ModelShape
from ray_ulysses.planner.memory import MemoryEstimate, at_peak
from ray_ulysses.planner.memory_terms import GIB, MemoryTerm
from tests.planned import estimate
from tests.unit.planner.runs import LLAMA_3_8B as LLAMA_FIELDS

LLAMA_3_8B = ModelShape.from_config_dict(LLAMA_FIELDS)
QWEN3_8B = replace(LLAMA_3_8B, has_head_norms=True)
N = 8_030_261_248
TOKENS = 131_072 // 8
"""Of a rank, unless a test says otherwise."""
STATE = ("weights, whole", "weights, sharded", "master weights, fp32", "AdamW moments, fp32", "gradients, fp32")


def memory(shape: ModelShape = LLAMA_3_8B, /, **changes: Any) -> MemoryEstimate:
    settings: dict[str, Any] = {"world_size": 8, "sp_size": 8, "context_tokens": 131_072, **changes}
    return estimate(shape, **settings)


def sizes(terms: tuple[MemoryTerm, ...]) -> dict[str, int]:
    assert len({term.name for term in terms}) == len(terms)
    assert all(term.bytes > 0 and term.source for term in terms)
    return {term.name: term.bytes for term in terms}


def device(shape: ModelShape = LLAMA_3_8B, /, **changes: Any) -> dict[str, int]:
    return sizes(memory(shape, **changes).device)


def host(shape: ModelShape = LLAMA_3_8B, /, **changes: Any) -> dict[str, int]:
    return sizes(memory(shape, **changes).host)


def state(terms: dict[str, int]) -> int:
    return sum(terms.get(name, 0) for name in STATE)


@pytest.mark.parametrize(
    ("stage", "dtype", "whole", "sharded"),
    [
        pytest.param(1, "bf16", 2 + 4, 4 + 8, id="zero1-bf16"),
        pytest.param(1, "fp32", 4 + 4, 4 + 8, id="zero1-fp32"),
        pytest.param(2, "bf16", 2, 4 + 8 + 4, id="zero2-bf16"),
        pytest.param(2, "fp32", 4, 4 + 8 + 4, id="zero2-fp32"),
        pytest.param(3, "bf16", 0, 2 + 4 + 8 + 4, id="zero3-bf16"),
    ],
)
def test_a_stage_keeps_unsharded_state_whole_on_every_rank(stage: int, dtype: str, whole: int, sharded: int) -> None:
    terms = device(dtype=dtype, zero_stage=stage)
    assert state(terms) == N * whole + N // 8 * sharded
    assert ("weights, gathered" in terms) == (stage == 3)
    # While they are flattened.
    assert terms.get("the model, beside its flat copy") == (
        None if stage == 3 else 2 * N * (2 if dtype == "bf16" else 4)
    )


@pytest.mark.parametrize(("stage", "on_device"), [(1, N * (2 + 4)), (2, N * 2 + N // 8 * 4), (3, N // 8 * 2)])
def test_offload_leaves_accumulated_state_of_the_stage_on_the_device(stage: int, on_device: int) -> None:
    assert state(device(zero_stage=stage, offload_optimizer="cpu")) == on_device


def test_offload_moves_the_optimizer_to_the_host() -> None:
    before, after = memory(), memory(offload_optimizer="cpu")
    moved = N // 8 * (4 + 8 + 4)
    assert before.device_bytes - after.device_bytes == moved
    # Gradients twice: where they are accumulated, and what the optimizer steps with.
    assert after.host_bytes == moved + N // 8 * 4 + sizes(after.host)["checkpoints, staged"]
    offloaded = memory(offload_optimizer="cpu", offload_param="cpu")
    assert "weights, sharded" not in sizes(offloaded.device)
    assert sizes(offloaded.host)["weights, sharded"] == N // 8 * 2 == after.device_bytes - offloaded.device_bytes


def test_an_optimizer_on_nvme_takes_buffers_of_a_sub_group_and_the_gradients() -> None:
    terms = host(offload_optimizer="nvme", host_buffers=0)
    assert terms["buffers for NVMe"] == 4 * 100_000_000 * 4
    assert terms["gradients, fp32"] == N // 8 * 4
    assert not terms.keys() & {"master weights, fp32", "AdamW moments, fp32"}


@pytest.mark.parametrize("kinds", [("layer_inputs",), ("attention_outputs",), ("layer_inputs", "attention_outputs")])
def test_offloaded_activations_are_on_the_host_but_for_two_layers(kinds: tuple[str, ...]) -> None:
    # 4 bytes per log-sum-exp of 32 heads.
    size = {"layer_inputs": 32 * TOKENS * 4096 * 2, "attention_outputs": 32 * TOKENS * (4096 * 2 + 32 * 4)}
    # Without an update on the device, which may be the peak of what is left.
    settings = {"attention_output": "kernel", "offload_optimizer": "cpu"}
    before, after = memory(**settings), memory(**settings, offload_activations=kinds)
    for kind in kinds:
        name = kind.replace("_", " ")
        assert sizes(after.host)[f"{name}, kept"] == sizes(before.device)[f"{name}, kept"] == size[kind]
        assert f"{name}, kept" not in sizes(after.device)
        assert sizes(after.device)[f"{name}, in flight"] == size[kind] * 2 // 32
    total = sum(size[kind] for kind in kinds)
    assert before.device_bytes - after.device_bytes == total - sum(size[kind] * 2 // 32 for kind in kinds)
    assert after.host_bytes - before.host_bytes == total


def test_a_checkpoint_is_staged_in_copies_of_a_ranks_share_and_peer_memory_takes_two_of_two_states() -> None:
    assert host(init="pretrained")["checkpoints, staged"] == 2 * (N // 8) * (4 + 8 + 2)
    assert host(dtype="fp32", host_buffers=1)["checkpoints, staged"] == N // 8 * (4 + 8)
    assert not host(host_buffers=0).keys() & {"checkpoints, staged", "peer memory"}
    assert host(peer_memory=True)["peer memory"] == 4 * (N // 8) * 14
    assert host(dtype="fp32", peer_memory=True)["peer memory"] == 4 * (N // 8) * 12


@pytest.mark.parametrize("checkpointed", [True, False])
def test_an_mlp_without_tiles_has_six_values_of_its_width_per_token(checkpointed: bool) -> None:
    terms = device(context_tokens=65_536, mlp_tile="off", loss_tile="off", gradient_checkpointing=checkpointed)
    # Two gradients take less than the backward pass of the norm before, in fp32, which comes when the MLP's are freed.
    gradients, norm = 8192 * 2 * 14336 * 2, 8192 * 4096 * 5 * 4
    if checkpointed:
        assert terms["one MLP"] == 8192 * 4 * 14336 * 2
        assert terms["one MLP, backward"] == gradients
    else:
        assert terms["activations of all layers"] > 32 * 8192 * 4 * 14336 * 2
        assert terms["a norm, backward"] == norm
    assert terms["logits"] == 8192 * 128256 * 12
    assert not terms.keys() & {"one MLP, tiled", "gradients of the head's tiles"}


@pytest.mark.parametrize(("stage", "update"), [(1, N // 8 * 4), (2, N // 8 * 4), (3, N // 8 * (4 + 4))])
def test_the_update_of_a_stage_comes_after_its_passes(stage: int, update: int) -> None:
    short, long = (memory(context_tokens=context, zero_stage=stage) for context in (8192, 1 << 20))
    terms = sizes(short.device)
    assert terms["temporaries of AdamW"] == update
    kept = [*STATE, *["bucket of gradients"] * (stage == 3), "runtime", "temporaries of AdamW"]
    in_update = sum(terms.get(name, 0) for name in kept)
    # Neither weights that are gathered for a pass nor activations are there.
    assert short.device_bytes == in_update if stage == 3 else short.device_bytes >= in_update
    assert long.device_bytes > short.device_bytes


@pytest.mark.parametrize("accelerator", [True, False])
def test_an_optimizer_on_the_host_allocates_for_its_update_where_there_is_no_device(accelerator: bool) -> None:
    settings = {"context_tokens": 8192, "offload_optimizer": "cpu", "accelerator": accelerator}
    assert "temporaries of AdamW" not in device(**settings)
    # DeepSpeed's own optimizer beside a GPU updates in place; torch's, on a CPU, does not.
    assert ("temporaries of AdamW" in host(**settings)) is not accelerator


def test_activations_follow_the_tokens_of_a_rank() -> None:
    terms = device()
    assert terms["layer inputs, kept"] == 32 * TOKENS * 4096 * 2
    # The gradient of a head by one tile is more than the log-probabilities of a tile and two gradients in fp32.
    assert terms["logits"] == (512 * 128256 + 128256 * 4096) * 2 > 512 * 128256 * 12
    assert terms["gradients of the head's tiles"] == TOKENS * 4096 * 2 + 128256 * 4096 * 4
    # Six values of each token of a tile, the gradient of the input, and the weights'.
    assert terms["one MLP, tiled"] == 4096 * 6 * 14336 * 2 + TOKENS * 4096 * 2 + 3 * 4096 * 14336 * (4 + 2)
    # What is kept of every layer is not counted for the layer again.
    assert "attention output" not in terms
    # 8 key-value heads on 8 ranks are not copied; on 32 ranks each has one.
    assert terms["attention q, k and v"] == TOKENS * (32 + 8 + 8) * 128 * 2
    assert device(world_size=32, sp_size=32)["attention q, k and v"] == 131_072 // 32 * (32 + 32 + 32) * 128 * 2


def test_outputs_of_layers_that_carry_state_go_to_host_memory_with_attentions() -> None:
    shape = replace(LLAMA_3_8B, mixer_width=20_000, mixer_layers=8)
    name, size = "recurrent layer outputs, kept", TOKENS * 20_000 * 2
    on_host = memory(shape, attention_output="both", offload_activations=("attention_outputs",))
    assert device(shape, attention_output="both")[name] == sizes(on_host.host)[name] == size
    assert name not in sizes(on_host.device)
    assert on_host.offloaded_bytes == sizes(on_host.host)["attention outputs, kept"] + size


def test_attention_outputs_that_are_not_kept_are_made_again_in_each_layer() -> None:
    none, kernel, both = (device(attention_output=kept) for kept in ("none", "kernel", "both"))
    of_kernel, of_model = TOKENS * (4096 * 2 + 32 * 4), TOKENS * 4096 * 2
    assert none["attention output"] == of_kernel
    assert none["attention output, exchanged"] == kernel["attention output, exchanged"] == of_model
    assert kernel["attention outputs, kept"] == 32 * of_kernel
    assert both["attention outputs, kept"] == 32 * (of_kernel + of_model)
    assert not both.keys() & {"attention output", "attention output, exchanged"}


def test_uneven_heads_are_counted_on_the_fullest_rank() -> None:
    uneven = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
    shape = ModelShape.from_config_dict(LLAMA_FIELDS | uneven | {"num_hidden_layers": 24, "vocab_size": 151_936})
    terms, tokens = device(shape, world_size=4, sp_size=4, context_tokens=65_536), 65_536 // 4
    # 14 heads on 4 ranks: the fullest has 4, as though there were 16; each needs one of 2 key-value heads.
    query_after, kv_after = 4 * 4 * 64, 4 * 1 * 64
    payload = query_after + 2 * kv_after
    assert terms["attention q, k and v"] == tokens * 2 * payload
    assert terms["attention gradients"] == tokens * (2 * (payload + query_after) + 4 * payload)


def test_a_ring_holds_keys_twice_and_their_gradients_in_fp32() -> None:
    without = device(world_size=64, sp_size=32, context_tokens=262_144)
    terms = device(world_size=64, sp_size=64, ring_size=2, context_tokens=524_288)
    assert without.keys() == terms.keys() - {"ring buffers"}
    # Ulysses over 32 ranks: one query and one key-value head each, of twice the tokens of a slice without a ring.
    tokens, width = 524_288 // 64, 32 * 128
    keys, gradients = 2 * (2 * width * 2), 3 * (2 * width * 4) + width * 4
    assert terms["ring buffers"] == tokens * (keys + gradients)
    assert terms["attention q, k and v"] == without["attention q, k and v"]
    # What is sent back is made when the ring has ended.
    assert terms["attention gradients"] == without["attention gradients"] - tokens * 3 * width * 2


def test_norms_of_queries_and_keys_are_counted() -> None:
    whole = {"context_tokens": 8 * 1024, "mlp_tile": "off"}
    terms, tiled = device(QWEN3_8B, **whole), device(QWEN3_8B, **{**whole, "mlp_tile": 512})
    width = (32 + 8) * 128
    assert terms["norms of queries and keys"] == 1024 * width * (4 + 2)
    # Five values in fp32 of each query are more than what attention's kernel works with.
    kernel = device(**whole)["attention gradients"]
    assert terms["norm of queries, backward"] == 1024 * 32 * 128 * 5 * 4 > kernel
    assert "attention gradients" not in terms
    assert (tiled["norms of queries and keys"], tiled["attention gradients"]) == (1024 * width * 2, kernel)


@pytest.mark.parametrize("has_loss", [False, True])
def test_the_scores_of_routers_are_kept_for_their_loss_alone(has_loss: bool) -> None:
    experts = Experts(count=128, active=8, width=768, shared=0, dense_layers=3, has_router_loss=has_loss)
    terms = device(replace(QWEN3_8B, experts=experts), context_tokens=8 * 1024)
    assert terms.get("router scores", 0) == has_loss * (QWEN3_8B.num_layers - 3) * 1024 * 128 * 2


def test_a_cpu_copies_attention_inputs_to_fp32() -> None:
    on_cpu = {"world_size": 1, "sp_size": 1, "context_tokens": 1024, "accelerator": False}
    name = "attention inputs in fp32"
    assert device(**on_cpu)[name] == 1024 * (3 * 4096 + 2 * 1024) * 4
    assert name not in device(**on_cpu, dtype="fp32") and name not in device(**on_cpu | {"accelerator": True})


def test_without_checkpointing_every_layer_is_kept() -> None:
    kept, recomputed = device(context_tokens=8192, gradient_checkpointing=False), device(context_tokens=8192)
    saved = ("a layer's first norm", "a layer's second norm", "attention q, k and v", "one MLP")
    # And its attention's output in both layouts, which checkpointing keeps with all layers'.
    outputs = 8192 // 8 * (2 * 4096 * 2 + 32 * 4)
    assert kept["activations of all layers"] == 32 * (sum(recomputed[name] for name in saved) + outputs)
    assert {"attention gradients", "gradient of a layer's output"} <= kept.keys() & recomputed.keys(), "of one layer"


def test_random_weights_are_drawn_whole_and_pretrained_ones_are_not_moved_whole() -> None:
    drawn, loaded = memory(init="random"), memory(init="pretrained")
    assert sizes(drawn.host)["the model, while it is drawn"] == N * 4
    assert sizes(loaded.host)["the model, while it is loaded"] == N * 2
    assert sizes(drawn.device).keys() - sizes(loaded.device).keys() == {"the model, before it is sharded"}


def test_peak_is_the_largest_sum_alive_together() -> None:
    def term(phase: Any, size: int) -> MemoryTerm:
        return MemoryTerm(name=phase, bytes=size, phase=phase, source="")

    passes = {"always": 6, "passes": 4, "loss": 5, "layer": 3, "mlp": 4, "attention": 2}
    together = tuple(term(phase, size) for phase, size in passes.items())
    for phase, size, peak in (("load", 3, 17), ("attention", 4, 19), ("update", 14, 20), ("load", 30, 30)):
        assert MemoryEstimate(device=(*together, term(phase, size)), host=()).device_bytes == peak
    assert [one.name for one in at_peak((*together, term("update", 14)))] == ["always", "update"]
    assert [one.name for one in at_peak(together)] == ["always", "passes", "layer", "mlp"]


def test_fp32_on_cpu_has_no_runtime_and_four_bytes_a_weight() -> None:
    terms = device(world_size=2, sp_size=2, context_tokens=8192, dtype="fp32", accelerator=False)
    assert terms["weights, sharded"] == N // 2 * 4
    assert "runtime" not in terms
    # A flat copy of the gradients, and two steps of the update, of a sub-group and the rest of its last tensor.
    assert terms["temporaries of AdamW"] == (1_000_000_000 + 128256 * 4096 // 2) * 3 * 4


@pytest.mark.parametrize("world_size", [8, 64])
def test_more_workers_never_take_more(world_size: int) -> None:
    fewer, more = memory(world_size=world_size), memory(world_size=2 * world_size)
    assert more.device_bytes < fewer.device_bytes < 100 * GIB
