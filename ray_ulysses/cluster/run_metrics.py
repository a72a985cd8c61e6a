"""Exports a run's progress as Ray metrics, which Ray's dashboard and Prometheus show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from ray.util.metrics import Gauge

from ray_ulysses.config import Config
from ray_ulysses.logging import get_logger
from ray_ulysses.run.checkpoint_store import checkpoint_location
from ray_ulysses.storage.background import BackgroundCalls
from ray_ulysses.tracking.metric_units import STEP_METRICS, TOKENS_PER_S
from ray_ulysses.tracking.tail import JournalSource
from ray_ulysses.tracking.updates import StepMetrics, Translation

_log = get_logger(__name__)
_READ_EVERY_S = 1.0
_EXPORTED = {
    "step": "Number of completed optimizer steps.",
    STEP_METRICS["loss"]: "Mean loss over the last step's supervised tokens, in nats.",
    TOKENS_PER_S: "Supervised tokens per second in the last step.",
    "time/goodput": "Fraction of the run's time that was spent in steps that count.",
}
"""Descriptions of the exported metrics. A gauge has the metric's name without its group."""


class RunMetrics:
    """Context manager that follows a run's journal in a thread, for `export` to set the gauges ``ray_ulysses_*``.

    Only the caller's thread uses Ray, because a call in another thread would crash when the connection is shut down.
    """

    def __init__(self, config: Config, make_gauge: Callable[[str, str, tuple[str, ...]], Any] = Gauge) -> None:
        """Create the gauges, which have the tag ``run``. The process must be connected to Ray."""
        self._config, self._tags = config, {"run": config.run.name}
        # Ray adds the prefix `ray_` to the names of all metrics.
        self._gauges = {
            name: make_gauge(f"ulysses_{name.rpartition('/')[2]}", text, ("run",)) for name, text in _EXPORTED.items()
        }
        self._newest: Mapping[str, float] = {}
        self._exported: Mapping[str, float] = {}
        self._source = self._open()

    def __enter__(self) -> Self:
        self._calls = BackgroundCalls("metrics", tick=self.read, every_s=_READ_EVERY_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close()

    def read(self) -> None:
        """Read the journal's new records."""
        try:
            for update, _end in self._source.read():
                if isinstance(update, StepMetrics):
                    self._newest = {**self._newest, "step": update.step, **update.metrics}
        except OSError as error:
            # A source can't be used after an error.
            _log.debug("the journal can't be read for Ray's metrics: %s", error)
            self._source = self._open()

    def export(self) -> None:
        """Set the gauges whose values have changed."""
        newest = self._newest
        for name, gauge in self._gauges.items():
            if name in newest and newest[name] != self._exported.get(name):
                gauge.set(newest[name], self._tags)
        self._exported = newest

    def _open(self) -> JournalSource:
        config = self._config
        return JournalSource(
            config.run_dir, {}, Translation(run_dir=str(config.run_dir), location=checkpoint_location(config))
        )
