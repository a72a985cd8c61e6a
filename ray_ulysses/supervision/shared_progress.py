"""Memory that a child shares with its supervisor: how far the child is, and the notice that its node will go.

The supervisor makes it as an anonymous file and hands its descriptor down. Each field is one aligned word, which one
side writes and the other reads.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from dataclasses import dataclass

from ray_ulysses.checkpoint.notice import Notice

_BEATS, _STEP, _FIRST, _PHASE, _AT, _NOTICED, _DEADLINE = range(7)
_BYTES = 8 * 16
PHASES = ("starting", "step", "evaluation", "saving", "ending")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of a child.

    Attributes:
        beats: Number of signs of life so far.
        step: The step that it trains; 0 before the first.
        phase: One of `PHASES`.
        at: When it gave the last sign, on the machine's monotonic clock.
        stepped: Whether it has completed a step.
    """

    beats: int
    step: int
    phase: str
    at: float
    stepped: bool


class SharedProgress:
    """The shared memory; both sides open it by its descriptor.

    Args:
        descriptor: Of the file; it stays open, and is closed with this object.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _BYTES)
        view = memoryview(self._memory)
        self._whole, self._real = view.cast("q"), view.cast("d")

    @classmethod
    def create(cls) -> SharedProgress:
        """Return new shared memory, all zero."""
        descriptor = os.memfd_create("ray-ulysses-progress", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _BYTES)
        return cls(descriptor)

    def beat(self, phase: str, step: int) -> None:
        """Give a sign of life; the child calls."""
        whole = self._whole
        if whole[_FIRST] == 0 and step > 0:
            whole[_FIRST] = step
        whole[_STEP], whole[_PHASE] = step, PHASES.index(phase)
        self._real[_AT] = time.monotonic()
        whole[_BEATS] += 1

    def progress(self) -> Progress:
        """Return the child's progress; the supervisor calls."""
        whole = self._whole
        step, first = whole[_STEP], whole[_FIRST]
        return Progress(
            beats=whole[_BEATS],
            step=step,
            phase=PHASES[whole[_PHASE]],
            at=self._real[_AT],
            stepped=0 < first < step or PHASES[whole[_PHASE]] in ("saving", "evaluation", "ending"),
        )

    def set_notice(self, notice: Notice | None) -> None:
        """Pass on that the node will be taken away; the supervisor calls."""
        deadline = None if notice is None else notice.deadline
        self._real[_DEADLINE] = math.nan if deadline is None else deadline
        self._whole[_NOTICED] = notice is not None

    def notice(self) -> Notice | None:
        """Return the notice that the supervisor has passed on; the child calls."""
        if not self._whole[_NOTICED]:
            return None
        deadline = self._real[_DEADLINE]
        return Notice(deadline=None if math.isnan(deadline) else deadline)

    def close(self) -> None:
        """Give the memory back; the other side keeps its own."""
        self._whole.release()
        self._real.release()
        os.close(self.descriptor)
