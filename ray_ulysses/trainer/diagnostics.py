"""Explains a slow step, an out-of-memory error or a hang, with files in the run's directory."""

from __future__ import annotations

import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d

from ray_ulysses.elastic.causes import OUT_OF_MEMORY
from ray_ulysses.errors import RunError
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.device import choose_device
from ray_ulysses.planner.problems import MemoryPlace, shortage
from ray_ulysses.run_names import flight_record_key, memory_snapshot_key, profile_key
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.trainer.step import peak_memory_gib

if TYPE_CHECKING:
    from ray_ulysses.config.learning import ProfileSection
    from ray_ulysses.planner.stages import Stage
    from ray_ulysses.run.settings import ResolvedRun

_RETRY_S = 5.0
_RECORDED_STEPS = 2
"""Later steps peak no higher: the first step allocates all that stays, such as the optimizer's state."""
_MOST_ALLOCATIONS = 100_000
_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostics:
    """The files of one rank in one attempt."""

    run_dir: Place
    """The run's directory."""
    attempt: int
    rank: int
    device: torch.device
    """Where the rank computes."""

    @contextmanager
    def profiled(self, profile: ProfileSection | None, step: int, beat: Callable[[], object]) -> Iterator[None]:
        """Trace a block if the profile selects the step and this rank.

        ``beat`` is called as a sign of life before the trace is written.
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
            _log.info("step %d of rank %d was traced: %s in %s", step, self.rank, written, self.run_dir)

    def leave_snapshot(self, step: int, snapshot: Any) -> str | None:
        """Write the state of the GPU's memory, and return its key; None if it can't be written."""
        return self._write(memory_snapshot_key(self.attempt, step, self.rank), pickle.dumps(snapshot))

    def leave_flight_record(self) -> str | None:
        """Write the collectives that this rank has begun, and return their key; None if they can't be written.

        Called from a separate thread; PyTorch queries the GPU for the collectives that have completed.
        """
        choose_device(self.device)
        # PyTorch records NCCL and gloo separately, and CPU builds have no NCCL.
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
    """Records where a GPU's memory was allocated, and takes a snapshot when it runs out.

    Allocation stacks are recorded only until the end of the attempt's second step, since recording takes time; earlier
    allocations keep theirs. On a CPU nothing is recorded. Not yet tested on a GPU.
    ``snapshot`` is the state of the memory when it ran out; None if it never has.
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
            # Only PyTorch's GPU builds have it.
            observe = observe or getattr(torch._C, "_cuda_attach_out_of_memory_observer")  # noqa: B009
            observe(self._take)
            memory._record_memory_history(stacks="python", max_entries=_MOST_ALLOCATIONS, device=device)

    def step_done(self) -> None:
        """Stop recording stacks after the second step."""
        if self._steps_left > 0:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._memory._record_memory_history(enabled=None)

    def _take(self, *_: object) -> None:
        self.snapshot = self._memory._snapshot()


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

    ``step`` is None before the first and after the last.
    """
    device = diagnostics.device
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        place: MemoryPlace = "process" if device.type != "cuda" else "host" if _is_of_host(error) else "device"
        measured = device if place == "device" else torch.device("cpu")
        what = "allocated" if measured.type == "cuda" else "resident"
        peak_gib = peak_memory_gib(measured)
        said = shortage(stage.run_config, run.shape, peak_gib, what, stage=stage.number, place=place)
        is_taken = place == "device" and recorder.snapshot is not None
        left = diagnostics.leave_snapshot(step or 0, recorder.snapshot) if is_taken else None
        # First, since a long text is truncated.
        snapshot = f" (snapshot: {left})" if left is not None else ""
        where = "an attempt outside its steps" if step is None else f"step {step}"
        raise OutOfMemoryError(f"{where} {OUT_OF_MEMORY}{snapshot}: {said}") from error
