"""Says of an attempt that ran out of memory what was planned, what was measured, and which settings need less."""

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
    from ray_ulysses.trainer.diagnostics import Diagnostics, MemoryRecorder

# The allocators of the CPU and of libraries beside torch raise plain errors.
_TEXT = re.compile(r"DefaultCPUAllocator: .*allocate|out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)


class OutOfMemoryError(RunError):
    """An attempt ran out of memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation has failed, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and not isinstance(error, RunError) and bool(_TEXT.search(str(error)))


def _is_of_host(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def memory_explained(
    run: ResolvedRun, stage: Stage, diagnostics: Diagnostics, recorder: MemoryRecorder, step: int | None
) -> Iterator[None]:
    """Raise `OutOfMemoryError` in place of an allocation's error, and leave a snapshot of a GPU's memory.

    Args:
        run: The run, as the stage trains it.
        stage: The stage.
        diagnostics: Writes the snapshot.
        recorder: Has it.
        step: The step that is taken; None before the first and after the last.
    """
    device = diagnostics.device
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
        is_taken = place == "device" and recorder.snapshot is not None
        left = diagnostics.leave_snapshot(step or 0, recorder.snapshot) if is_taken else None
        # First, since a long text is cut off.
        snapshot = f" (snapshot: {left})" if left is not None else ""
        where = "an attempt outside its steps" if step is None else f"step {step}"
        raise OutOfMemoryError(f"{where} {OUT_OF_MEMORY}{snapshot}: {said}") from error
