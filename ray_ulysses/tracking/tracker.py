"""The seam between a training loop and whatever shows its curves: no method of a tracker may stop or slow a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from ray_ulysses.tracking.commits import CheckpointNews

RunStatus = Literal["finished", "stopped", "failed"]
"""How an attempt ended: every planned step done, stopped on request or at a stop step, or ended by an error."""


class Tracker(Protocol):
    """Receives what one attempt of a run does; called by rank 0 alone, and never raises into training."""

    def start(
        self, params: Mapping[str, object], tags: Mapping[str, object], files: Mapping[str, str] | None = None
    ) -> None:
        """Open the run, or continue it where an earlier attempt left it.

        Args:
            params: Settings that hold for the life of the run, by dotted path.
            tags: What may differ between attempts, such as the world size and the versions of libraries.
            files: Texts that describe the run, by the names under which it shows them.
        """
        ...

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record numbers of a completed optimizer step; a step that the run already has is not recorded again."""
        ...

    def log_checkpoint(self, news: CheckpointNews) -> None:
        """Record that a checkpoint was committed, or is gone, or which ones there are when an attempt starts.

        What is said twice is recorded once. What is said before `start` is kept until then.
        """
        ...

    def finish(self, status: RunStatus, step: int = 0, metrics: Mapping[str, float] | None = None) -> None:
        """Say how the attempt ended, and wait a bounded time for what is still under way.

        Args:
            status: How.
            step: Completed steps.
            metrics: Numbers as of now; they are recorded although the step has some already.
        """
        ...


class NullTracker:
    """A tracker that records nothing, for ``tracking.enabled=false``."""

    def start(
        self, params: Mapping[str, object], tags: Mapping[str, object], files: Mapping[str, str] | None = None
    ) -> None:
        """Record nothing."""

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record nothing."""

    def log_checkpoint(self, news: CheckpointNews) -> None:
        """Record nothing."""

    def finish(self, status: RunStatus, step: int = 0, metrics: Mapping[str, float] | None = None) -> None:
        """Record nothing."""
