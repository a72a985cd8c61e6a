"""The floor of a step: attention at its fastest kernel's rate, measured beside the step, and products at 790 TFLOP/s.

What a step takes above it are element-wise operations, copies, the optimizer's update and gaps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.bench_kernels import HEAD_SIZE, Row, inputs, our_runs
from ray_ulysses.attention.kernels import Demand, KernelEntry
from ray_ulysses.attention.kernels.table import HOPPER_TFLOPS, by_speed
from ray_ulysses.model_shape import ModelShape

PRODUCT_FLOPS = 790e12
"""What products of large bf16 matrices reach on an H100 and an H200."""
_RUNS = 2
_MOST_TOKENS = 1 << 20
"""Of longer rows, the kernels alone take minutes."""


def products_s(model: dict[str, Any], tokens: int) -> float:
    """Return the seconds of a rank's matrix products, with one recomputation of the layers and none of the head."""
    shape = ModelShape.from_config_dict(model)
    return tokens * (8 * shape.layer_multiply_adds + 6 * shape.embedding_parameters) / PRODUCT_FLOPS


def candidates(device: str) -> list[KernelEntry]:
    """Return the fastest measured kernel that runs here, and those that are not measured yet."""
    asked = Demand(device_type=device, dtype=torch.bfloat16, head_size=HEAD_SIZE, value_size=HEAD_SIZE)
    able = [one for one in by_speed() if one.runs_on(device) and one.refuses(asked) is None and one.name != "math"]
    return able[:1] + [one for one in able[1:] if one.name not in HOPPER_TFLOPS]


def seconds(run: Callable[[], Any], device: str) -> float:
    """Return the median seconds of a run after a first one."""
    found = []
    for _ in range(1 + _RUNS):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def floor_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the floor of a step in seconds, its parts, and the kernel; nothing for rows that are too long."""
    if case["context"] > _MOST_TOKENS:
        return {}
    model, sp, device = case["model"], case["sp"], case["device"]
    heads, kv_heads = (max(1, model[name] // sp) for name in ("num_attention_heads", "num_key_value_heads"))
    row = Row(name="floor", lengths=tuple(case["documents"]), heads=heads, kv_heads=kv_heads)
    rates = {}
    for kernel in candidates(device):
        rates[kernel.name] = sum(seconds(run, device) for run in our_runs(kernel.name, row, inputs(row, device)))
    name = min(rates, key=lambda one: rates[one])
    attention_s, matrices_s = rates[name] * model["num_hidden_layers"], products_s(model, case["context"] // sp)
    return {
        "floor": {"kernel": name, "attention_s": attention_s, "products_s": matrices_s, "s": attention_s + matrices_s}
    }


def in_words(one: dict[str, Any], step_s: float) -> str:
    """Return a step as a multiple of its floor; empty if it was not measured."""
    floor = one.get("floor")
    return "" if floor is None else f"{step_s / floor['s']:.3f} x {floor['s']:.2f} s ({floor['kernel']})"
