"""Exchange of small Python values between the ranks that save or load a checkpoint."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist


class RankMessenger(Protocol):
    """Collectives for small Python values; all ranks must call the same methods in the same order."""

    def gather(self, value: Any) -> list[Any] | None:
        """Gather a value from each rank; return the values in rank order on rank 0, and None on the other ranks."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Send rank 0's value to all ranks, and return that value."""
        ...


class TorchRankMessenger:
    """Messenger over a `torch.distributed` process group.

    Args:
        group: Gloo group of all ranks, or None for the default group. Do not pass a group that training uses if
            messages can overlap with training's collectives.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def gather(self, value: Any) -> list[Any] | None:
        """Gather a value from each rank; return the values in rank order on rank 0, and None on the other ranks."""
        world_size = dist.get_world_size(self._group)
        values = [None] * world_size if dist.get_rank(self._group) == 0 else None
        dist.gather_object(value, values, group=self._group, group_dst=0)
        return values

    def broadcast(self, value: Any) -> Any:
        """Send rank 0's value to all ranks, and return that value."""
        box = [value]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]


class SingleRankMessenger:
    """Messenger for a world size of 1, without a process group."""

    def gather(self, value: Any) -> list[Any] | None:
        """Return a list with `value`."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Return `value`."""
        return value


def agree(messenger: RankMessenger, problem: str | None) -> str | None:
    """Combine the problems of all ranks into one text and return it on every rank, or None if there are none.

    All ranks must call this function, so that a failed rank does not leave the others waiting in a collective.
    """
    gathered = messenger.gather(problem)
    agreed: str | None = messenger.broadcast(None if gathered is None else join_problems(gathered))
    return agreed


def join_problems(problems: list[str | None]) -> str | None:
    """Return one text with the problems of up to 8 failed ranks, or None if no rank has a problem."""
    said = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None]
    shown = said[:8] + [f"and {len(said) - 8} more ranks"] * (len(said) > 8)
    return "; ".join(shown) or None
