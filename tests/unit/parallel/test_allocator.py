"""PyTorch's allocator on GPUs grows its segments, unless the user has chosen otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ray_ulysses.parallel.gpu_environment import ALLOCATOR, expand_segments


def test_segments_grow_by_default() -> None:
    environment: dict[str, str] = {}
    expand_segments(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ALLOCATOR)
def test_what_the_user_has_set_under_either_name_stays(name: str) -> None:
    environment = {name: "backend:cudaMallocAsync"}
    expand_segments(environment)
    assert environment == {name: "backend:cudaMallocAsync"}


def test_torch_reads_it_after_its_import() -> None:
    """A canary: when torch 2.13 reads the variable is written nowhere."""
    script = (
        "import os, torch; from ray_ulysses.parallel.gpu_environment import expand_segments; "
        "expand_segments(os.environ); "
        "print(torch._C._accelerator_getAllocatorSettings())"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "expandable_segments:True"
