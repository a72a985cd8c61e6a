"""Every term of the memory estimate equals arithmetic that is written out here."""

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
UNEVEN = ModelShape.from_config_dict(
    LLAMA_FIELDS | {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 24}
)
EXPERTS = Experts(count=128, active=8, width=768, shared=0, dense_layers=3, has_router_loss=True)
N = 8_030_261_248
SHARE, EMBEDDING = N // 8, 128256 * 4096
TOKENS = 131_072 // 8
"""Tokens per rank by default."""
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


CPU = {"world_size": 1, "sp_size": 1, "context_tokens": 1024, "accelerator": False}
CPUS = {**CPU, "world_size": 2, "sp_size": 2, "dtype": "fp32"}
UNTILED = {"context_tokens": 65_536, "mlp_tile": "off", "loss_tile": "off"}
SAVED = {**UNTILED, "gradient_checkpointing": False}
NVME = {"offload_optimizer": "nvme", "host_buffers": 0}
ROUTED = {"shape": replace(QWEN3_8B, experts=EXPERTS), "context_tokens": 8192}
UNROUTED = {"shape": replace(QWEN3_8B, experts=replace(EXPERTS, has_router_loss=False))}
NONE, KERNEL, BOTH = ({"attention_output": kept} for kept in ("none", "kernel", "both"))
OF_KERNEL, OF_MODEL = TOKENS * (4096 * 2 + 32 * 4), TOKENS * 4096 * 2
# 14 heads on 4 ranks: the fullest has 4, and uses one of 2 KV heads.
FOUR = {"shape": UNEVEN, "world_size": 4, "sp_size": 4, "context_tokens": 4 * TOKENS}
Q, QKV = 4 * 4 * 64, 4 * 4 * 64 + 2 * 4 * 64


@pytest.mark.parametrize(
    ("settings", "name", "size"),
    [
        ({}, "layer inputs, kept", 32 * TOKENS * 4096 * 2),
        # One tile's gradients of the logits and of the head.
        ({}, "logits", (512 * 128256 + EMBEDDING) * 2),
        ({}, "gradients of the head's tiles", TOKENS * 4096 * 2 + EMBEDDING * 4),
        # Six values per token of a tile, the gradient of the input, and the weights' gradients.
        ({}, "one MLP, tiled", 4096 * 6 * 14336 * 2 + TOKENS * 4096 * 2 + 3 * 4096 * 14336 * (4 + 2)),
        ({}, "attention q, k and v", TOKENS * (32 + 8 + 8) * 128 * 2),
        ({"world_size": 32, "sp_size": 32}, "attention q, k and v", 131_072 // 32 * (32 + 32 + 32) * 128 * 2),
        (FOUR, "attention q, k and v", TOKENS * 2 * QKV),
        (FOUR, "attention gradients", TOKENS * (2 * (QKV + Q) + 4 * QKV)),
        (NONE, "attention output", OF_KERNEL),
        (NONE, "attention output, exchanged", OF_MODEL),
        (KERNEL, "attention outputs, kept", 32 * OF_KERNEL),
        (KERNEL, "attention output, exchanged", OF_MODEL),
        (KERNEL, "attention output", None),
        (BOTH, "attention outputs, kept", 32 * (OF_KERNEL + OF_MODEL)),
        (BOTH, "attention output, exchanged", None),
        (UNTILED, "one MLP", 8192 * 4 * 14336 * 2),
        (UNTILED, "one MLP, backward", 8192 * 2 * 14336 * 2),
        (UNTILED, "logits", 8192 * 128256 * 12),
        (UNTILED, "one MLP, tiled", None),
        (UNTILED, "gradients of the head's tiles", None),
        # The MLP is freed before the preceding norm's backward pass, which then takes more.
        (SAVED, "a norm, backward", 8192 * 4096 * 5 * 4),
        (ROUTED, "router scores", (QWEN3_8B.num_layers - 3) * 1024 * 128 * 2),
        (UNROUTED, "router scores", None),
        (CPU, "attention inputs in fp32", 1024 * (3 * 4096 + 2 * 1024) * 4),
        ({**CPU, "accelerator": True}, "attention inputs in fp32", None),
        (CPUS, "attention inputs in fp32", None),
        (CPUS, "weights, sharded", N // 2 * 4),
        (CPUS, "runtime", None),
        # Two temporaries and a flat copy of the gradients, for a sub-group in complete tensors.
        (CPUS, "temporaries of AdamW", (1_000_000_000 + EMBEDDING // 2) * 3 * 4),
        (NVME, "host buffers for NVMe", 4 * 100_000_000 * 4),
        (NVME, "host gradients, fp32", SHARE * 4),
        (NVME, "host master weights, fp32", None),
        (NVME, "host checkpoints, staged", None),
        (NVME, "host peer memory", None),
        ({}, "host checkpoints, staged", 2 * SHARE * (4 + 8 + 2)),
        ({"dtype": "fp32", "host_buffers": 1}, "host checkpoints, staged", SHARE * (4 + 8)),
        ({"peer_memory": True}, "host peer memory", 4 * SHARE * (4 + 8 + 2)),
        ({"peer_memory": True, "dtype": "fp32"}, "host peer memory", 4 * SHARE * (4 + 8)),
        ({"init": "random"}, "host the model, while it is drawn", N * 4),
        ({"init": "random"}, "the model, before it is sharded", N * 2),
        ({}, "host a tensor, while it is loaded", EMBEDDING * 2),
        ({}, "a tensor, before it is sharded", EMBEDDING * 2),
        ({"zero_stage": 1}, "host the model, while it is loaded", N * 2),
        ({}, "the model, before it is sharded", None),
    ],
)
def test_a_term_is_as_computed_by_hand(settings: dict[str, Any], name: str, size: int | None) -> None:
    found = memory(settings.get("shape", LLAMA_3_8B), **{k: v for k, v in settings.items() if k != "shape"})
    terms = sizes(found.device) | {f"host {name}": size for name, size in sizes(found.host).items()}
    assert terms.get(name) == size


@pytest.mark.parametrize(
    ("settings", "whole", "sharded"),
    [
        ({"zero_stage": 1}, 2 + 4, 4 + 8),
        ({"zero_stage": 1, "dtype": "fp32"}, 4 + 4, 4 + 8),
        ({"zero_stage": 2}, 2, 4 + 8 + 4),
        ({"zero_stage": 2, "dtype": "fp32"}, 4, 4 + 8 + 4),
        ({"zero_stage": 3}, 0, 2 + 4 + 8 + 4),
        ({"zero_stage": 1, "offload_optimizer": "cpu"}, 2 + 4, 0),
        ({"zero_stage": 2, "offload_optimizer": "cpu"}, 2, 4),
        ({"zero_stage": 3, "offload_optimizer": "cpu"}, 0, 2),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_zero_stage_shards_its_part_of_the_state(settings: dict[str, Any], whole: int, sharded: int) -> None:
    terms = device(**settings)
    assert sum(terms.get(name, 0) for name in STATE) == N * whole + SHARE * sharded
    assert ("weights, gathered" in terms) == (settings["zero_stage"] == 3)
    copied = 2 * N * (4 if settings.get("dtype") else 2)
    assert terms.get("the model, beside its flat copy") == (None if settings["zero_stage"] == 3 else copied)


def test_offload_moves_the_optimizer_to_the_host() -> None:
    before, after = memory(), memory(offload_optimizer="cpu")
    moved = SHARE * (4 + 8 + 4)
    assert before.device_bytes - after.device_bytes == moved
    # Gradients twice: the accumulated ones and the optimizer's input.
    assert after.host_bytes == moved + SHARE * 4 + sizes(after.host)["checkpoints, staged"]
    offloaded = memory(offload_optimizer="cpu", offload_param="cpu")
    assert "weights, sharded" not in sizes(offloaded.device)
    assert sizes(offloaded.host)["weights, sharded"] == SHARE * 2 == after.device_bytes - offloaded.device_bytes
    # On a CPU torch's optimizer allocates temporaries; DeepSpeed's, which runs beside a GPU, does not.
    assert "temporaries of AdamW" in sizes(memory(offload_optimizer="cpu", accelerator=False).host)


def test_secondary_shards_take_the_weights_over_the_ranks_of_a_node() -> None:
    across: dict[str, Any] = {"world_size": 32, "sp_size": 32}
    before, after = device(**across), device(**across, zero_secondary="node")
    assert after == before | {"weights, secondary": N // 8 * 2}
    assert device(zero_secondary="node") == device(), "all ranks are on one node"
    # Three nodes with 8, 8 and 4 ranks.
    assert device(world_size=20, sp_size=20, zero_secondary="node")["weights, secondary"] == N // 4 * 2


@pytest.mark.parametrize("kinds", [("layer_inputs",), ("layer_inputs", "attention_outputs")])
def test_offloaded_activations_are_on_the_host_but_for_two_layers(kinds: tuple[str, ...]) -> None:
    size = {"layer_inputs": 32 * TOKENS * 4096 * 2, "attention_outputs": 32 * OF_KERNEL}
    # Offload the optimizer, or its update could be the peak of the remaining terms.
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


def test_outputs_of_recurrent_layers_are_offloaded_with_attention_outputs() -> None:
    shape = replace(LLAMA_3_8B, mixer_width=20_000, mixer_layers=8)
    name, size = "recurrent layer outputs, kept", TOKENS * 20_000 * 2
    on_host = memory(shape, attention_output="both", offload_activations=("attention_outputs",))
    assert device(shape, attention_output="both")[name] == sizes(on_host.host)[name] == size
    assert name not in sizes(on_host.device)
    assert on_host.offloaded_bytes == sizes(on_host.host)["attention outputs, kept"] + size


@pytest.mark.parametrize(("stage", "update"), [(2, None), (3, SHARE * 4)])
def test_the_update_of_a_stage_comes_after_its_passes(stage: int, update: int | None) -> None:
    # On a device, the update is fused: stage 3 has a flat copy of the gradients, the other stages have no temporaries.
    assert sizes(memory(zero_stage=stage).device).get("temporaries of AdamW") == update
    short, long = (memory(**CPUS | {"context_tokens": context, "zero_stage": stage}) for context in (1024, 1 << 20))
    terms = sizes(short.device)
    kept = [*STATE, *["bucket of gradients"] * (stage == 3), "temporaries of AdamW"]
    in_update = sum(terms.get(name, 0) for name in kept)
    assert short.device_bytes == in_update if stage == 3 else short.device_bytes >= in_update
    assert long.device_bytes > short.device_bytes


def test_a_ring_has_two_pairs_of_keys_and_their_gradients_in_fp32() -> None:
    without = device(world_size=64, sp_size=32, context_tokens=262_144)
    terms = device(world_size=64, sp_size=64, ring_size=2, context_tokens=524_288)
    assert without.keys() == terms.keys() - {"ring buffers"}
    # Ulysses over 32 ranks: one query head and one KV head each, for twice the tokens of a slice without a ring.
    tokens, width = 524_288 // 64, 32 * 128
    keys, gradients = 2 * (2 * width * 2), 3 * (2 * width * 4) + width * 4
    assert terms["ring buffers"] == tokens * (keys + gradients)
    assert terms["attention q, k and v"] == without["attention q, k and v"]
    # The gradients to send are allocated after the ring's last step.
    assert terms["attention gradients"] == without["attention gradients"] - tokens * 3 * width * 2


def test_norms_of_queries_and_keys_take_memory_if_untiled() -> None:
    whole = {"context_tokens": 8 * 1024, "mlp_tile": "off"}
    terms, tiled = device(QWEN3_8B, **whole), device(QWEN3_8B, **{**whole, "mlp_tile": 512})
    width, kernel = (32 + 8) * 128, device(**whole)["attention gradients"]
    assert terms["norms of queries and keys"] == 1024 * width * (4 + 2)
    assert terms["norm of queries, backward"] == 1024 * 32 * 128 * 5 * 4 > kernel
    assert "attention gradients" not in terms
    assert (tiled["norms of queries and keys"], tiled["attention gradients"]) == (1024 * width * 2, kernel)


def test_without_checkpointing_every_layer_is_kept() -> None:
    kept, recomputed = device(context_tokens=8192, gradient_checkpointing=False), device(context_tokens=8192)
    saved = ("a layer's first norm", "a layer's second norm", "attention q, k and v", "one MLP")
    # With checkpointing, attention's output in both layouts is in a term of all layers.
    outputs = 8192 // 8 * (2 * 4096 * 2 + 32 * 4)
    assert kept["activations of all layers"] == 32 * (sum(recomputed[name] for name in saved) + outputs)
    assert {"attention gradients", "gradient of a layer's output"} <= kept.keys() & recomputed.keys(), "of one layer"


def test_peak_is_the_largest_sum_alive_together() -> None:
    def term(phase: Any, size: int) -> MemoryTerm:
        return MemoryTerm(name=phase, bytes=size, phase=phase, source="")

    passes = {"always": 6, "passes": 4, "loss": 5, "layer": 3, "mlp": 4, "attention": 2}
    together = tuple(term(phase, size) for phase, size in passes.items())
    for phase, size, peak in (("load", 3, 17), ("attention", 4, 19), ("update", 14, 20), ("load", 30, 30)):
        assert MemoryEstimate(device=(*together, term(phase, size)), host=()).device_bytes == peak
    assert [one.name for one in at_peak((*together, term("update", 14)))] == ["always", "update"]
    assert [one.name for one in at_peak(together)] == ["always", "passes", "layer", "mlp"]


def test_more_workers_never_take_more() -> None:
    fewer, more, most = (memory(world_size=world_size).device_bytes for world_size in (8, 16, 128))
    assert most < more < fewer < 100 * GIB
