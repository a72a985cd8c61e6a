"""Decides whether a preemption notice makes a checkpoint due after a step."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_PAUSE_S = 10.0
"""Minimum time between saves for the same notice, in seconds. Without this minimum, a small model would be saved after
every step, and ``checkpoint.keep_last`` would delete its older checkpoints."""
_CAUTION = 1.5
"""Time reserved for the last save before the deadline, as a multiple of the previous save's duration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """An announcement that a node will be preempted."""

    deadline: float | None = None
    """Time of the preemption, in seconds since the Unix epoch, or None if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoticedSave:
    """The latest save that a preemption notice triggered."""

    step: int
    taken_at: float
    """Monotonic time at which the state was copied, in seconds."""
    took_s: float | None = None
    """Seconds from `taken_at` to the commit, or None until the checkpoint is committed."""


def notice_asks(last: NoticedSave | None, *, left_s: float | None, now: float, step_s: float) -> bool:
    """Return whether a pending preemption notice makes a checkpoint due after this step.

    The first checkpoint is due immediately. Another checkpoint is due once the time since the last commit reaches the
    duration of the last save and is at least `LEAST_PAUSE_S`. A final checkpoint is due if a save after the next step
    might miss the deadline.

    Args:
        last: Latest save for this notice or an earlier notice, ignoring failed saves, or None.
        left_s: Seconds until the deadline, or None if the deadline is unknown.
        now: Current monotonic time, in seconds.
        step_s: Expected maximum duration of a step, in seconds.
    """
    if last is None:
        return True
    if last.took_s is None:
        return False
    if now - last.taken_at - last.took_s >= max(last.took_s, LEAST_PAUSE_S):
        return True
    if left_s is None or left_s < last.took_s:
        return False
    # A save after the next step would miss the deadline.
    last_chance_s = _CAUTION * last.took_s + step_s
    return left_s <= last_chance_s and last.taken_at < now + left_s - last_chance_s
