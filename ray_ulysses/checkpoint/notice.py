"""Decides when the announced end of a node makes a checkpoint due, from time, deadline and the last such save."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_PAUSE_S = 10.0
"""Shortest time between two saves for one notice: a small model, whose save takes a moment, would otherwise be saved
after every step, which pushes its older checkpoints out of ``checkpoint.keep_last``."""
_CAUTION = 1.5
"""The last save before a deadline is given this multiple of the time that the one before it took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """An announcement that a node is going to be taken away."""

    deadline: float | None = None
    """When, in seconds since the epoch; None if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoticedSave:
    """The newest state that was taken while a notice stood."""

    step: int
    taken_at: float
    """When it was taken, monotonic seconds."""
    took_s: float | None = None
    """Seconds from then to its commit; None as long as it is not committed."""


def notice_asks(last: NoticedSave | None, *, left_s: float | None, now: float, step_s: float) -> bool:
    """Return whether a pending notice asks for a checkpoint after this step (pure).

    The first one is due at once. The next is due when as many seconds have gone by since its commit as it took
    (`LEAST_PAUSE_S` at least), or after the last step whose state can still be committed before the deadline.

    Args:
        last: The newest state that was taken for this notice or one before it, without those whose save failed.
        left_s: Seconds until the deadline; None if there is none.
        now: Now, on the clock of `NoticedSave.taken_at`.
        step_s: The longest that a step may be expected to take, in seconds.
    """
    if last is None:
        return True
    if last.took_s is None:
        return False
    if now - last.taken_at - last.took_s >= max(last.took_s, LEAST_PAUSE_S):
        return True
    if left_s is None or left_s < last.took_s:
        return False
    # After the next step it would be too late.
    last_chance_s = _CAUTION * last.took_s + step_s
    return left_s <= last_chance_s and last.taken_at < now + left_s - last_chance_s
