"""Pictures of the data that a run's steps trained on, by its plan."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from ray_ulysses.data.plan.segment import Segment
from ray_ulysses.report.drawing import SERIES, curve, new_figure
from ray_ulysses.report.nothing import NothingToDrawError
from ray_ulysses.report.run_record import Floats, RunRecord
from ray_ulysses.tracking.events import AttemptStarted
from ray_ulysses.tracking.step_groups import Rows


def step_fill(record: RunRecord) -> tuple[Floats, Floats]:
    """Return the steps that count and the share of their rows' capacity that holds tokens of documents."""
    steps, shares = [], []
    for segment, trained in _trained(record):
        tokens = segment.train.stats(0, segment.num_rows).document_tokens
        sums = _sum(tokens.astype(np.float64), segment, trained)
        steps.append(trained["step"])
        shares.append(sums / ((trained["end_row"] - trained["first_row"]) * segment.settings.capacity))
    return np.concatenate(steps).astype(np.float64), np.concatenate(shares)


def step_imbalance(record: RunRecord) -> tuple[Floats, Floats]:
    """Return the steps that count and the cost of the slowest ranks of their micro-batches over the mean."""
    dp_sizes = {one.attempt: one.dp_size for one in record.events(AttemptStarted)}
    steps, found = [], []
    for segment, trained in _trained(record):
        costs = segment.costs().astype(np.float64)
        for attempt in np.unique(trained["attempt"]):
            part = trained[trained["attempt"] == attempt]
            dp_size = dp_sizes.get(int(attempt), 1)
            size = segment.settings.rows_per_step
            first = (part["first_row"] - segment.base_row)[:, None] + np.arange(size)
            inside = first < (part["end_row"] - segment.base_row)[:, None]
            ranked = -np.sort(-np.where(inside, costs[np.minimum(first, len(costs) - 1)], 0.0), axis=1)
            # In descending order the most expensive row of each micro-batch is every dp_size-th one.
            slowest, total = ranked[:, ::dp_size].sum(axis=1), ranked.sum(axis=1)
            steps.append(part["step"])
            found.append(np.divide(slowest * dp_size, total, out=np.ones(len(part)), where=total > 0))
    return np.concatenate(steps).astype(np.float64), np.concatenate(found)


def fill_picture(record: RunRecord) -> Figure:
    """Draw how full the rows of each step were."""
    steps, shares = step_fill(record)
    figure, axes = new_figure("step", "share of the capacity")
    curve(axes, steps, shares, "fill", SERIES[0])
    return figure


def imbalance_picture(record: RunRecord) -> Figure:
    """Draw how unevenly the rows of each step were divided among data-parallel ranks."""
    steps, found = step_imbalance(record)
    order = np.argsort(steps, kind="stable")
    figure, axes = new_figure("step", "slowest ranks / mean")
    curve(axes, steps[order], found[order], "imbalance", SERIES[0])
    return figure


def _trained(record: RunRecord) -> Iterator[tuple[Segment, Rows]]:
    """Yield each segment of the plan with the steps that trained it."""
    if record.plan is None or not len(record.kept):
        raise NothingToDrawError("no data plan, or no step yet")
    segments = record.plan.segments
    bounds = [*(one.base_step for one in segments), np.iinfo(np.int64).max]
    found = False
    for number, segment in enumerate(segments):
        step, stop = record.kept["step"], segment.base_row + segment.num_rows
        inside = (step > bounds[number]) & (step <= bounds[number + 1]) & (record.kept["end_row"] <= stop)
        if inside.any():
            found = True
            yield segment, record.kept[inside]
    if not found:
        raise NothingToDrawError("the plan has none of the trained rows")


def _sum(values: Floats, segment: Segment, trained: Rows) -> Floats:
    sums = np.append(0.0, np.cumsum(values))
    found: Floats = sums[trained["end_row"] - segment.base_row] - sums[trained["first_row"] - segment.base_row]
    return found
