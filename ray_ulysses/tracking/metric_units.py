"""The metrics of a run: their names, units and meanings."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricUnit:
    """What a metric, or each metric of a family, is measured in."""

    name: str
    """Its name; ``*`` stands for any part of a name."""
    unit: str
    """Its unit."""
    meaning: str
    """What it says, in words."""

    def is_of(self, name: str) -> bool:
        """Return whether a metric's name is this one or of this family."""
        return re.fullmatch(re.escape(self.name).replace(r"\*", ".+"), name) is not None

    def __str__(self) -> str:
        return f"{self.unit}: {self.meaning}"


METRIC_UNITS: tuple[MetricUnit, ...] = (
    MetricUnit("loss", "nats per token", "mean over the supervised tokens of a step"),
    MetricUnit("eval_loss", "nats per token", "mean over the supervised tokens of the evaluation rows"),
    MetricUnit("z_loss", "nats per token", "the z-loss, as it is added to the loss"),
    MetricUnit("router_loss", "nats per token", "the load-balancing loss of the routers, as it is added to the loss"),
    MetricUnit("grad_norm", "1", "norm of the gradient of all parameters, before clipping"),
    MetricUnit("learning_rate", "1", "of the step"),
    MetricUnit("seconds", "s", "duration of the step, the wait for its rows included"),
    MetricUnit("tokens_per_s", "tokens/s", "supervised tokens of the step per second, of all ranks together"),
    MetricUnit("mfu", "share of 1", "model FLOPs of the step over the peak bf16 FLOPs of all GPUs"),
    MetricUnit("peak_memory_gib", "GiB", "peak of rank 0 so far: allocated on a GPU, resident on a CPU"),
    MetricUnit("world_size", "ranks", "that trained the step"),
    MetricUnit("goodput", "share of 1", "time in steps that count, of the time of all commands (ETTR)"),
    MetricUnit("time_*", "s", "where the time of all commands went so far, by use"),
    MetricUnit("checkpoint_*", "as the metric", "its value when the checkpoint was committed"),
    MetricUnit("system/*_percentage", "percent", "of rank 0's node, when the step ended"),
    MetricUnit("system/*_megabytes", "MB", "of rank 0's node; network: since the attempt started"),
)
"""Every metric that a run records with its trackers. The names are stable."""


def unit_of(name: str) -> MetricUnit | None:
    """Return the unit of a metric; None for one that is not a run's."""
    return next((one for one in METRIC_UNITS if one.is_of(name)), None)
