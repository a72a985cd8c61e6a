"""In-memory files that a child shares with its supervisor, which creates them and passes down their descriptors.

One file contains the child's progress and its node's preemption notice; each field is an aligned word with one writer
and one reader. The child writes hang diagnostics to the other file when it receives a signal. The threads' stacks are
written first, which works whatever the threads are doing. A background thread then makes the attempt's own dump, such
as a flight record, and appends the dump's location: the main thread may be stuck in a collective.
"""

from __future__ import annotations

import faulthandler
import math
import mmap
import os
import re
import threading
import time
from collections.abc import Callable

from ray_ulysses.checkpoint.notice import Notice
from ray_ulysses.elastic.hang import Phase, RankProgress
from ray_ulysses.supervision.order import STACKS_SIGNAL

_BEATS, _STEP, _PHASE, _MICRO_BATCH, _AT, _STEPS, _STARTED, _SECONDS, _NOTICED, _DEADLINE, _WAITS = range(11)
_BYTES = 8 * 16
PHASES: tuple[Phase, ...] = ("start", "step", "evaluation", "save")


class SharedProgress:
    """Memory that a child and its supervisor share; both open it by its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _BYTES)
        view = memoryview(self._memory)
        self._whole, self._real = view.cast("q"), view.cast("d")

    @classmethod
    def create(cls) -> SharedProgress:
        """Create shared memory, initialized to zero."""
        descriptor = os.memfd_create("ray-ulysses-progress", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _BYTES)
        return cls(descriptor)

    def beat(self, phase: Phase, step: int) -> None:
        """Record progress before a micro-batch or a new phase. Called by the child."""
        whole, real, now, number = self._whole, self._real, time.monotonic(), PHASES.index(phase)
        is_same = (whole[_STEP], whole[_PHASE]) == (step, number)
        if not is_same and PHASES[whole[_PHASE]] == "step":
            real[_SECONDS] = now - real[_STARTED]
            whole[_STEPS] += 1
        if not is_same:
            real[_STARTED] = now
        whole[_MICRO_BATCH] = whole[_MICRO_BATCH] + 1 if is_same else 0
        whole[_STEP], whole[_PHASE] = step, number
        real[_AT] = now
        whole[_BEATS] += 1

    def wait_for_row(self, waits: bool) -> None:
        """Record whether the child is waiting for its next row. Called by the child."""
        self._whole[_WAITS] = waits

    def progress(self, rank: int, *, idle_since: float, state: str) -> RankProgress:
        """Return the child's progress. Called by the supervisor.

        Args:
            rank: Rank of the child.
            idle_since: Monotonic time of the order to start the child, used before the child's first beat.
            state: State of the child's process.
        """
        whole, real = self._whole, self._real
        return RankProgress(
            rank=rank,
            phase=PHASES[whole[_PHASE]],
            step=whole[_STEP],
            micro_batch=whole[_MICRO_BATCH],
            idle_s=time.monotonic() - (real[_AT] if whole[_BEATS] else idle_since),
            state=state,
            waits_for_row=bool(whole[_WAITS]),
            steps=whole[_STEPS],
            step_s=real[_SECONDS],
        )

    def set_notice(self, notice: Notice | None) -> None:
        """Pass on a preemption notice, or None to withdraw it. Called by the supervisor."""
        deadline = None if notice is None else notice.deadline
        self._real[_DEADLINE] = math.nan if deadline is None else deadline
        self._whole[_NOTICED] = notice is not None

    def notice(self) -> Notice | None:
        """Return the preemption notice, or None. Called by the child."""
        if not self._whole[_NOTICED]:
            return None
        deadline = self._real[_DEADLINE]
        return Notice(deadline=None if math.isnan(deadline) else deadline)

    def close(self) -> None:
        """Release this side's view of the memory."""
        self._whole.release()
        self._real.release()
        os.close(self.descriptor)


_LOOK_EVERY_S = 0.1
_LEFT = re.compile(rb"\nleft: (.*)\n$")
_LONGEST_BYTES = 1 << 12


class HangDump:
    """Child side of the hang diagnostics."""

    def __init__(self, stacks: int) -> None:
        self._stacks = stacks
        self._leave: Callable[[], str | None] = lambda: None
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        threading.Thread(target=self._serve, name="hang-dump", daemon=True).start()

    def on_hang(self, leave: Callable[[], str | None]) -> None:
        """Register a function for a background thread to call when ranks hang; it must return its output's location."""
        self._leave = leave

    def _serve(self) -> None:
        seen = 0
        while True:
            time.sleep(_LOOK_EVERY_S)
            size = os.fstat(self._stacks).st_size
            # The size is stable, so the stacks are complete. The supervisor empties the file before the next request.
            if size and size == seen and read_dump(self._stacks, 0)[1] is None:
                os.write(self._stacks, f"\nleft: {self._leave() or ''}\n".encode())
            seen = size


def read_dump(stacks: int, most_bytes: int) -> tuple[str, str | None]:
    """Return the stacks, and the location of the attempt's dump: empty without a dump, None until it is complete."""
    size = os.fstat(stacks).st_size
    left = _LEFT.search(os.pread(stacks, _LONGEST_BYTES, max(0, size - _LONGEST_BYTES)))
    text = os.pread(stacks, most_bytes, 0).decode(errors="replace")
    return text, None if left is None else left[1].decode(errors="replace")
