"""FLOPs of a step, by parameter and by squared token, and the peak rates of devices."""

from __future__ import annotations

import pytest

from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.flops import mfu, peak_bf16_flops, step_flops, token_cost
from tests.unit.planner.runs import LLAMA_3_8B


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA Quadro T2000", None),
        (None, None),
    ],
)
def test_the_peak_of_a_device_is_found_by_its_name_and_never_invented(name: str | None, tflops: float | None) -> None:
    assert peak_bf16_flops(name) == (tflops and pytest.approx(tflops * 1e12))


def test_each_part_of_a_step_is_counted_once() -> None:
    shape = ModelShape.from_config_dict(LLAMA_3_8B)
    multiplying = 8_030_261_248 - 128256 * 4096
    assert step_flops(shape, tokens=1000, sum_squared_lengths=0) == 6 * multiplying * 1000
    attention = step_flops(shape, tokens=0, sum_squared_lengths=131072**2)
    assert attention == 6 * 32 * 4096 * 131072**2
    # A tied embedding is the output head's matrix.
    tied = ModelShape.from_config_dict({**LLAMA_3_8B, "tie_word_embeddings": True})
    assert step_flops(tied, tokens=1000, sum_squared_lengths=0) == 6 * multiplying * 1000


def test_only_the_experts_of_a_token_take_flops() -> None:
    sizes = {**LLAMA_3_8B, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8}
    mixtral = ModelShape.from_config_dict({**sizes, "num_experts_per_tok": 2})
    # Mixtral 8x7B: 12.9 of 46.7 billion parameters per token, including the input embedding, which is a lookup.
    assert mixtral.num_parameters == pytest.approx(46.7e9, rel=2e-3)
    per_token = step_flops(mixtral, tokens=1, sum_squared_lengths=0) / 6
    assert per_token + 32000 * 4096 == pytest.approx(12.88e9, rel=2e-3)
    assert token_cost(mixtral) == pytest.approx(per_token / (32 * 4096), rel=1e-6)


def test_mfu_is_a_share_of_all_devices() -> None:
    assert mfu(flops=4e15, seconds=2.0, world_size=4, peak_flops=1e15) == pytest.approx(0.5)
    assert mfu(flops=4e15, seconds=2.0, world_size=4, peak_flops=None) is None
