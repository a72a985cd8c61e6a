"""Names, units and meanings of a run's metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricUnit:
    """Unit of a metric or of a family of metrics."""

    name: str
    """Name of the metric, or a pattern in which ``*`` matches one or more characters."""
    unit: str
    meaning: str

    def is_of(self, name: str) -> bool:
        """Return whether a metric name matches `name`."""
        return re.fullmatch(re.escape(self.name).replace(r"\*", ".+"), name) is not None

    def __str__(self) -> str:
        return f"{self.unit}: {self.meaning}"


STEP_METRICS = {
    "loss": "train/loss",
    "z_loss": "train/z_loss",
    "router_loss": "train/router_loss",
    "pair_accuracy": "pairs/accuracy",
    "pair_margin": "pairs/margin",
    "chosen_reward": "pairs/chosen_reward",
    "pair_kl": "pairs/kl",
    "accuracy": "train/accuracy",
    "router_imbalance": "router/max_imbalance",
    "dead_experts": "router/dead_experts",
    "router_entropy": "router/mean_entropy",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "seconds": "train/step_s",
    "mfu": "train/mfu",
    "peak_memory_gib": "memory/peak_gib",
}
"""Names of metrics by the field of `StepDone`. Trackers group metrics by the prefix."""
TOKENS_PER_S, WORLD_SIZE, EVAL_LOSS = "train/tokens_per_s", "train/world_size", "eval/loss"
METRIC_UNITS: tuple[MetricUnit, ...] = (
    MetricUnit("train/loss", "nats", "mean over a step's supervised tokens, pairs or documents (objective.kind)"),
    MetricUnit("source/*/loss", "nats", "training loss of one corpus since the previous value"),
    MetricUnit("eval/loss", "nats", "the same mean over the evaluation rows"),
    MetricUnit("eval/*/loss", "nats", "the same, of one validation corpus or of held-out documents"),
    MetricUnit("train/z_loss", "nats per token", "z-loss times its coefficient, as added to the loss"),
    MetricUnit("train/router_loss", "nats per token", "router loss times its coefficient, as added to the loss"),
    MetricUnit(
        "pairs/accuracy", "fraction", "pairs whose chosen answer has the larger reward, or whose positive is nearest"
    ),
    MetricUnit("pairs/margin", "1", "mean reward of the chosen answers minus that of the rejected ones"),
    MetricUnit("pairs/chosen_reward", "1", "mean reward of the chosen answers"),
    MetricUnit("pairs/kl", "nats", "log-probability of an answer minus that of the reference model, mean"),
    MetricUnit("train/accuracy", "fraction", "documents of a step whose class is predicted"),
    MetricUnit("eval/accuracy", "fraction", "evaluated documents whose class is predicted"),
    MetricUnit(
        "eval/pair_accuracy",
        "fraction",
        "evaluated pairs whose chosen answer or positive is preferred",
    ),
    MetricUnit("router/max_imbalance", "ratio", "tokens of the busiest expert over the mean, in the worst layer"),
    MetricUnit("router/dead_experts", "experts", "experts of all layers that received no token of the step"),
    MetricUnit("router/mean_entropy", "nats", "entropy of the routers' probabilities, mean over tokens and layers"),
    MetricUnit("train/grad_norm", "1", "gradient norm over all parameters, before clipping"),
    MetricUnit("train/learning_rate", "1", "learning rate of the step"),
    MetricUnit("train/step_s", "s", "duration of the step, including the wait for its rows"),
    MetricUnit("train/tokens_per_s", "tokens/s", "supervised tokens per second, all ranks combined"),
    MetricUnit("train/mfu", "fraction", "model FLOPs of the step over the peak bf16 FLOPs of all GPUs"),
    MetricUnit("memory/peak_gib", "GiB", "peak memory of rank 0 so far: allocated on a GPU, resident on a CPU"),
    MetricUnit("train/world_size", "ranks", "number of ranks that trained the step"),
    MetricUnit("time/goodput", "fraction", "time in steps that count over the time of all commands (ETTR)"),
    MetricUnit("time/*_s", "s", "time of all commands so far, by category"),
    MetricUnit("checkpoint/*", "same as the metric", "value of the metric when the checkpoint was committed"),
    MetricUnit("system/*_percentage", "percent", "utilization on rank 0's node when the step ended"),
    MetricUnit("system/*_megabytes", "MB", "usage on rank 0's node; for the network, since the attempt started"),
)
"""All metrics that a run logs to trackers. The names are stable."""


def unit_of(name: str) -> MetricUnit | None:
    """Return the unit of a metric, or None for an unknown metric."""
    return next((one for one in METRIC_UNITS if one.is_of(name)), None)
