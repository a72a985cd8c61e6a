"""Writes the journal of a run with a fault, a resume on fewer ranks and a loss spike."""

from __future__ import annotations

from pathlib import Path

from ray_ulysses.tracking.journal_lines import encode_event, with_checksum
from tests.unit.tracking import journals

REPLAYED = 3
"""Steps that the second attempt trains again."""
SPIKE = 99.5
"""The loss of one step."""


def write_run(run_dir: Path, num_steps: int, *, added_losses: bool = True) -> Path:
    """Write a run of ``num_steps`` steps, one of which has a loss spike, and return its directory.

    Without ``added_losses`` it has neither a z-loss nor a router loss.
    """
    (run_dir / "journal").mkdir(parents=True)
    half = num_steps // 2
    for attempt, ranks, first, last in ((1, 4, 1, half + REPLAYED), (2, 2, half + 1, num_steps)):
        begin = 1.7e9 + 2.0 * first + 600.0 * attempt
        started = journals.started(
            first - 1, time=begin, attempt=attempt, session=f"s{attempt}", command_started=begin - 30.0,
            world_size=ranks, dp_size=ranks // 2, last_step=num_steps, versions={"torch": "2.13.0"},
        )  # fmt: skip
        with (run_dir / f"journal/attempt-{attempt:04}.jsonl").open("wb") as file:
            file.write(with_checksum(encode_event(started)) + b"\n")
            for step in range(first, last + 1):
                loss, time = loss_of(step, attempt, num_steps), begin + 2.0 * (step - first + 1)
                added = f'"z_loss": {round(0.01 / step, 9)}, "router_loss": {round(0.02 + loss / 100, 9)}, '
                text = (
                    f'{{"event": "step", "time": {time}, "attempt": {attempt}, "step": {step}, "loss": {loss}, '
                    f'"tokens": 4096, "rows": [{2 * step - 2}, {2 * step}], "digest": "{step:016x}", "seconds": 1.5, '
                    f'{added if added_losses else ""}"learning_rate": 0.001, "grad_norm": {1 + step % 7}, "mfu": 0.5, '
                    '"peak_memory_gib": 12.5}'
                )
                file.write(with_checksum(text.encode()) + b"\n")
    return run_dir


def loss_of(step: int, attempt: int, num_steps: int) -> float:
    """Return the loss that `write_run` gives a step."""
    return SPIKE if (step, attempt) == (num_steps * 2 // 3, 2) else round(2 + 3 / (1 + step / 1000) + attempt / 8, 6)
