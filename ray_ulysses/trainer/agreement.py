"""Flags on which all ranks agree after each step, so that they stop, save and end after the same step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace

from ray_ulysses.run.requests import RequestWatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """Flags that a rank raises after a step; each holds for all ranks when one of them raises it.

    Ranks add them up in the collective that ends a step anyway.

    Attributes:
        stop: Rank 0: the run was asked to stop.
        resize: Rank 0: it is to stop because its size is to change.
        save_requested: Rank 0: somebody asked for a checkpoint.
        gone: Rank 0: the run's directory was deleted or moved.
        notice: A node is going to be taken away.
        notice_due: A checkpoint is due for that reason; see `checkpoint.notice`.
        time_is_up: Rank 0: a checkpoint is due by ``checkpoint.every_minutes``.
        saving: A checkpoint is being written.
        buffers_busy: A rank has no free host buffer: all are still being written.
        failed: The previous save has failed.
        retry_due: Rank 0: it is time to try again.
        ended: The previous save or the journal has failed in a way that ends the attempt.
        memory_due: Rank 0: the state is to be kept in the memory of peers.
        memory_busy: The state of an earlier step is still being written there, or there is no memory for another.
        compute_due: Rank 0: it is time to measure how fast each rank computes.
    """

    stop: bool = False
    resize: bool = False
    save_requested: bool = False
    gone: bool = False
    notice: bool = False
    notice_due: bool = False
    time_is_up: bool = False
    saving: bool = False
    buffers_busy: bool = False
    failed: bool = False
    retry_due: bool = False
    ended: bool = False
    memory_due: bool = False
    memory_busy: bool = False
    compute_due: bool = False

    def to_counts(self) -> list[int]:
        """Return the flags as numbers that are added up over the ranks."""
        return [int(flag) for flag in astuple(self)]

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Flags:
        """Return the flags that at least one rank has raised, from the sums over all ranks."""
        return cls(**{field.name: count > 0 for field, count in zip(fields(cls), counts, strict=True)})


NUM_FLAGS = len(fields(Flags))


def with_requests(own: Flags, requests: RequestWatch) -> Flags:
    """Add to rank 0's flags what people and the driver have requested through the run's directory."""
    stop = requests.stop()
    return replace(own, stop=stop is not None, resize=stop == "resize", save_requested=requests.take_save())
