"""The default of PyTorch's allocator on GPUs: segments that grow, which rows of other lengths do not fragment."""

from __future__ import annotations

from collections.abc import MutableMapping

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the allocator's settings: the name since PyTorch 2.9, and the older one."""


def expand_segments(environment: MutableMapping[str, str]) -> None:
    """Have PyTorch allocate GPU memory in expandable segments, unless the user has set its allocator.

    PyTorch reads the variable before its first allocation on a GPU, and on a CPU not at all.

    Args:
        environment: Of the process that is to allocate.
    """
    if not any(name in environment for name in ALLOCATOR):
        environment[ALLOCATOR[0]] = "expandable_segments:True"
