"""Histories made by hand, and a clock that is moved by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray_ulysses.tracking.events import StepDone
from ray_ulysses.tracking.history import AttemptRecord, CheckpointRecord, RunHistory
from ray_ulysses.tracking.run_time import TimeSpent
from ray_ulysses.tracking.steps import Steps, step_rows


@dataclass
class HandClock:
    """A clock that the test moves."""

    at: float = 0.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at


def make_step(n: int, loss: float | None = None) -> StepDone:
    return StepDone(
        time=2.0 * n, attempt=1 if n <= 5 else 2, step=n, loss=5 - n / 10 if loss is None else loss, tokens=1000,
        rows=(4 * (n - 1), 4 * n), digest=n, seconds=2.0,
    )  # fmt: skip


def make_history(num_steps: int = 12, **changes: Any) -> RunHistory:
    steps = [make_step(n) for n in range(1, num_steps + 1)]
    attempts = (
        AttemptRecord(
            attempt=1, world_size=4, sp_size=2, dp_size=2, first_step=1, last_step=7, reason=None,
            seconds_to_first_step=12.5,
        ),
        AttemptRecord(
            attempt=2, world_size=2, sp_size=2, dp_size=1, resumed_from="peer memory, step 5", first_step=6,
            last_step=num_steps, reason="finished", seconds_to_first_step=75.0,
        ),
    )  # fmt: skip
    checkpoints = tuple(
        CheckpointRecord(step=step, path=f"checkpoints/step-{step:08d}", committed=size is not None, world_size=size)
        for step, size in ((5, 4), (10, 2), (12, None))
    )
    spent = TimeSpent(steps_s=26.0, lost_steps_s=1.0, startup_s=3.0, saves_s=2.0, between_commands_s=7500.0)
    fields: dict[str, Any] = {
        "name": "demo", "status": "finished", "step": num_steps, "tokens": 1000 * num_steps,
        "steps": Steps(step_rows(steps)), "attempts": attempts, "checkpoints": checkpoints, "lost_steps": 2,
        "rows_consumed": 4 * num_steps, "data_digest": "00000000deadbeef", "goodput": 0.8125, "time_spent": spent,
    }  # fmt: skip
    return RunHistory(**{**fields, **changes})
