"""Detects hangs from the ranks' progress, and identifies the ranks that the others wait for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Phase = Literal["start", "step", "evaluation", "save"]
"""Activity of a rank: start-up until its first step, a step, an evaluation, or waiting for a checkpoint."""

RECENT_STEPS = 200
_TIMES_P99 = 5.0
_PERCENTILE = 0.99
_ORDER: tuple[Phase, ...] = ("step", "evaluation", "save")
_STOPPED = "T"
"""State of a process that a signal stopped; a process stopped by a debugger has a lower-case letter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgress:
    """Progress of one rank."""

    rank: int
    phase: Phase
    step: int
    """Step that the rank is training, or after which it is evaluating or saving; 0 during start-up."""
    micro_batch: int
    """Number of micro-batches done in this phase."""
    idle_s: float
    """Seconds since the phase, step or micro-batch last changed."""
    state: str = "R"
    """State of the rank's process from ``/proc/PID/stat``, or empty before the process has started."""
    waits_for_row: bool = False
    steps: int = 0
    """Number of steps done in this attempt."""
    step_s: float = 0.0
    """Duration of the last step done, without evaluation and save, in seconds."""

    @property
    def position(self) -> tuple[bool, int, int, int]:
        """Position in the sequence of work, which is the same on every rank."""
        if self.phase == "start":
            return False, 0, 0, 0
        return True, self.step, _ORDER.index(self.phase), self.micro_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class HangLimits:
    """Longest tolerated times without progress, in seconds."""

    floor_s: float
    """Lower bound of the limit within a step: a short step may be followed by a long one."""
    start_s: float
    """Limit that applies until an attempt's first step has ended."""
    evaluation_s: float
    save_s: float
    row_s: float
    stopped_s: float = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A detected hang: ranks make no progress for too long."""

    ranks: tuple[int, ...]
    """Ranks that the others wait for, or all ranks if none is behind."""
    why: Literal["stopped", "behind", "together"]
    where: RankProgress
    """Progress of one rank in `ranks`."""
    bound_s: float
    """Longest tolerated time without progress in the phase of `where`, in seconds."""

    def __str__(self) -> str:
        one = self.where
        place = "the start-up" if one.phase == "start" else f"{_PLACES[one.phase]}{one.step}"
        if one.phase == "step":
            place += f" (micro-batches done: {one.micro_batch}{', its row has not arrived' * one.waits_for_row})"
        many = len(self.ranks) > 1
        who = f"{'ranks' if many else 'rank'} {_listed(self.ranks)} {'have' if many else 'has'} not"
        who, why = {
            "stopped": (who, ": stopped by a signal"),
            "behind": (who, ", and the others wait"),
            "together": ("no rank has", ""),
        }[self.why]
        return f"{who} moved for {one.idle_s:.0f} s in {place}{why}; {self.bound_s:.0f} s are allowed"


_PLACES: dict[Phase, str] = {"step": "step ", "evaluation": "the evaluation after step ", "save": "the save of step "}
_MOST_LISTED = 8


def step_bound_s(step_seconds: Sequence[float], limits: HangLimits) -> float:
    """Return the longest tolerated time without progress in a step: 5 times the 99th percentile of recent steps.

    ``step_seconds`` contains the durations of this attempt's steps, without evaluations and saves, newest last.
    """
    recent = sorted(step_seconds[-RECENT_STEPS:])
    if not recent:
        return limits.start_s
    # Nearest-rank percentile: with fewer than 100 steps, this is the longest step.
    percentile = recent[math.ceil(_PERCENTILE * len(recent)) - 1]
    return max(limits.floor_s, _TIMES_P99 * percentile)


def find_hang(ranks: Sequence[RankProgress], step_seconds: Sequence[float], limits: HangLimits) -> Hang | None:
    """Return the hang, or None if the ranks make progress.

    Ranks wait for one another in every step, so only the ranks furthest behind can be the cause, and only the limit of
    their phase applies: the others may wait in a step for a rank that still evaluates.
    """
    stopped = [one for one in ranks if one.state == _STOPPED and one.idle_s > limits.stopped_s]
    if stopped:
        return _hang(stopped, "stopped", limits.stopped_s)
    least = min((one.position for one in ranks), default=None)
    behind = [one for one in ranks if one.position == least]
    if not behind:
        return None
    bounds: dict[Phase, float] = {
        "start": limits.start_s,
        "step": step_bound_s(step_seconds, limits),
        "evaluation": limits.evaluation_s,
        "save": limits.save_s,
    }
    bound_s = bounds[behind[0].phase]
    if any(one.waits_for_row for one in behind):
        bound_s = max(bound_s, limits.row_s)
    # A rank among these that has just advanced may be about to let the others continue.
    if min(one.idle_s for one in behind) <= bound_s:
        return None
    return _hang(behind, "behind" if len(behind) < len(ranks) else "together", bound_s)


def _hang(found: Sequence[RankProgress], why: Literal["stopped", "behind", "together"], bound_s: float) -> Hang:
    where = min(found, key=lambda one: (one.idle_s, one.rank))
    return Hang(ranks=tuple(sorted(one.rank for one in found)), why=why, where=where, bound_s=bound_s)


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_LISTED]))
    return shown if len(ranks) <= _MOST_LISTED else f"{shown} and {len(ranks) - _MOST_LISTED} more"
