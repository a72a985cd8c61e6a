"""When a checkpoint is due: a pure function of the step, the time, and what all ranks have agreed on."""

from __future__ import annotations

from dataclasses import dataclass
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
class Agreed:
    """What every rank knows after a step, because all were asked in the step's own collective.

    Attributes:
        time_is_up: Rank 0's clock says that `every_s` has passed since the last checkpoint.
        asked: Somebody asked for a checkpoint.
        notice: A node is going to be taken away.
        failed: The save before has failed and is to be repeated.
        stop: The run was asked to stop.
        resize: It was asked to stop because its size is to change.
        all_idle: No rank is saving.
    """

    time_is_up: bool = False
    asked: bool = False
    notice: bool = False
    failed: bool = False
    stop: bool = False
    resize: bool = False
    all_idle: bool = True


def time_is_up(triggers: Triggers, *, last_save: float, now: float) -> bool:
    """Whether the rule of minutes asks for a checkpoint (pure).

    Args:
        triggers: The rules.
        last_save: When the last state was taken, or the attempt began, monotonic seconds.
        now: Now, on the same clock.
    """
    return triggers.every_s is not None and now - last_save >= triggers.every_s


def due(triggers: Triggers, agreed: Agreed, *, step: int, taken_step: int, last_step: int) -> Reason | None:
    """Return why a checkpoint is due after a step, or None (pure; equal on every rank).

    While a node's end is announced, state is taken whenever nothing is being written: what the node's end will cost is
    what was trained since.

    Args:
        triggers: The rules.
        agreed: What all ranks know.
        step: Completed steps.
        taken_step: The step whose state was taken last, or that was resumed from.
        last_step: The run's last.
    """
    # In the order of what a person would call it first.
    rules: tuple[tuple[Reason, bool], ...] = (
        ("preemption", agreed.notice and agreed.all_idle),
        ("request", agreed.asked),
        ("resize", agreed.resize),
        ("stop", agreed.stop and triggers.at_end),
        ("end", step >= last_step and triggers.at_end),
        ("steps", triggers.every_steps is not None and step % triggers.every_steps == 0),
        ("minutes", agreed.time_is_up),
    )
    if step == taken_step:
        return "retry" if agreed.failed else None
    found = next((reason for reason, holds in rules if holds), None)
    return found or ("retry" if agreed.failed else None)
