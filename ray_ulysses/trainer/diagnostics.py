"""Writes files to the run directory for diagnosing a slow step, an out-of-memory error or a hang."""

from __future__ import annotations

import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d

from ray_ulysses.config.learning import ProfileSection
from ray_ulysses.elastic.causes import OUT_OF_MEMORY
from ray_ulysses.errors import RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.device import choose_device
from ray_ulysses.planner.problems import MemoryPlace, shortage
from ray_ulysses.planner.stages import Stage
from ray_ulysses.run.settings import ResolvedRun
from ray_ulysses.run_names import flight_record_key, memory_snapshot_key, profile_key
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.trainer.step import peak_memory_gib

_RETRY_S = 5.0
_RECORDED_STEPS = 2
"""Number of steps to record. Memory peaks within these steps, because the first step allocates all permanent memory,
such as optimizer state."""
_MOST_ALLOCATIONS = 100_000
_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostics:
    """Writes one rank's diagnostic files during one attempt."""

    run_dir: Place
    attempt: int
    rank: int
    device: torch.device

    @contextmanager
    def profiled(self, profile: ProfileSection | None, step: int, beat: Callable[[], object]) -> Iterator[None]:
        """Profile a block if ``profile`` selects this step and rank.

        ``beat`` is called before the trace is written, as a heartbeat.
        """
        if profile is None or step not in profile.steps or self.rank not in profile.ranks:
            yield
            return
        with torch.profiler.profile() as profiler:
            yield
        beat()
        with tempfile.TemporaryDirectory(prefix="profile-") as folder:
            file = Path(folder) / "trace.json.gz"
            profiler.export_chrome_trace(str(file))
            written = self._write(profile_key(self.attempt, step, self.rank), file.read_bytes())
        if written is not None:
            _log.info("profiled step %d on rank %d: %s in %s", step, self.rank, written, self.run_dir)

    def leave_snapshot(self, step: int, snapshot: Any) -> str | None:
        """Write a snapshot of the GPU's memory, and return the file's key, or None if writing fails."""
        return self._write(memory_snapshot_key(self.attempt, step, self.rank), pickle.dumps(snapshot))

    def leave_flight_record(self) -> str | None:
        """Write the list of collectives that this rank has started; return the file's key, or None if writing fails.

        This method is called from a separate thread. PyTorch queries the GPU to find out which collectives have
        finished.
        """
        choose_device(self.device)
        # PyTorch records NCCL and gloo collectives separately, and CPU builds lack NCCL.
        dump = getattr(_distributed_c10d, "_dump_nccl_trace" if self.device.type == "cuda" else "_dump_fr_trace")
        return self._write(flight_record_key(self.attempt, self.rank), dump())

    def _write(self, key: str, content: bytes) -> str | None:
        try:
            open_store(self.run_dir, must_exist=True, retry_s=_RETRY_S).replace(key, [content])
        except OSError as error:
            _log.warning("%s can't be written in %s (%s)", key, self.run_dir, error.strerror or error)
            return None
        return key


class MemoryRecorder:
    """Records the allocation history of a GPU's memory, and takes a snapshot when memory runs out.

    Stack traces are recorded only until the end of the attempt's second step, because recording takes time; blocks
    allocated by then retain their stack traces. On CPU, nothing is recorded. Not yet tested on a GPU. ``snapshot`` is
    the memory snapshot taken when memory ran out, or None if memory has not run out.
    """

    def __init__(
        self,
        device: torch.device,
        memory: Any = torch.cuda.memory,
        observe: Callable[[Callable[..., object]], object] | None = None,
    ) -> None:
        self.snapshot: Any = None
        self._memory, self._steps_left = memory, _RECORDED_STEPS if device.type == "cuda" else 0
        if device.type == "cuda":
            # Only GPU builds of PyTorch have this function.
            observe = observe or getattr(torch._C, "_cuda_attach_out_of_memory_observer")  # noqa: B009
            observe(self._take)
            memory._record_memory_history(stacks="python", max_entries=_MOST_ALLOCATIONS, device=device)

    def step_done(self) -> None:
        """Count a finished step, and stop recording stack traces after the second step."""
        if self._steps_left > 0:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._memory._record_memory_history(enabled=None)

    def _take(self, *_: object) -> None:
        self.snapshot = self._memory._snapshot()


# The CPU allocator and libraries other than torch raise a plain RuntimeError.
_TEXT = re.compile(r"DefaultCPUAllocator: .*allocate|out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)


class OutOfMemoryError(RunError):
    """An attempt ran out of memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and not isinstance(error, RunError) and bool(_TEXT.search(str(error)))


@contextmanager
def memory_explained(
    run: ResolvedRun, stage: Stage, diagnostics: Diagnostics, recorder: MemoryRecorder, step: int | None
) -> Iterator[None]:
    """Convert a block's allocation error into `OutOfMemoryError`, and write a snapshot of the GPU's memory.

    ``step`` is None before the first step and after the last step.
    """
    device = diagnostics.device
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        is_of_host = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
        place: MemoryPlace = "process" if device.type != "cuda" else "host" if is_of_host else "device"
        measured = device if place == "device" else torch.device("cpu")
        what = "allocated" if measured.type == "cuda" else "resident"
        peak_gib = peak_memory_gib(measured)
        said = shortage(stage.run_config, run.shape, peak_gib, what, stage=stage.number, place=place)
        is_taken = place == "device" and recorder.snapshot is not None
        left = diagnostics.leave_snapshot(step or 0, recorder.snapshot) if is_taken else None
        # The snapshot's key comes first, because long messages are truncated.
        snapshot = f" (snapshot: {left})" if left is not None else ""
        where = "an attempt outside a training step" if step is None else f"step {step}"
        raise OutOfMemoryError(f"{where} {OUT_OF_MEMORY}{snapshot}: {said}") from error
