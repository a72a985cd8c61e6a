"""Copies that run as late as possible, and raise where copies on a GPU would race."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

_GARBAGE = 255
"""In every byte, it is a NaN."""


@dataclass(eq=False)
class LateCopy:
    """A copy that runs when it is waited for."""

    kind: str
    start: int
    stop: int
    device_side: weakref.ref[torch.Tensor]
    is_done: bool = False


@dataclass
class LateCopies:
    """Records the order of copies, and runs each copy when the computation waits for it."""

    num_bytes: int
    log: list[tuple[str, int]] = field(default_factory=list)
    pending: list[LateCopy] = field(default_factory=list)
    most_pending_bytes: int = 0
    highest: int = 0

    def __post_init__(self) -> None:
        self.memory = torch.full((self.num_bytes,), _GARBAGE, dtype=torch.uint8)

    def copy_out(self, source: torch.Tensor, start: int) -> LateCopy:
        for other in self._overlapping(start, start + len(source)):
            raise AssertionError(f"a slab was reused before its copy {other.kind} finished")
        return self._note("out", source, start)

    def copy_in(self, start: int, target: torch.Tensor) -> LateCopy:
        for other in self._overlapping(start, start + len(target)):
            raise AssertionError(f"a slab was copied in before its copy {other.kind} finished")
        target.fill_(_GARBAGE)
        return self._note("in", target, start)

    def wait(self, copy: LateCopy) -> None:
        if copy.is_done:
            return
        device_side = copy.device_side()
        assert device_side is not None, f"memory on the device was freed before its copy {copy.kind} finished"
        host = self.memory[copy.start : copy.stop]
        if copy.kind == "out":
            host.copy_(device_side)
        else:
            device_side.copy_(host)
            host.fill_(_GARBAGE)
        copy.is_done = True
        self.pending.remove(copy)
        self.log.append((f"{copy.kind} done", copy.start))

    def finish(self) -> None:
        for copy in list(self.pending):
            self.wait(copy)

    def _note(self, kind: str, device_side: torch.Tensor, start: int) -> LateCopy:
        copy = LateCopy(kind, start, start + len(device_side), weakref.ref(device_side))
        self.pending.append(copy)
        self.log.append((kind, start))
        self.highest = max(self.highest, copy.stop)
        self.most_pending_bytes = max(self.most_pending_bytes, sum(one.stop - one.start for one in self.pending))
        return copy

    def _overlapping(self, start: int, stop: int) -> list[LateCopy]:
        return [copy for copy in self.pending if copy.start < stop and start < copy.stop]
