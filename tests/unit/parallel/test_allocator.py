"""PyTorch's allocator on GPUs grows its segments, unless the user has chosen otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ray_ulysses.parallel.gpu_environment import ALLOCATOR, expand_segments


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [({}, "expandable_segments:True"), *(({name: "backend:cudaMallocAsync"}, None) for name in ALLOCATOR)],
)
def test_segments_grow_unless_the_user_configured_the_allocator(
    environment: dict[str, str], wanted: str | None
) -> None:
    before = dict(environment)
    expand_segments(environment)
    assert environment == (before if wanted is None else {"PYTORCH_ALLOC_CONF": wanted})


def test_torch_reads_the_variable_after_its_import() -> None:
    """Canary: torch 2.13 does not document when it reads the variable."""
    script = (
        "import os, torch; from ray_ulysses.parallel.gpu_environment import expand_segments; "
        "expand_segments(os.environ); "
        "print(torch._C._accelerator_getAllocatorSettings())"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "expandable_segments:True"
