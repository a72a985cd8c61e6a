"""Ends a run whose loss or gradient is not finite, before a checkpoint of it is committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_ulysses.errors import FinalError

if TYPE_CHECKING:
    from ray_ulysses.trainer.step import StepResult


class BadStepError(FinalError):
    """A step's loss or gradient is not finite. The same rows would give the same again."""


def refuse_bad_step(step: int, rows: range, result: StepResult) -> None:
    """End the attempt if a step's loss or gradient is not finite; every rank must call, and raises the same.

    Args:
        step: The step.
        rows: Its global rows.
        result: Its result, on which all ranks have agreed.

    Raises:
        BadStepError: They are not.
    """
    if result.is_finite:
        return
    bad = result.bad_rows
    if not bad:
        what = f"the gradient of rows {rows.start} to {rows.stop - 1} is not finite (their loss is {result.loss:.4f})"
        row = rows.start
    else:
        listed = f"row {bad[0]}" if len(bad) == 1 else f"{len(bad)} rows, the first of them row {bad[0]},"
        what = f"the loss of {listed} of {rows.start} to {rows.stop - 1} is not finite"
        row = bad[0]
    raise BadStepError(
        f"step {step}: {what}. The weights were not updated and nothing of the step is saved; a restart would meet the "
        f"same. Look at its documents (`ray-ulysses inspect RUN --row {row}`), or lower optimizer.lr or raise "
        "schedule.warmup_steps in a new run (model.resume_from starts it from a checkpoint of this one)"
    )
