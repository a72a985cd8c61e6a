"""Exchange of small values between the ranks that save or load a checkpoint."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist


class RankMessenger(Protocol):
    """Small Python values between live ranks; every rank must call each method, in the same order."""

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value on rank 0, None elsewhere."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        ...


class TorchRankMessenger:
    """A messenger over a process group of CPU tensors.

    Args:
        group: A gloo group of all ranks; None is the default group. It must not be the group of the training's
            collectives if those may be in flight at the same time.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value on rank 0, None elsewhere."""
        world_size = dist.get_world_size(self._group)
        values = [None] * world_size if dist.get_rank(self._group) == 0 else None
        dist.gather_object(value, values, group=self._group, group_dst=0)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]


class SingleRankMessenger:
    """The messenger of a world of one."""

    def gather(self, value: Any) -> list[Any] | None:
        """Return the one value."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Return the one value."""
        return value


def agree(messenger: RankMessenger, problem: str | None) -> str | None:
    """Return on every rank the problems of all ranks in one text, or None if there are none.

    Every rank must call; it keeps a rank that failed from leaving the others in a collective that never ends.

    Args:
        messenger: Joins the ranks.
        problem: What went wrong on this rank.
    """
    gathered = messenger.gather(problem)
    agreed: str | None = messenger.broadcast(None if gathered is None else join_problems(gathered))
    return agreed


def join_problems(problems: list[str | None]) -> str | None:
    """Return the problems by rank in one text, or None if there are none."""
    said = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None]
    shown = said[:8] + [f"and {len(said) - 8} more ranks"] * (len(said) > 8)
    return "; ".join(shown) or None
