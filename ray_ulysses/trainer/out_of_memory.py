"""Says of a step that ran out of memory what was planned, what was measured, and which settings need less."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ray_ulysses.elastic.causes import OUT_OF_MEMORY
from ray_ulysses.errors import RunError
from ray_ulysses.planner.shortage import Place, shortage
from ray_ulysses.trainer.step_meter import peak_memory_gib

if TYPE_CHECKING:
    from ray_ulysses.planner.stages import Stage
    from ray_ulysses.run.settings import ResolvedRun

# The allocators of the CPU and of libraries beside torch raise plain errors.
_TEXT = re.compile(r"DefaultCPUAllocator: .*allocate|out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)


class OutOfMemoryError(RunError):
    """A step ran out of memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation has failed, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and not isinstance(error, RunError) and bool(_TEXT.search(str(error)))


def _is_of_host(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def memory_explained(run: ResolvedRun, stage: Stage, device: torch.device, step: int) -> Iterator[None]:
    """Raise `OutOfMemoryError` in place of an allocation's error.

    Args:
        run: The run, as the stage trains it.
        stage: The stage.
        device: This rank's device.
        step: The step that is taken.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        place: Place = "process" if device.type != "cuda" else "host" if _is_of_host(error) else "device"
        measured = device if place == "device" else torch.device("cpu")
        what = "allocated" if measured.type == "cuda" else "resident"
        peak_gib = peak_memory_gib(measured)
        said = shortage(stage.run_config, run.shape, peak_gib, what, stage=stage.number, place=place)
        raise OutOfMemoryError(f"step {step} {OUT_OF_MEMORY}: {said}") from error
