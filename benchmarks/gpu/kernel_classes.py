"""Where a step's time goes, by the class of what runs: attention, products, copies, norms and the rest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

CLASSES: tuple[tuple[str, str], ...] = (
    # The first expression that is found in a kernel's name decides.
    ("attention", r"fmha|flash|sdpa|attention"),
    ("matrix products", r"gemm|gemv|cutlass|nvjet|cublas|xmma|::(add)?mm\b|::bmm\b|matmul|aten::linear"),
    ("optimizer", r"multi_tensor|adam"),
    ("copies", r"memcpy|memset|copy|cat_array|aten::cat|fill"),
    ("reductions", r"reduce|norm|softmax|mean|::sum|nll|argmax"),
    ("element-wise", r"elementwise|::(mul|add|pow|sub|div|neg|silu|rsqrt|exp)_?\b|silu"),
)


_LONGEST = 25


def kernel_class(name: str) -> str:
    """Return the class of a kernel or an operator (pure)."""
    return next((one for one, words in CLASSES if re.search(words, name, re.IGNORECASE)), "other")


def by_class(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return seconds by class from names and seconds (pure)."""
    found: Counter[str] = Counter()
    for name, seconds in times:
        found[kernel_class(name)] += seconds
    return dict(found.most_common())


def profiled(step: Callable[[], Any], device: torch.device, path: str | None = None) -> dict[str, dict[str, float]]:
    """Take one step under torch's profiler; return the seconds on the device of each class, and of the longest kernels.

    Args:
        step: The step.
        device: Where it runs; on the CPU operators count, without what they call.
        path: A file for the tables of operators and kernels; None for none.
    """
    is_cuda = device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if is_cuda else []
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        if is_cuda:
            torch.cuda.synchronize()
    averages = profile.key_averages()
    if path is not None:
        orders = ("self_cuda_time_total", "self_cpu_time_total") if is_cuda else ("self_cpu_time_total",)
        Path(path).write_text("\n".join(averages.table(sort_by=order, row_limit=60) for order in orders))
    on_device = [
        one
        for one in averages
        # Annotations, such as that of the optimizer's step, span other events.
        if (one.device_type == torch.autograd.DeviceType.CUDA) == is_cuda and not one.is_user_annotation
    ]
    field = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    times = sorted(((one.key, getattr(one, field) / 1e6) for one in on_device), key=lambda one: -one[1])
    return {"classes": by_class(times), "kernels": {name[:200]: seconds for name, seconds in times[:_LONGEST]}}
