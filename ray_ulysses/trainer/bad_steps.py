"""Ends an attempt whose loss or gradient is not finite, or whose loss spikes, before anything of the step is saved."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

from ray_ulysses.elastic.spikes import WINDOW_STEPS, spike_bound
from ray_ulysses.errors import FinalError, RunError

if TYPE_CHECKING:
    from ray_ulysses.config.running import ElasticSection
    from ray_ulysses.trainer.record import Recorder
    from ray_ulysses.trainer.step import StepResult


class BadStepError(FinalError):
    """A step can't be kept, and the same rows would give the same again."""


class StepGuard:
    """Judges each step; every rank has one and judges alike, since all ranks have agreed on the result.

    Args:
        elastic: The run's settings.
        recorder: Records a bad step, from which the command reads which rows to leave out.
    """

    def __init__(self, elastic: ElasticSection, recorder: Recorder) -> None:
        self._elastic, self._recorder = elastic, recorder
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)

    def judge(self, step: int, rows: range, plan_id: str, result: StepResult) -> None:
        """End the attempt if a step is bad; every rank must call, after every step.

        Args:
            step: The step.
            rows: Its global rows.
            plan_id: The plan that they are of.
            result: Its result.

        Raises:
            BadStepError: It is.
        """
        mads = self._elastic.loss_spike_mads
        bound = None if mads is None else spike_bound(tuple(self._losses), mads)
        if not result.is_finite:
            reason = not_finite(step, rows, result)
        elif bound is not None and result.loss > bound:
            reason = (
                f"step {step}: the loss of rows {rows.start} to {rows.stop - 1} is {result.loss:.4f}, above "
                f"{bound:.4f} (elastic.loss_spike_mads={mads:g} of the last {len(self._losses)} steps)"
            )
        else:
            self._losses.append(result.loss)
            return
        # Without this record the run can only stop.
        with contextlib.suppress(RunError):
            self._recorder.bad_step(step, rows, plan_id, reason)
        raise BadStepError(f"{reason}. Nothing of the step is saved; {self._way_out(rows, result)}")

    def _way_out(self, rows: range, result: StepResult) -> str:
        if self._elastic.bad_steps == "skip":
            return "its rows are left out from now on (elastic.bad_steps=skip) where that is possible"
        row = result.bad_rows[0] if result.bad_rows else rows.start
        return (
            f"a restart would meet the same. Look at its documents (`ray-ulysses inspect RUN --row {row}`), leave its "
            "rows out (elastic.bad_steps: skip), or lower optimizer.lr or raise schedule.warmup_steps in a new run"
        )


def not_finite(step: int, rows: range, result: StepResult) -> str:
    """Return what is not finite in a step (pure)."""
    bad = result.bad_rows
    if not bad:
        return (
            f"step {step}: the gradient of rows {rows.start} to {rows.stop - 1} is not finite (their loss is "
            f"{result.loss:.4f})"
        )
    listed = f"row {bad[0]}" if len(bad) == 1 else f"{len(bad)} rows, the first of them row {bad[0]},"
    return f"step {step}: the loss of {listed} of {rows.start} to {rows.stop - 1} is not finite"
