"""Watches the progress of one generation's ranks, as their supervisors report it, for a hang."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray_ulysses.elastic.hang import RECENT_STEPS, Hang, HangLimits, RankProgress, find_hang

if TYPE_CHECKING:
    from ray_ulysses.config import Config

_STACKS_S = 2.5
"""Longest wait for the stacks of the ranks, in seconds."""


def hang_limits(config: Config) -> HangLimits:
    """Return how long a rank of a run may go without progress."""
    elastic = config.elastic
    return HangLimits(
        floor_s=elastic.hang_timeout_s,
        start_s=max(elastic.start_hang_timeout_s, elastic.hang_timeout_s),
        # Micro-batches of an evaluation are as long as those of a step, and may be longer.
        evaluation_s=max(elastic.collective_timeout_s, elastic.hang_timeout_s),
        # The source of rows gives up earlier, with a better reason.
        row_s=elastic.collective_timeout_s + elastic.hang_timeout_s,
        # So does the save.
        save_s=config.checkpoint.save_timeout_s + elastic.hang_timeout_s,
    )


class HangWatch:
    """Knows the progress of every rank of a generation."""

    def __init__(self, limits: HangLimits, generation: int, world_size: int) -> None:
        self.generation = generation
        self._limits, self._world_size = limits, world_size
        self._heard: dict[int, tuple[RankProgress, float]] = {}
        self._steps = 0
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._asked_at: float | None = None
        self._stacks: dict[int, str] = {}
        self._left: dict[int, str] = {}
        self._done: set[int] = set()

    def hear(self, rank: int, message: Mapping[str, Any], now: float) -> None:
        """Take a rank's progress from its supervisor's message.

        Raises:
            KeyError: The message holds none.
        """
        told = {name: message[name] for name in ("phase", "step", "micro_batch", "idle_s", "state", "waits_for_row")}
        self._heard[rank] = (RankProgress(rank=rank, **told), now)
        # Ranks step together; of steps faster than the messages some are not heard of.
        if rank == 0 and message["steps"] > self._steps:
            self._steps = message["steps"]
            self._step_seconds.append(message["step_s"])

    def hear_stacks(self, rank: int, text: str, left: str = "") -> None:
        """Take the stacks of a rank's threads, and the key of its flight record, empty without one."""
        self._stacks[rank] = text
        if left:
            self._left[rank] = left

    def done(self, rank: int) -> None:
        """Note that a rank's attempt has ended; the others may still write and save."""
        self._done.add(rank)

    def find(self, now: float) -> Hang | None:
        """Return the hang that is seen now; None also while not every rank has been heard of."""
        heard = [self._heard[rank] for rank in self._heard.keys() - self._done]
        if len(heard) < self._world_size - len(self._done):
            return None
        ranks = [replace(progress, idle_s=progress.idle_s + now - at) for progress, at in heard]
        found = find_hang(ranks, tuple(self._step_seconds), self._limits)
        if found is None:
            self._asked_at = None
        return found

    def asks_for_stacks(self, now: float) -> bool:
        """Return whether the ranks are to be asked for their stacks; once for each hang."""
        is_first = self._asked_at is None
        if is_first:
            # Those of an earlier alarm, after which the ranks went on, say nothing of this one.
            self._asked_at, self._stacks, self._left = now, {}, {}
        return is_first

    def stacks(self, now: float) -> dict[int, str] | None:
        """Return the stacks by rank, empty for ranks that gave none; None while they are waited for."""
        waited_s = 0.0 if self._asked_at is None else now - self._asked_at
        if len(self._stacks) < self._world_size and waited_s < _STACKS_S:
            return None
        return {rank: self._stacks.get(rank, "") for rank in range(self._world_size)}

    def in_words(self, hang: Hang) -> str:
        """Return the text of a hang, with the place of the flight records that its ranks have left."""
        if not self._left:
            return str(hang)
        folder = next(iter(self._left.values())).rpartition("/")[0]
        missing = self._world_size - len(self._left)
        of_some = f", of all but {missing} of {self._world_size} ranks" if missing else ""
        return f"{hang}; flight records: {folder}{of_some}"
