"""The interface between training and an experiment tracker, whose methods must never stop or slow a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from ray_ulysses.tracking.checkpoint_updates import CheckpointUpdate

RunStatus = Literal["finished", "stopped", "failed"]
"""The end of an attempt: every planned step done, stopped on request or at a stop step, or ended by an error."""


class Tracker(Protocol):
    """Records one attempt of a run; used by rank 0 only, and never raises into training."""

    def start(
        self, params: Mapping[str, object], tags: Mapping[str, object], files: Mapping[str, str] | None = None
    ) -> None:
        """Open the run, or continue that of an earlier attempt.

        Args:
            params: Settings of the whole run, by dotted path.
            tags: Facts that may differ between attempts, such as the world size and the versions of libraries.
            files: Texts that describe the run, by file name.
        """
        ...

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a completed optimizer step; a step that the run already has is not recorded again."""
        ...

    def log_checkpoint(self, update: CheckpointUpdate) -> None:
        """Record that a checkpoint was committed or is gone, or the inventory at the start of an attempt.

        A repeated update changes nothing. Updates before `start` are kept until then.
        """
        ...

    def finish(self, status: RunStatus, step: int = 0, metrics: Mapping[str, float] | None = None) -> None:
        """Record how the attempt ended, and wait a bounded time for pending deliveries.

        Args:
            status: How it ended.
            step: Completed steps.
            metrics: Current metrics; recorded even though the step has some already.
        """
        ...
