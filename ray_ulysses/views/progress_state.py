"""What is known of a run while it goes on: a pure fold over its journal's records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

_WINDOW = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressState:
    """A run at one moment.

    Attributes:
        total_steps: Step at which the run stops; None if not known.
        attempt: The attempt's number; 0 while one is awaited.
        world_size: Its workers.
        sp_size: Ranks that share a row.
        dp_size: Rows that are worked on at once.
        step: Completed steps.
        loss: Loss of the last step, in nats.
        tokens_per_s: Supervised tokens a second of the last steps.
        seconds_per_step: Mean over the last steps of this attempt.
        peak_memory_gib: Largest peak over the ranks, in GiB.
        mfu: Share of the peak FLOP/s; None where that is not known.
        evaluation: Step and loss of the last evaluation.
        checkpoint_step: Step of the newest committed checkpoint.
        ended: Why the attempt ended, or "finished"; None while it runs.
        recent: Seconds and tokens of this attempt's last steps.
    """

    total_steps: int | None = None
    attempt: int = 0
    world_size: int = 0
    sp_size: int = 0
    dp_size: int = 0
    step: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    seconds_per_step: float | None = None
    peak_memory_gib: float | None = None
    mfu: float | None = None
    evaluation: tuple[int, float] | None = None
    checkpoint_step: int | None = None
    ended: str | None = None
    recent: tuple[tuple[float, float], ...] = ()

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step, at the pace of the last ones."""
        if self.total_steps is None or self.seconds_per_step is None:
            return None
        return max(0, self.total_steps - self.step) * self.seconds_per_step

    def before_attempt(self) -> ProgressState:
        """Return the state while a new attempt is awaited: what was reached stays, how it went does not."""
        return replace(self, attempt=0, ended=None, seconds_per_step=None, tokens_per_s=None, recent=())

    def after(self, record: Mapping[str, Any]) -> ProgressState:
        """Return the state after a record of the journal; a kind that is not shown changes nothing."""
        kind = record["event"]
        if kind == "attempt_started":
            return replace(
                self,
                total_steps=record.get("last_step", self.total_steps),
                attempt=int(record.get("attempt", self.attempt + 1)),
                world_size=int(record["world_size"]),
                sp_size=int(record["sp_size"]),
                dp_size=int(record["dp_size"]),
                step=int(record["resumed_step"] or 0),
                recent=(),
                seconds_per_step=None,
                tokens_per_s=None,
                ended=None,
            )
        if kind == "step":
            return self._after_step(record)
        if kind == "evaluation":
            return replace(self, evaluation=(int(record["step"]), float(record["loss"])))
        if kind == "checkpoint_committed":
            return replace(self, checkpoint_step=int(record["step"]))
        if kind == "attempt_ended":
            return replace(self, ended=str(record["reason"]))
        if kind == "run_finished":
            return replace(self, ended="finished")
        return self

    def _after_step(self, record: Mapping[str, Any]) -> ProgressState:
        recent = (*self.recent, (float(record["seconds"]), float(record["tokens"])))[-_WINDOW:]
        seconds = sum(second for second, _ in recent)
        return replace(
            self,
            step=int(record["step"]),
            loss=float(record["loss"]),
            recent=recent,
            seconds_per_step=fmean(second for second, _ in recent),
            tokens_per_s=sum(tokens for _, tokens in recent) / seconds if seconds > 0 else None,
            peak_memory_gib=_number(record.get("peak_memory_gib")),
            mfu=_number(record.get("mfu")),
        )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
