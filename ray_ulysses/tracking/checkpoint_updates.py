"""The updates about checkpoints that a tracker receives, and which of them it marks (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MARKS = ("latest", "best")
"""What names one checkpoint of a run at a time, and moves to another as the run goes on."""
BEST_BY = ("eval_loss", "loss")
"""The metrics that tell the best checkpoint; of a run that was never evaluated, the second."""

CheckpointState = Literal["committed", "superseded", "deleted", "damaged"]
"""A ``superseded`` checkpoint was committed again by a later attempt, retention removed a ``deleted`` one, and a
``damaged`` one was set aside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GoneCheckpoint:
    """A committed checkpoint that must not be used any more."""

    step: int
    attempt: int | None
    """The attempt that wrote it; None if unknown."""
    state: Literal["deleted", "damaged", "superseded"]
    """``superseded`` because an attempt resumed before it, or as in `CheckpointState`."""
    reason: str = ""
    """The reason, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedCheckpoint:
    """A checkpoint as recorded by the tracker; `store` and `step` suffice to load it."""

    model_id: str
    """The tracker's id of the checkpoint."""
    is_complete: bool
    """Whether everything about it was recorded."""
    step: int
    attempt: int
    state: CheckpointState
    path: str
    """Its folder, a path or a URI."""
    store: str
    """Root of its store, a path or a URI."""
    cursor: Mapping[str, Any]
    """Position in the data."""
    metrics: Mapping[str, float]
    stage: str = ""
    measured: str = ""
    """Identity of what its metrics were measured on."""
    marks: tuple[str, ...] = ()
    """Those of `MARKS` that it carries."""

    def is_of(self, step: int, attempt: int | None) -> bool:
        """Return whether it is this step of this attempt; None matches any attempt."""
        return self.step == step and attempt in (None, self.attempt)


def usable(tracked: Iterable[TrackedCheckpoint]) -> list[TrackedCheckpoint]:
    """Return the checkpoints that can be loaded, the latest last (pure)."""
    live = (one for one in tracked if one.is_complete and one.state == "committed")
    return sorted(live, key=lambda one: (one.attempt, one.step))


def best_of(live: Sequence[TrackedCheckpoint]) -> TrackedCheckpoint | None:
    """Return the checkpoint of the newest stage and data with the lowest finite loss, the newest of several (pure).

    Args:
        live: Checkpoints as `usable` returns them.
    """
    compared = [one for one in live if (one.stage, one.measured) == (live[-1].stage, live[-1].measured)]
    for name in BEST_BY:
        rated = [one for one in compared if math.isfinite(one.metrics.get(name, math.nan))]
        if rated:
            # Training losses and evaluation losses are not compared: a checkpoint without an evaluation is left out.
            return min(reversed(rated), key=lambda one: one.metrics[name])
    return None


def mark_moves(tracked: Iterable[TrackedCheckpoint]) -> tuple[tuple[str, str | None, tuple[str, ...]], ...]:
    """Return how marks must move, as (mark, model to set it on, models to take it from); nothing for one that holds.

    A mark is set on its new checkpoint before it is taken from the others, so that a reader finds one at any time.
    """
    tracked = tuple(tracked)
    live = usable(tracked)
    holders = {"latest": live[-1] if live else None, "best": best_of(live)}
    moves = []
    for mark in MARKS:
        holder = holders[mark]
        new = None if holder is None or mark in holder.marks else holder.model_id
        old = tuple(one.model_id for one in tracked if mark in one.marks and one is not holder)
        if new is not None or old:
            moves.append((mark, new, old))
    return tuple(moves)
