"""State of a running run as the progress view shows it: a pure fold over the events of its journal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from ray_ulysses.tracking.events import (
    CONTINUED,
    STOP_REASONS,
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    Evaluated,
    Event,
    PhaseStarted,
    RunFinished,
    StartFailed,
    StepDone,
)
from ray_ulysses.tracking.failures import describe_failure

_WINDOW = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressState:
    """A run at one moment.

    Attributes:
        total_steps: Step at which the run stops; None if not known.
        phase: What happens before the next step; None while steps are trained and after the attempt has ended.
        awaits_workers: Whether the workers of the next attempt have not reported yet.
        attempt: The attempt's number; 0 before it has started.
        world_size: Its workers.
        sp_size: Ranks that share a row.
        dp_size: Rows that are trained at the same time.
        step: Completed steps.
        loss: Loss of the last step, in nats.
        learning_rate: Its learning rate.
        grad_norm: Norm of its gradient before clipping.
        tokens_per_s: Supervised tokens per second over the last steps.
        seconds_per_step: Mean over the last steps of this attempt without its first one, which warms up; None before
            the second.
        peak_memory_gib: Largest peak over the ranks, in GiB.
        mfu: Fraction of the peak FLOP/s; None where the peak is not known.
        evaluation: Step and loss of the last evaluation.
        checkpoint_step: Step of the newest committed checkpoint.
        ended: Why the attempt ended, or "finished"; None while it runs.
        has_stepped: Whether this attempt has completed a step.
        recent: Seconds and tokens of this attempt's last steps without its first one.
    """

    total_steps: int | None = None
    phase: str | None = None
    awaits_workers: bool = True
    attempt: int = 0
    world_size: int = 0
    sp_size: int = 0
    dp_size: int = 0
    step: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    seconds_per_step: float | None = None
    peak_memory_gib: float | None = None
    mfu: float | None = None
    evaluation: tuple[int, float] | None = None
    checkpoint_step: int | None = None
    ended: str | None = None
    has_stepped: bool = False
    recent: tuple[tuple[float, float], ...] = ()

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step, at the pace of the last ones."""
        if self.total_steps is None or self.seconds_per_step is None:
            return None
        return max(0, self.total_steps - self.step) * self.seconds_per_step

    def before_attempt(self) -> ProgressState:
        """Return the state before a new attempt: the position is kept, the pace is not."""
        return replace(self._without_pace(), attempt=0, ended=None)

    def awaiting_workers(self, phase: str) -> ProgressState:
        """Return the state while waiting for workers; unchanged if they have already reported."""
        return replace(self, phase=phase) if self.awaits_workers else self

    def _without_pace(self) -> ProgressState:
        """Return the state without the pace of an attempt."""
        return replace(
            self, has_stepped=False, recent=(), seconds_per_step=None, tokens_per_s=None, awaits_workers=True
        )

    def after(self, event: Event) -> ProgressState:
        """Return the state after an event of the journal; unchanged for events that are not shown."""
        match event:
            case PhaseStarted():
                return replace(self, phase=event.phase, awaits_workers=False)
            case AttemptStarted():
                return replace(
                    self._without_pace(),
                    total_steps=event.run_last_step or event.last_step or self.total_steps,
                    attempt=event.attempt,
                    world_size=event.world_size,
                    sp_size=event.sp_size,
                    dp_size=event.dp_size,
                    step=event.resumed_step,
                    ended=None,
                    phase="first step",
                    awaits_workers=False,
                )
            case StepDone():
                return self._after_step(event)
            case Evaluated():
                return replace(self, evaluation=(event.step, event.loss))
            case CheckpointCommitted():
                return replace(self, checkpoint_step=event.step)
            case AttemptEnded() | StartFailed():
                words = event.reason if event.restarts is None else describe_failure(event)
                is_last = event.reason not in CONTINUED and event.reason.startswith(STOP_REASONS)
                awaits = event.restarts is not False and not is_last
                ended = replace(self, ended=words, phase=None, awaits_workers=awaits)
                # Without training there is no pace and no ETA.
                return replace(ended, recent=(), seconds_per_step=None, tokens_per_s=None)
            case RunFinished():
                return replace(self, ended="finished", phase=None)
        return self

    def _after_step(self, event: StepDone) -> ProgressState:
        measured = (event.seconds, float(event.tokens))
        recent = (*self.recent, measured)[-_WINDOW:] if self.has_stepped else ()
        # Before the second step, the first one gives a token rate but no ETA.
        shown = recent or (measured,)
        seconds = sum(second for second, _ in shown)
        return replace(
            self,
            phase=None,
            awaits_workers=False,
            has_stepped=True,
            step=event.step,
            loss=event.loss,
            learning_rate=event.learning_rate,
            grad_norm=event.grad_norm,
            recent=recent,
            seconds_per_step=fmean(second for second, _ in recent) if recent else None,
            tokens_per_s=sum(tokens for _, tokens in shown) / seconds if seconds > 0 else None,
            peak_memory_gib=event.peak_memory_gib,
            mfu=event.mfu,
        )
