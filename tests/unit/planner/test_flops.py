"""MFU is only as good as its counting: both parts of a step's work, and the peak of the right device."""

import pytest

from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.flops import mfu, peak_bf16_flops, step_flops, token_cost

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_peak_is_that_of_the_named_device(name, tflops):
    assert peak_bf16_flops(name) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("name", [None, "", "Some GPU of next year", "NVIDIA Quadro T2000"])
def test_no_peak_is_invented(name):
    assert peak_bf16_flops(name) is None


def test_each_part_of_a_step_is_counted_once():
    shape = ModelShape.from_config_dict(LLAMA_3_8B)
    multiplying = 8_030_261_248 - 128256 * 4096
    assert step_flops(shape, tokens=1000, sum_squared_lengths=0) == 6 * multiplying * 1000
    attention = step_flops(shape, tokens=0, sum_squared_lengths=131072**2)
    assert attention == 6 * 32 * 4096 * 131072**2


def test_experts_that_a_token_does_not_go_through_cost_nothing():
    sizes = {**LLAMA_3_8B, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8}
    mixtral = ModelShape.from_config_dict({**sizes, "num_experts_per_tok": 2})
    # Mixtral 8x7B: 12.9 of 46.7 billion parameters per token, of which the input embedding is a lookup.
    assert mixtral.num_parameters == pytest.approx(46.7e9, rel=2e-3)
    per_token = step_flops(mixtral, tokens=1, sum_squared_lengths=0) / 6
    assert per_token + 32000 * 4096 == pytest.approx(12.88e9, rel=2e-3)
    assert token_cost(mixtral) == pytest.approx(per_token / (32 * 4096), rel=1e-6)


def test_attention_of_short_documents_costs_less():
    shape = ModelShape.from_config_dict(LLAMA_3_8B)
    one = step_flops(shape, tokens=8192, sum_squared_lengths=8192**2)
    packed = step_flops(shape, tokens=8192, sum_squared_lengths=8 * 1024**2)
    whole, part = 6 * 32 * 4096 * 8192**2, 6 * 32 * 4096 * 8 * 1024**2
    assert one - packed == whole - part


def test_tied_embedding_multiplies_as_the_output_head():
    tied = ModelShape.from_config_dict({**LLAMA_3_8B, "tie_word_embeddings": True})
    untied = ModelShape.from_config_dict(LLAMA_3_8B)
    work = {"tokens": 7, "sum_squared_lengths": 49}
    assert step_flops(tied, **work) == step_flops(untied, **work)


def test_mfu_is_a_share_of_all_devices():
    assert mfu(flops=4e15, seconds=2.0, world_size=4, peak_flops=1e15) == pytest.approx(0.5)
    assert mfu(flops=4e15, seconds=2.0, world_size=4, peak_flops=None) is None
    assert mfu(flops=4e15, seconds=0.0, world_size=4, peak_flops=1e15) is None
