"""The estimate is arithmetic: every term is held against one that is done by hand here."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.planned import estimate
from ray_ulysses.model_shape import Experts, ModelShape
from ray_ulysses.planner.memory import MemoryEstimate, at_peak
from ray_ulysses.planner.memory_terms import GIB, MemoryTerm

LLAMA_3_8B = ModelShape.from_config_dict(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    }
)
N = 8_030_261_248


def by_name(terms: tuple[MemoryTerm, ...]) -> dict[str, MemoryTerm]:
    assert len({term.name for term in terms}) == len(terms)
    return {term.name: term for term in terms}


def test_sharded_state_takes_18_bytes_a_parameter_over_all_ranks():
    terms = by_name(estimate(LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=131072).device)
    state = ["weights, sharded", "master weights, fp32", "AdamW moments, fp32", "gradients, fp32"]
    assert sum(terms[name].bytes for name in state) == N // 8 * (2 + 4 + 8 + 4)


def test_offload_moves_the_optimizer_to_the_host():
    on_device = estimate(LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=131072)
    offloaded = estimate(LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=131072, offload_optimizer="cpu")
    moved = N // 8 * (4 + 8 + 4)
    assert on_device.device_bytes - offloaded.device_bytes == moved
    # Where they are accumulated, and what the optimizer steps with.
    twice = N // 8 * 4
    assert by_name(offloaded.host).keys() - by_name(on_device.host).keys() == {
        "master weights, fp32",
        "AdamW moments, fp32",
        "gradients, fp32",
        "gradients of the step, fp32",
    }
    assert offloaded.host_bytes == moved + twice + by_name(offloaded.host)["checkpoints, staged"].bytes


def test_offloaded_weights_are_on_the_host():
    settings = {"world_size": 8, "sp_size": 8, "context_tokens": 131072, "offload_optimizer": "cpu"}
    before, memory = estimate(LLAMA_3_8B, **settings), estimate(LLAMA_3_8B, **settings, offload_param="cpu")
    assert "weights, sharded" not in by_name(memory.device)
    assert by_name(memory.host)["weights, sharded"].bytes == N // 8 * 2
    assert before.device_bytes - memory.device_bytes == N // 8 * 2 == memory.host_bytes - before.host_bytes


@pytest.mark.parametrize(
    ("offloaded", "moved"),
    [
        # Rows of 16,384 tokens per rank; 4 bytes per log-sum-exp of 32 heads.
        (("layer_inputs",), {"layer inputs": 32 * 16384 * 4096 * 2}),
        (("attention_outputs",), {"attention outputs": 32 * 16384 * (4096 * 2 + 32 * 4)}),
        (
            ("layer_inputs", "attention_outputs"),
            {"layer inputs": 32 * 16384 * 4096 * 2, "attention outputs": 32 * 16384 * (4096 * 2 + 32 * 4)},
        ),
    ],
)
def test_offloaded_activations_are_on_the_host_but_for_two_layers(offloaded, moved):
    settings = {"world_size": 8, "sp_size": 8, "context_tokens": 131072, "attention_output": "kernel"}
    # Without an update on the device, which may be the peak of what is left.
    settings["offload_optimizer"] = "cpu"
    before = estimate(LLAMA_3_8B, **settings)
    memory = estimate(LLAMA_3_8B, **settings, offload_activations=offloaded)
    device, host = by_name(memory.device), by_name(memory.host)
    for name, size in moved.items():
        assert host[f"{name}, kept"].bytes == by_name(before.device)[f"{name}, kept"].bytes == size
        assert f"{name}, kept" not in device
        assert device[f"{name}, in flight"].bytes == size * 2 // 32
        assert device[f"{name}, in flight"].source.startswith("2 of 32 layers' at once: ")
    total = sum(moved.values())
    assert before.device_bytes - memory.device_bytes == total - sum(size * 2 // 32 for size in moved.values())
    assert memory.host_bytes - before.host_bytes == total


def test_a_checkpoint_is_staged_in_two_copies_of_a_ranks_share():
    memory = estimate(LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=131072, init="pretrained")
    assert by_name(memory.host)["checkpoints, staged"].bytes == 2 * (N // 8) * (4 + 8 + 2)
    fp32 = estimate(LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=131072, dtype="fp32", host_buffers=1)
    assert by_name(fp32.host)["checkpoints, staged"].bytes == N // 8 * (4 + 8)
    without = estimate(LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=131072, host_buffers=0)
    assert "checkpoints, staged" not in by_name(without.host)


def test_peer_memory_takes_two_copies_of_two_states_per_worker():
    settings = {"world_size": 8, "sp_size": 8, "context_tokens": 131072}
    assert by_name(estimate(LLAMA_3_8B, **settings, peer_memory=True).host)["peer memory"].bytes == 4 * (N // 8) * 14
    fp32 = estimate(LLAMA_3_8B, **settings, dtype="fp32", peer_memory=True)
    assert by_name(fp32.host)["peer memory"].bytes == 4 * (N // 8) * 12
    assert "peer memory" not in by_name(estimate(LLAMA_3_8B, **settings).host)


@pytest.mark.parametrize("checkpointed", [True, False])
def test_an_mlp_without_tiles_has_six_values_of_its_width_per_token(checkpointed):
    terms = by_name(
        estimate(
            LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=65536, mlp_tile="off", loss_tile="off",
            gradient_checkpointing=checkpointed,
        ).device
    )  # fmt: skip
    assert ("one MLP" in terms) == checkpointed and "one MLP, tiled" not in terms
    if checkpointed:
        assert terms["one MLP"].bytes == 8192 * 4 * 14336 * 2
    else:
        assert terms["activations of all layers"].bytes > 32 * 8192 * 4 * 14336 * 2
    # Two gradients take less than the backward pass of the norm before, in fp32, which comes when the MLP's are freed.
    gradients, norm = 8192 * 2 * 14336 * 2, 8192 * 4096 * 5 * 4
    assert terms["one MLP, backward" if checkpointed else "a norm, backward"].bytes == (
        gradients if checkpointed else norm
    )
    assert terms["logits"].bytes == 8192 * 128256 * 12
    assert "gradients of the head's tiles" not in terms


STATE = ("weights, whole", "weights, sharded", "master weights, fp32", "AdamW moments, fp32", "gradients, fp32")


@pytest.mark.parametrize(
    ("stage", "dtype", "bytes_whole", "bytes_sharded"),
    [
        pytest.param(1, "bf16", 2 + 4, 4 + 8, id="zero1-bf16"),
        pytest.param(1, "fp32", 4 + 4, 4 + 8, id="zero1-fp32"),
        pytest.param(2, "bf16", 2, 4 + 8 + 4, id="zero2-bf16"),
        pytest.param(2, "fp32", 4, 4 + 8 + 4, id="zero2-fp32"),
        pytest.param(3, "bf16", 0, 2 + 4 + 8 + 4, id="zero3-bf16"),
    ],
)
def test_a_stage_keeps_whole_on_every_rank_what_it_does_not_shard(stage, dtype, bytes_whole, bytes_sharded):
    memory = estimate(LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=131072, dtype=dtype, zero_stage=stage)
    terms = by_name(memory.device)
    state = sum(terms[name].bytes for name in STATE if name in terms)
    assert state == N * bytes_whole + N // 8 * bytes_sharded
    assert ("weights, gathered" in terms) == (stage == 3)


@pytest.mark.parametrize(("stage", "on_device"), [(1, N * (2 + 4)), (2, N * 2 + N // 8 * 4), (3, N // 8 * 2)])
def test_offload_leaves_on_the_device_what_the_stage_accumulates_there(stage, on_device):
    memory = estimate(
        LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=131072, zero_stage=stage, offload_optimizer="cpu"
    )
    terms = by_name(memory.device)
    assert sum(terms[name].bytes for name in STATE if name in terms) == on_device


@pytest.mark.parametrize(("stage", "update"), [(1, N // 8 * 4), (2, N // 8 * 4), (3, N // 8 * (4 + 4))])
def test_the_update_of_a_stage_comes_after_its_passes(stage, update):
    sizes = {"world_size": 8, "sp_size": 8, "zero_stage": stage}
    short, long = (estimate(LLAMA_3_8B, context_tokens=context, **sizes) for context in (8192, 1 << 20))
    terms = by_name(short.device)
    assert terms["temporaries of AdamW"].bytes == update
    kept = [*STATE, *["bucket of gradients"] * (stage == 3), "runtime", "temporaries of AdamW"]
    in_update = sum(terms[name].bytes for name in kept if name in terms)
    # Neither weights that are gathered for a pass nor activations are there.
    assert short.device_bytes == in_update if stage == 3 else short.device_bytes >= in_update
    assert long.device_bytes > short.device_bytes


def test_stages_that_keep_the_weights_whole_hold_them_twice_while_they_are_flattened():
    for init in ("random", "pretrained"):
        memory = estimate(LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=8192, zero_stage=2, init=init)
        assert by_name(memory.device)["the model, beside its flat copy"].bytes == 2 * N * 2


@pytest.mark.parametrize("accelerator", [True, False])
def test_an_optimizer_on_the_host_allocates_for_its_update_where_there_is_no_device(accelerator):
    memory = estimate(
        LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=8192, offload_optimizer="cpu", accelerator=accelerator
    )
    assert "temporaries of AdamW" not in by_name(memory.device)
    # DeepSpeed's own optimizer beside a GPU updates in place; torch's, on a CPU, does not.
    assert ("temporaries of AdamW" in by_name(memory.host)) is not accelerator


def test_an_optimizer_on_nvme_takes_buffers_of_a_sub_group_and_the_gradients():
    memory = estimate(
        LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=131072, offload_optimizer="nvme", host_buffers=0
    )
    host = by_name(memory.host)
    assert host["buffers for NVMe"].bytes == 4 * 100_000_000 * 4
    assert host["gradients, fp32"].bytes == N // 8 * 4
    assert not host.keys() & {"master weights, fp32", "AdamW moments, fp32"}


def test_activations_follow_the_tokens_of_a_rank():
    terms = by_name(estimate(LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=131072).device)
    tokens = 131072 // 8
    assert terms["layer inputs, kept"].bytes == 32 * tokens * 4096 * 2
    # The gradient of a head by one tile is more than the log-probabilities of a tile and two gradients in fp32.
    assert terms["logits"].bytes == (512 * 128256 + 128256 * 4096) * 2 > 512 * 128256 * 12
    head = tokens * 4096 * 2 + 128256 * 4096 * 4
    assert terms["gradients of the head's tiles"].bytes == head
    # Six values of each token of a tile, the gradient of the input, and the weights'.
    mlp = 4096 * 6 * 14336 * 2 + tokens * 4096 * 2 + 3 * 4096 * 14336 * (4 + 2)
    assert terms["one MLP, tiled"].bytes == mlp
    # What is kept of every layer is not counted for the layer again.
    assert "attention output" not in terms
    # With 8 key-value heads on 8 ranks none is copied.
    assert terms["attention q, k and v"].bytes == tokens * (32 + 8 + 8) * 128 * 2


def test_what_is_kept_of_layers_that_carry_state_goes_to_host_memory_with_attentions_outputs():
    shape = replace(LLAMA_3_8B, mixer_width=20_000, mixer_layers=8)
    settings = {"world_size": 8, "sp_size": 8, "context_tokens": 131072, "attention_output": "both"}
    name = "outputs of layers that carry state, kept"
    on_device = estimate(shape, **settings)
    on_host = estimate(shape, offload_activations=("attention_outputs",), **settings)
    assert by_name(on_device.device)[name] == replace(
        by_name(on_host.host)[name], source=by_name(on_device.device)[name].source
    )
    assert name not in by_name(on_host.device) and by_name(on_host.host)[name].bytes == 16384 * 20_000 * 2
    outputs = by_name(on_host.host)["attention outputs, kept"].bytes
    assert on_host.offloaded_bytes == outputs + 16384 * 20_000 * 2 and on_device.offloaded_bytes == 0


def test_what_is_not_kept_of_attention_is_made_again_in_each_layer():
    settings = {"world_size": 8, "sp_size": 8, "context_tokens": 131072}
    none = by_name(estimate(LLAMA_3_8B, attention_output="none", **settings).device)
    kernel = by_name(estimate(LLAMA_3_8B, attention_output="kernel", **settings).device)
    both = by_name(estimate(LLAMA_3_8B, attention_output="both", **settings).device)
    of_kernel, of_model = 16384 * (4096 * 2 + 32 * 4), 16384 * 4096 * 2
    assert none["attention output"].bytes == of_kernel
    assert none["attention output, exchanged"].bytes == kernel["attention output, exchanged"].bytes == of_model
    assert kernel["attention outputs, kept"].bytes == 32 * of_kernel
    assert both["attention outputs, kept"].bytes == 32 * (of_kernel + of_model)
    assert both.keys() & {"attention output", "attention output, exchanged"} == set()


def test_key_value_heads_are_copied_beyond_their_number():
    terms = by_name(estimate(LLAMA_3_8B, world_size=32, sp_size=32, context_tokens=131072).device)
    assert terms["attention q, k and v"].bytes == (131072 // 32) * (32 + 32 + 32) * 128 * 2


UNEVEN = ModelShape.from_config_dict(
    {
        "model_type": "llama",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "num_hidden_layers": 24,
        "vocab_size": 151936,
    }
)


def test_uneven_heads_are_counted_on_the_fullest_rank():
    terms = by_name(estimate(UNEVEN, world_size=4, sp_size=4, context_tokens=65536).device)
    tokens = 65536 // 4
    # 14 heads on 4 ranks: the fullest has 4, as though there were 16; each needs one of 2 key-value heads.
    query_after, kv_after = 4 * 4 * 64, 4 * 1 * 64
    payload = query_after + 2 * kv_after
    assert terms["attention q, k and v"].bytes == tokens * 2 * payload
    assert terms["attention gradients"].bytes == tokens * (2 * (payload + query_after) + 4 * payload)


def test_a_ring_holds_keys_twice_and_their_gradients_in_fp32():
    without = estimate(LLAMA_3_8B, world_size=64, sp_size=32, context_tokens=262144)
    terms = by_name(estimate(LLAMA_3_8B, world_size=64, sp_size=64, ring_size=2, context_tokens=524288).device)
    assert by_name(without.device).keys() == terms.keys() - {"ring buffers"}
    # Ulysses over 32 ranks: one query and one key-value head each, of twice the tokens of a slice without a ring.
    tokens, width = 524288 // 64, 32 * 128
    keys, gradients = 2 * (2 * width * 2), 3 * (2 * width * 4) + width * 4
    assert terms["ring buffers"].bytes == tokens * (keys + gradients)
    name = "attention q, k and v"
    assert terms[name].bytes == by_name(without.device)[name].bytes
    # What is sent back is made when the ring has ended.
    name = "attention gradients"
    assert terms[name].bytes == by_name(without.device)[name].bytes - tokens * 3 * width * 2


QWEN3_8B = replace(LLAMA_3_8B, has_head_norms=True)


def test_norms_of_queries_and_keys_are_counted():
    tokens = 1024
    whole = {"world_size": 8, "sp_size": 8, "context_tokens": 8 * tokens, "mlp_tile": "off"}
    terms = by_name(estimate(QWEN3_8B, **whole).device)
    width = (32 + 8) * 128
    assert terms["norms of queries and keys"].bytes == tokens * width * (4 + 2)
    # Five values in fp32 of each query are more than what attention's kernel works with.
    kernel = by_name(estimate(LLAMA_3_8B, **whole).device)["attention gradients"].bytes
    assert terms["norm of queries, backward"].bytes == tokens * 32 * 128 * 5 * 4 > kernel
    assert "attention gradients" not in terms
    tiled = by_name(estimate(QWEN3_8B, **{**whole, "mlp_tile": 512}).device)
    assert tiled["norms of queries and keys"].bytes == tokens * width * 2
    assert tiled["attention gradients"].bytes == kernel


def test_the_scores_of_routers_are_kept_for_their_loss_alone():
    experts = Experts(count=128, active=8, width=768, shared=0, dense_layers=3)
    tokens = 1024
    for has_loss in (False, True):
        shape = replace(QWEN3_8B, experts=replace(experts, has_router_loss=has_loss))
        terms = by_name(estimate(shape, world_size=8, sp_size=8, context_tokens=8 * tokens).device)
        assert ("router scores" in terms) == has_loss
    assert terms["router scores"].bytes == (QWEN3_8B.num_layers - 3) * tokens * 128 * 2


def test_no_context_takes_less_than_a_shorter_one():
    # Tiles of norms and MLPs begin at 4,096 tokens per rank.
    peaks = [
        estimate(QWEN3_8B, world_size=8, sp_size=8, context_tokens=8 * tokens).device_bytes
        for tokens in range(2048, 40_000, 512)
    ]
    assert all(after > 0.99 * before for before, after in pairwise(peaks))


def test_a_cpu_copies_what_attention_takes_to_fp32():
    on_cpu = {"world_size": 1, "sp_size": 1, "context_tokens": 1024, "accelerator": False}
    terms = by_name(estimate(LLAMA_3_8B, **on_cpu).device)
    assert terms["attention inputs in fp32"].bytes == 1024 * (3 * 4096 + 2 * 1024) * 4
    assert "attention inputs in fp32" not in by_name(estimate(LLAMA_3_8B, **on_cpu, dtype="fp32").device)
    assert "attention inputs in fp32" not in by_name(estimate(LLAMA_3_8B, **{**on_cpu, "accelerator": True}).device)


def test_without_checkpointing_every_layer_is_kept():
    kept = by_name(
        estimate(LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=8192, gradient_checkpointing=False).device
    )
    recomputed = by_name(estimate(LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=8192).device)
    tokens = 8192 // 8
    saved = ("a layer's first norm", "a layer's second norm", "attention q, k and v", "one MLP")
    one_layer = sum(recomputed[name].bytes for name in saved)
    # And its attention's output in both layouts, which checkpointing keeps with all layers'.
    outputs = tokens * (2 * 4096 * 2 + 32 * 4)
    assert kept["activations of all layers"].bytes == 32 * (one_layer + outputs)
    in_passing = {"attention gradients", "gradient of a layer's output"}
    assert in_passing <= kept.keys() & recomputed.keys(), "of one layer only"


def test_random_weights_are_drawn_whole_and_pretrained_ones_are_not_moved_whole():
    drawn = estimate(LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=8192, init="random")
    loaded = estimate(LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=8192, init="pretrained")
    assert by_name(drawn.host)["the model, while it is drawn"].bytes == N * 4
    assert by_name(loaded.host)["the model, while it is loaded"].bytes == N * 2
    assert by_name(drawn.device).keys() - by_name(loaded.device).keys() == {"the model, before it is sharded"}


def test_peak_is_the_largest_sum_alive_together():
    def term(phase, size):
        return MemoryTerm(name=phase, bytes=size, phase=phase, source="")

    together = (term("always", 6), term("passes", 4), term("loss", 5), term("layer", 3), term("mlp", 4))
    together += (term("attention", 2),)
    assert MemoryEstimate(device=(*together, term("load", 3)), host=()).device_bytes == 17
    assert MemoryEstimate(device=(*together, term("attention", 4)), host=()).device_bytes == 19
    assert MemoryEstimate(device=(*together, term("update", 14)), host=()).device_bytes == 20
    assert MemoryEstimate(device=(*together, term("load", 30)), host=()).device_bytes == 30
    assert MemoryEstimate(device=(), host=()).host_bytes == 0
    in_update = at_peak((*together, term("update", 14)))
    assert [one.name for one in in_update] == ["always", "update"]
    assert [one.name for one in at_peak(together)] == ["always", "passes", "layer", "mlp"]


def test_fp32_on_cpu_has_no_runtime_and_four_bytes_a_weight():
    terms = by_name(
        estimate(LLAMA_3_8B, world_size=2, sp_size=2, context_tokens=8192, dtype="fp32", accelerator=False).device
    )
    assert terms["weights, sharded"].bytes == N // 2 * 4
    assert "runtime" not in terms
    # A flat copy of the gradients, and two steps of the update, of a sub-group and the rest of its last tensor.
    assert terms["temporaries of AdamW"].bytes == (1_000_000_000 + 128256 * 4096 // 2) * 3 * 4


def test_every_term_says_where_it_comes_from_and_the_whole_what_it_is():
    memory = estimate(LLAMA_3_8B, world_size=8, sp_size=8, context_tokens=131072, offload_optimizer="cpu")
    assert all(len(term.source) > 20 and term.bytes > 0 for term in (*memory.device, *memory.host))
    assert memory.note == "a first estimate by formula, not a measurement"
    assert "512 tokens of 16,384 per rank (memory.loss_tile=auto)" in by_name(memory.device)["logits"].source


@pytest.mark.parametrize("world_size", [8, 16, 64])
def test_more_workers_never_take_more(world_size):
    fewer = estimate(LLAMA_3_8B, world_size=world_size, sp_size=8, context_tokens=131072)
    more = estimate(LLAMA_3_8B, world_size=2 * world_size, sp_size=8, context_tokens=131072)
    assert more.device_bytes < fewer.device_bytes < 100 * GIB
