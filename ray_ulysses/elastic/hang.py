"""Decides from the ranks' progress whether a run hangs, and names the ranks that the others wait for (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Phase = Literal["start", "step", "evaluation", "save"]
"""What a rank does: everything up to its first step, a step, an evaluation, or a wait for a checkpoint."""

RECENT_STEPS = 200
_TIMES_P99 = 5.0
_PERCENTILE = 0.99
_ORDER: tuple[Phase, ...] = ("step", "evaluation", "save")
_STOPPED = "T"
"""State of a process that was stopped by a signal; one that a debugger holds has a small letter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgress:
    """The progress of one rank."""

    rank: int
    phase: Phase
    step: int
    """The step that it trains, or after which it evaluates or saves; 0 at the start."""
    micro_batch: int
    """Micro-batches of the phase that it has done."""
    idle_s: float
    """Seconds since one of the above changed."""
    state: str = "R"
    """State of its process, as ``/proc/PID/stat`` gives it; empty before it has been started."""
    waits_for_row: bool = False
    steps: int = 0
    """Steps that it has done in this attempt."""
    step_s: float = 0.0
    """Seconds that the last of them took, without evaluation and save."""

    @property
    def position(self) -> tuple[bool, int, int, int]:
        """Its place in the order of work, which is the same on every rank."""
        if self.phase == "start":
            return False, 0, 0, 0
        return True, self.step, _ORDER.index(self.phase), self.micro_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class HangLimits:
    """How long a rank may go without progress, in seconds."""

    floor_s: float
    """In a step, at least: a short step may be followed by a long one."""
    start_s: float
    """Before the first step has ended."""
    evaluation_s: float
    save_s: float
    row_s: float
    stopped_s: float = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A run that hangs."""

    ranks: tuple[int, ...]
    """The ranks that the others wait for; all ranks where none is behind."""
    why: Literal["stopped", "behind", "together"]
    where: RankProgress
    """The progress of one of them."""
    bound_s: float
    """The longest time without progress that is tolerated there."""

    def __str__(self) -> str:
        one = self.where
        place = "the start-up" if one.phase == "start" else f"{_PLACES[one.phase]}{one.step}"
        if one.phase == "step":
            place += f" (micro-batches done: {one.micro_batch}{', its row has not come' * one.waits_for_row})"
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
    """Return how long a rank may go without progress in a step: 5 times the 99th percentile of the recent ones.

    Args:
        step_seconds: Durations of this attempt's steps so far, without evaluations and saves, the newest last.
        limits: The limits.
    """
    recent = sorted(step_seconds[-RECENT_STEPS:])
    if not recent:
        return limits.start_s
    # The nearest rank: of fewer than 100 steps the longest.
    percentile = recent[math.ceil(_PERCENTILE * len(recent)) - 1]
    return max(limits.floor_s, _TIMES_P99 * percentile)


def find_hang(ranks: Sequence[RankProgress], step_seconds: Sequence[float], limits: HangLimits) -> Hang | None:
    """Return whether a run hangs, and on which ranks.

    Ranks wait for one another in every step. Only those that are furthest behind can therefore be the cause, and only
    the bound of the phase that they are in counts: the others may wait in a step for a rank that still evaluates.
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
    # One of them that has just moved may be about to let the others go on.
    if min(one.idle_s for one in behind) <= bound_s:
        return None
    return _hang(behind, "behind" if len(behind) < len(ranks) else "together", bound_s)


def _hang(found: Sequence[RankProgress], why: Literal["stopped", "behind", "together"], bound_s: float) -> Hang:
    where = min(found, key=lambda one: (one.idle_s, one.rank))
    return Hang(ranks=tuple(sorted(one.rank for one in found)), why=why, where=where, bound_s=bound_s)


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_LISTED]))
    return shown if len(ranks) <= _MOST_LISTED else f"{shown} and {len(ranks) - _MOST_LISTED} more"
