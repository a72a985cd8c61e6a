"""When a checkpoint is due: a pure function of the step, the time, and what all ranks have agreed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Literal

Reason = Literal["steps", "minutes", "request", "preemption", "retry", "end", "stop", "resize"]
"""What made a checkpoint be saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Triggers:
    """What the configuration asks for.

    Attributes:
        every_steps: Steps between two checkpoints; None for no such rule.
        every_s: Seconds between two checkpoints; None for no such rule.
        at_end: Whether to save at the last step and when asked to stop.
    """

    every_steps: int | None
    every_s: float | None
    at_end: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """What one rank has to say after a step; each becomes true for all when one rank says so.

    Ranks add them up in the collective that a step ends with anyway.

    Attributes:
        time_is_up: Rank 0: the rule of minutes asks for a checkpoint.
        save_requested: Rank 0: somebody asked for a checkpoint.
        notice: A node is going to be taken away.
        notice_asks: A checkpoint is due for that reason; see `checkpoint.notice`.
        failed: The save before has failed.
        retry_asks: Rank 0: it is time to try again.
        stop: Rank 0: the run was asked to stop.
        resize: Rank 0: it is to stop because its size is to change.
        saving: A checkpoint is being written.
        gone: Rank 0: the run's directory is not there any more.
        ended: The save before has failed in a way that ends the attempt.
    """

    time_is_up: bool = False
    save_requested: bool = False
    notice: bool = False
    notice_asks: bool = False
    failed: bool = False
    retry_asks: bool = False
    stop: bool = False
    resize: bool = False
    saving: bool = False
    gone: bool = False
    ended: bool = False

    def to_counts(self) -> list[int]:
        """Return the flags as numbers that are added up over the ranks."""
        return [int(flag) for flag in astuple(self)]

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Flags:
        """Return what at least one rank has said, from the sums over all of them."""
        return cls(**{field.name: count > 0 for field, count in zip(fields(cls), counts, strict=True)})


NUM_FLAGS = len(fields(Flags))


def time_is_up(triggers: Triggers, *, last_save: float, now: float) -> bool:
    """Whether the rule of minutes asks for a checkpoint (pure).

    Args:
        triggers: The rules.
        last_save: When the last state was taken, or the attempt began, monotonic seconds.
        now: Now, on the same clock.
    """
    return triggers.every_s is not None and now - last_save >= triggers.every_s


def retry_pause_s(failures: int, max_failed_saves: int) -> float:
    """Return how long to wait after a failed save before the next try, in seconds (pure).

    Args:
        failures: Saves in a row that have failed, from 1.
        max_failed_saves: So many are repeated at once.
    """
    return 0.0 if failures <= max_failed_saves else min(2.0 ** min(failures - max_failed_saves - 1, 5), 30.0)


def due(triggers: Triggers, flags: Flags, *, step: int, taken_step: int, last_step: int) -> Reason | None:
    """Return why a checkpoint is due after a step, or None (pure; equal on every rank).

    Args:
        triggers: The rules.
        flags: What at least one rank has said.
        step: Completed steps.
        taken_step: The step whose state was taken last, or that was resumed from.
        last_step: The run's last.
    """
    # A failure counts once every rank's thread has come to its end: a rank that hears of it later would otherwise
    # repeat a save that the others have begun already.
    failed = flags.failed and not flags.saving and flags.retry_asks
    # In the order of what a person would call it first.
    rules: tuple[tuple[Reason, bool], ...] = (
        ("preemption", flags.notice_asks and not flags.saving),
        ("request", flags.save_requested),
        ("resize", flags.resize),
        ("stop", flags.stop and triggers.at_end),
        ("end", step >= last_step and triggers.at_end),
        ("steps", triggers.every_steps is not None and step % triggers.every_steps == 0),
        ("minutes", flags.time_is_up),
    )
    if step == taken_step:
        return "retry" if failed else None
    found = next((reason for reason, holds in rules if holds), None)
    return found or ("retry" if failed else None)
