"""Decides when a checkpoint is due, from the step, the time and what all ranks have agreed on (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ray_ulysses.trainer.agreement import Flags

Reason = Literal["steps", "minutes", "request", "preemption", "retry", "end", "stop", "resize", "stage", "memory"]
"""Why a checkpoint was saved."""


_ALLOWED_STALL_SHARE = 0.01
_ALLOWED_STALL_S = 0.01
_MOST_APART_S = 5.0
"""A failure that ends by itself, such as an agent that is being started again, is over within seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Triggers:
    """The configured rules.

    Attributes:
        every_steps: Steps between two checkpoints; None for no such rule.
        every_s: Seconds between two checkpoints; None for no such rule.
        at_end: Whether to save at the last step and when the run is stopped.
        ends_stage: Whether another stage of the run follows the last step, which starts from its checkpoint.
    """

    every_steps: int | None
    every_s: float | None
    at_end: bool
    ends_stage: bool = False


def time_is_up(triggers: Triggers, *, last_save: float, now: float) -> bool:
    """Return whether a checkpoint is due by ``checkpoint.every_minutes`` (pure).

    Args:
        triggers: The rules.
        last_save: When the last state was taken, or the attempt began, monotonic seconds.
        now: Now, on the same clock.
    """
    return triggers.every_s is not None and now - last_save >= triggers.every_s


def retry_pause_s(failures: int, max_failed_saves: int) -> float:
    """Return how long to wait after a failed save before the next try, in seconds (pure).

    Args:
        failures: Consecutive saves that have failed, from 1.
        max_failed_saves: As many are repeated immediately.
    """
    return 0.0 if failures <= max_failed_saves else min(2.0 ** min(failures - max_failed_saves - 1, 5), 30.0)


def steps_apart(step_s: float, stall_s: float, failures: int) -> int:
    """Return every how many steps the state is kept in the memory of peers (pure).

    Every step, unless the copy stops training for long: then so rarely that each step pays 10 ms at most, or 1% of its
    time if that is more. A save that failed is tried again after the next step, for an agent that has died is left out
    by then, and after further failures more rarely each time, up to every few seconds. A save that takes longer than a
    step delays the next one by itself.

    Args:
        step_s: Seconds per step.
        stall_s: Seconds for which a copy stops training.
        failures: Consecutive saves that have failed.
    """
    allowed_s = max(_ALLOWED_STALL_S, _ALLOWED_STALL_SHARE * step_s)
    rarest = math.ceil(_MOST_APART_S / step_s) if step_s > _MOST_APART_S / 2**16 else 2**16
    return max(math.ceil(stall_s / allowed_s), min(1 << min(max(failures - 1, 0), 16), rarest))


def due(triggers: Triggers, flags: Flags, *, step: int, taken_step: int, last_step: int) -> Reason | None:
    """Return why a checkpoint is due after a step, or None (pure; equal on every rank).

    Args:
        triggers: The rules.
        flags: What the ranks have agreed on.
        step: Completed steps.
        taken_step: The step whose state was taken last, or that was resumed from.
        last_step: The attempt's last step.
    """
    # A failure counts once every rank's thread has finished: a rank that learns of it later would otherwise repeat a
    # save that the others have already begun.
    failed = flags.failed and not flags.saving and flags.retry_due
    # The first that holds is the one that a person would name.
    rules: tuple[tuple[Reason, bool], ...] = (
        ("preemption", flags.notice_due and not flags.saving),
        ("request", flags.save_requested),
        ("resize", flags.resize),
        ("stop", flags.stop and triggers.at_end),
        ("stage", step >= last_step and triggers.ends_stage),
        ("end", step >= last_step and triggers.at_end),
        ("steps", triggers.every_steps is not None and step % triggers.every_steps == 0),
        ("minutes", flags.time_is_up),
    )
    if step == taken_step:
        return "retry" if failed else None
    found = next((reason for reason, holds in rules if holds), None)
    return found or ("retry" if failed else None)
