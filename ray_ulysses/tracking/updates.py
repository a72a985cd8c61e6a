"""Translates a run's journal events into updates for its trackers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ray_ulysses.storage.place import place_of
from ray_ulysses.tracking.events import (
    STOP_REASONS,
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointEvent,
    CheckpointSetAside,
    CheckpointsFound,
    Evaluated,
    Event,
    RunFailed,
    RunFinished,
    Sampled,
    SourcesMeasured,
    StepDone,
)
from ray_ulysses.tracking.failures import failure_tags
from ray_ulysses.tracking.metric_units import EVAL_LOSS, STEP_METRICS, TOKENS_PER_S, WORLD_SIZE
from ray_ulysses.tracking.run_time import TimeLedger
from ray_ulysses.tracking.steps import Entry, StepGroup

RunStatus = Literal["finished", "stopped", "failed"]
"""Outcome of an attempt: it completed all steps, was stopped on request or at a stop step, or failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptBegan:
    """An attempt started to train."""

    time: float
    params: Mapping[str, object] = field(default_factory=dict)
    """Settings of the run, by dotted path."""
    tags: Mapping[str, object] = field(default_factory=dict)
    """Values that may differ between attempts, such as the world size and library versions."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts that describe the run, by file name."""
    corpora: tuple[str, ...] = ()
    """Paths or URIs of the corpora that the run trains on."""
    validation: tuple[str, ...] = ()
    """Paths or URIs of the corpora that the run is evaluated on."""
    plan_id: str = ""
    """Id of the data plan, a hash of the corpora and of the settings that order their rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """Metrics of a completed optimizer step, without NaN values."""

    time: float
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleText:
    """Samples of a step, as Markdown."""

    time: float
    step: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GoneCheckpoint:
    """A committed checkpoint that must no longer be used."""

    step: int
    attempt: int | None
    """The attempt that wrote the checkpoint; None if unknown."""
    state: Literal["deleted", "damaged", "superseded"]
    """See `mlflow_models.CheckpointState`; also ``superseded`` if an attempt resumed from an earlier step."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptOver:
    """An attempt ended, and its command starts no other attempt except to resize the run or to train the next stage."""

    time: float
    status: RunStatus
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


Update = AttemptBegan | StepMetrics | SampleText | AttemptOver | CheckpointEvent | GoneCheckpoint
"""An update for trackers. In a `CheckpointEvent`, `attempt` is the writing attempt, and `path` the absolute path."""


class Translation:
    """Translates a run's journal events in order. The state depends only on the events so far."""

    def __init__(
        self, *, run_dir: str, location: str, log_every_steps: int = 1, tags: Mapping[str, str] | None = None
    ) -> None:
        """Create a translation that has not seen any event.

        Args:
            run_dir: The run's directory.
            location: Path or URI of the checkpoint store.
            log_every_steps: Interval between logged steps.
            tags: The user's tags.
        """
        self._run_dir, self._location = run_dir, location
        self._every, self._tags = log_every_steps, dict(tags or {})
        self._ledger = TimeLedger()
        # The last reported value of each time category in this attempt.
        self._told_time: dict[str, float] = {}
        # The largest reported steps: a step that is trained again is not reported again.
        self._logged_step = self._evaluated_step = self._sources_step = -1
        self._attempt = self._last_step = 0
        self._world_size = 0
        # The attempt that committed each checkpoint.
        self._committed: dict[int, int] = {}

    def skip(self, entry: Entry) -> None:
        """Update the state for an entry whose updates were delivered before."""
        if isinstance(entry, StepGroup):
            self._ledger.add(entry)
            steps = entry.rows["step"]
            logged = steps[steps % self._every == 0]
            self._logged_step = max(self._logged_step, int(logged.max(initial=-1)))
            self._last_step = int(steps[-1])
        else:
            self.updates(entry)

    def updates(self, event: Event) -> list[Update]:
        """Return the updates for the next event, in order."""
        self._ledger.add(event)
        return list(self._updates(event))

    def _updates(self, event: Event) -> Iterator[Update]:
        match event:
            case StepDone():
                yield from self._step(event)
            case Evaluated():
                if event.step > self._evaluated_step and not math.isnan(event.loss):
                    self._evaluated_step = event.step
                    # MLflow stores a metric in a file of its name, so no name may begin with another and a slash.
                    by_corpus = {f"eval/{one.name}/loss": one.loss for one in event.corpora}
                    metrics = {EVAL_LOSS: event.loss, **by_corpus}
                    accuracies = {"eval/pair_accuracy": event.pair_accuracy, "eval/accuracy": event.accuracy}
                    metrics |= {name: value for name, value in accuracies.items() if value is not None}
                    yield StepMetrics(time=event.time, step=event.step, metrics=metrics)
            case SourcesMeasured():
                if event.step > self._sources_step:
                    self._sources_step = event.step
                    losses = {f"source/{one.name}/loss": one.loss for one in event.corpora if not math.isnan(one.loss)}
                    yield StepMetrics(time=event.time, step=event.step, metrics=losses)
            case Sampled():
                quoted = (f"> {one.prompt}\n\n{one.text}\n" for one in event.samples)
                yield SampleText(time=event.time, step=event.step, text="\n".join(quoted))
            case AttemptStarted():
                yield from self._began(event)
            case CheckpointCommitted():
                yield self._commit(event, event.attempt)
            case CheckpointsFound():
                reason = f"was not among the run's checkpoints when attempt {event.attempt} started"
                yield from self._gone(set(self._committed) - {*event.steps}, "deleted", reason)
                if self._committed.get(event.step) != event.written_by:
                    yield self._commit(event, event.written_by)
            case CheckpointDeleted():
                yield from self._gone({event.step}, "deleted")
            case CheckpointSetAside():
                state: Literal["damaged", "superseded"] = "damaged" if event.kind == "damaged" else "superseded"
                yield from self._gone({event.step}, state, event.reason)
            case RunFinished() | RunFailed() | AttemptEnded() if event.attempt < self._attempt:
                # A late record: another attempt has started, and the run continues.
                pass
            case RunFinished():
                yield self._over(event, "finished", event.step)
            case RunFailed():
                yield replace(self._over(event, "failed", self._last_step), tags=failure_tags(event))
            case AttemptEnded():
                yield from self._ended(event)

    def _began(self, event: AttemptStarted) -> Iterator[Update]:
        self._told_time, self._attempt = {}, event.attempt
        self._world_size, self._last_step = event.world_size, event.resumed_step
        sizes = {name: getattr(event, name) for name in ("world_size", "sp_size", "ring_size", "dp_size")}
        yield AttemptBegan(
            time=event.time,
            params={**event.settings, **sizes},
            tags={
                **self._tags,
                "run_dir": self._run_dir,
                "attempt": event.attempt,
                "plan_id": event.plan_ids[-1],
                "plan_segment": len(event.plan_ids) - 1,
                **sizes,
                **({} if event.stage is None else {"stage": event.stage}),
                **{f"version.{name}": number for name, number in event.versions.items()},
            },
            corpora=_corpora(event.settings),
            validation=tuple(event.settings.get("data.validation") or ()),
            plan_id=event.plan_ids[-1],
        )
        beyond = {step for step in self._committed if step > event.resumed_step}
        yield from self._gone(beyond, "superseded", f"attempt {event.attempt} resumed before it")

    def _step(self, event: StepDone) -> Iterator[Update]:
        self._last_step = event.step
        if event.step % self._every or event.step <= self._logged_step:
            return
        self._logged_step = event.step
        known = {metric: getattr(event, name) for name, metric in STEP_METRICS.items()}
        if event.seconds > 0:
            known[TOKENS_PER_S] = event.tokens / event.seconds
        if self._world_size:
            known[WORLD_SIZE] = float(self._world_size)
        found = {**known, **self._time_news(), **(event.system or {})}
        metrics = {name: value for name, value in found.items() if value is not None and not math.isnan(value)}
        yield StepMetrics(time=event.time, step=event.step, metrics=metrics)

    def _ended(self, event: AttemptEnded) -> Iterator[Update]:
        if event.reason.startswith(STOP_REASONS):
            # After "finished", `run_finished` follows, possibly from a later command.
            if not event.reason.startswith("finished"):
                yield self._over(event, "stopped", self._last_step)
        elif event.restarts is None:
            # Recorded by a rank without a supervisor. With one, the command records whether the run failed.
            yield self._over(event, "failed", self._last_step)

    def _over(self, event: Event, status: RunStatus, step: int) -> AttemptOver:
        return AttemptOver(time=event.time, status=status, step=step, metrics=self._time_news())

    def _time_news(self) -> dict[str, float]:
        """Return the time metrics and the goodput if they changed since the last call."""
        parts = self._ledger.spent().metrics()
        news = {name: value for name, value in parts.items() if value != self._told_time.get(name, 0.0)}
        self._told_time |= news
        return news

    def _commit(self, event: CheckpointEvent, attempt: int) -> CheckpointEvent:
        self._committed[event.step] = attempt
        return replace(event, attempt=attempt, path=str(place_of(self._location) / event.path))

    def _gone(
        self, steps: set[int], state: Literal["deleted", "damaged", "superseded"], reason: str = ""
    ) -> Iterator[Update]:
        for step in sorted(steps):
            # With the attempt, a repeated update cannot apply to a newer checkpoint of the same step.
            yield GoneCheckpoint(step=step, attempt=self._committed.pop(step, None), state=state, reason=reason)


def _corpora(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the corpora of the run and of its stages, each once."""
    data = {name: settings.get(f"data.{name}") for name in ("path", "sources")}
    found = [
        path
        for part in (data, *settings.get("stages", ()))
        for path in (part.get("path"), *(source["path"] for source in part.get("sources") or ()))
        if path
    ]
    return tuple(dict.fromkeys(found))
