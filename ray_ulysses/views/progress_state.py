"""What is known of a run while it goes on: a pure fold over its journal's records."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from ray_ulysses.tracking.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    Evaluated,
    Event,
    RunFinished,
    StepDone,
)

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

    def after(self, event: Event) -> ProgressState:
        """Return the state after an event of the journal; a kind that is not shown changes nothing."""
        match event:
            case AttemptStarted():
                return replace(
                    self,
                    total_steps=self.total_steps if event.last_step is None else event.last_step,
                    attempt=event.attempt,
                    world_size=event.world_size,
                    sp_size=event.sp_size,
                    dp_size=event.dp_size,
                    step=event.resumed_step,
                    recent=(),
                    seconds_per_step=None,
                    tokens_per_s=None,
                    ended=None,
                )
            case StepDone():
                return self._after_step(event)
            case Evaluated():
                return replace(self, evaluation=(event.step, event.loss))
            case CheckpointCommitted():
                return replace(self, checkpoint_step=event.step)
            case AttemptEnded():
                return replace(self, ended=event.reason)
            case RunFinished():
                return replace(self, ended="finished")
        return self

    def _after_step(self, event: StepDone) -> ProgressState:
        recent = (*self.recent, (event.seconds, float(event.tokens)))[-_WINDOW:]
        seconds = sum(second for second, _ in recent)
        return replace(
            self,
            step=event.step,
            loss=event.loss,
            recent=recent,
            seconds_per_step=fmean(second for second, _ in recent),
            tokens_per_s=sum(tokens for _, tokens in recent) / seconds if seconds > 0 else None,
            peak_memory_gib=event.peak_memory_gib,
            mfu=event.mfu,
        )
