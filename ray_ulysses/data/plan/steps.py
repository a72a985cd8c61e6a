"""Orders rows and assigns the rows of a step to ranks, so that ranks and micro-batches have balanced costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_ulysses.data.plan.rows import Int64Array

MicroBatches = tuple[tuple[int | None, ...], ...]
_STEP_BLOCK = 4096


def assign_rows(rows: Sequence[int], costs: Sequence[int] | Int64Array, dp_size: int) -> MicroBatches:
    """Assign the rows of one step to the data-parallel ranks.

    Rows are sorted by cost, the most expensive first (ties by row), and divided into micro-batches of ``dp_size``, so
    that ranks that wait for one another in a micro-batch have rows of nearly equal cost. Every second micro-batch is
    assigned in reverse, so that no rank gets the most expensive row of every micro-batch.

    Returns:
        ``result[micro_batch][dp_rank]``: a row, or None for a zero-weight filler row.
    """
    assert len(rows) == len(costs), "one cost per row"
    ordered = [row for _, row in sorted((-int(cost), row) for cost, row in zip(costs, rows, strict=True))]
    micro_batches: list[tuple[int | None, ...]] = []
    for first in range(0, len(ordered), dp_size):
        assigned: list[int | None] = list(ordered[first : first + dp_size])
        assigned += [None] * (dp_size - len(assigned))
        micro_batches.append(tuple(assigned[::-1] if len(micro_batches) % 2 else assigned))
    return tuple(micro_batches)


def num_micro_batches(num_rows: int, dp_size: int) -> int:
    """Return the number of micro-batches of a step of ``num_rows`` rows."""
    return -(-num_rows // dp_size)


def balance_windows(costs: Int64Array, rows_per_step: int, num_steps: int, first_row: int = 0) -> Int64Array:
    """Return an order in which rows of similar cost share a step, and the steps of a window have similar costs.

    The rows of ``num_steps`` steps are sorted by cost and divided into ``num_steps ** 2`` groups of neighbors. Each
    step takes one group of every stratum of ``num_steps`` groups, alternating forwards and backwards. A step still
    holds rows of all costs, but those that share a micro-batch are closer in cost.

    Args:
        costs: Cost of each row, in the shuffled order.
        rows_per_step: Rows per step.
        num_steps: Steps per window.
        first_row: Number of rows of the run before these, so that windows end where steps end.

    Returns:
        The indexes in ``costs``, in the new order.
    """
    window = rows_per_step * num_steps
    order = np.arange(costs.size, dtype=np.int64)
    first = -(first_row % window)
    while first < costs.size:
        low, high = max(first, 0), min(first + window, costs.size)
        order[low:high] = low + _spread(costs[low:high], low - first, rows_per_step, num_steps)
        first += window
    return order


def _spread(costs: Int64Array, skipped: int, rows_per_step: int, num_steps: int) -> Int64Array:
    """Return the order of one window, whose first ``skipped`` places belong to other rows."""
    ranked = np.argsort(-costs, kind="stable")
    window = rows_per_step * num_steps
    size = -(-rows_per_step // num_steps)
    places = np.arange(window).reshape(num_steps, rows_per_step)
    turn = []
    for stratum, column in enumerate(range(0, rows_per_step, size)):
        groups = [step[column : column + size] for step in places]
        turn += groups[::-1] if stratum % 2 else groups
    targets = np.concatenate(turn) - skipped
    targets = targets[(targets >= 0) & (targets < costs.size)]
    order = np.empty(costs.size, dtype=np.int64)
    order[targets] = ranked
    return order


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Balance of the steps of a plan, by cost alone."""

    imbalance: float
    """Time of all steps over their time with perfectly balanced ranks; 1.0 is optimal."""
    bound: float
    """The lowest imbalance that any assignment of each step's rows could reach: a step lasts at least as long as the
    mean over its ranks, and as its most expensive row."""
    fast: float
    """The 10th percentile of step times over their mean."""
    slow: float
    """The 90th percentile of step times over their mean."""


def step_times(costs: Int64Array, rows_per_step: int, dp_size: int) -> StepTimes:
    """Predict the balance of the steps from the cost of every row, in training order.

    A micro-batch lasts as long as its most expensive row.
    """
    total = float(costs.sum(dtype=np.float64))
    if total == 0.0:
        return StepTimes(imbalance=1.0, bound=1.0, fast=1.0, slow=1.0)
    times, bounds = [], []
    for first in range(0, costs.size, rows_per_step * _STEP_BLOCK):
        part = costs[first : first + rows_per_step * _STEP_BLOCK]
        steps = np.zeros((-(-part.size // rows_per_step), rows_per_step), dtype=np.int64)
        steps.reshape(-1)[: part.size] = part
        # In descending order the most expensive row of each micro-batch is every dp_size-th one.
        highest = -np.sort(-steps, axis=1)[:, ::dp_size]
        times.append(highest.sum(axis=1, dtype=np.float64))
        bounds.append(np.maximum(steps.sum(axis=1, dtype=np.float64) / dp_size, highest[:, 0]))
    seconds = np.concatenate(times)
    full = seconds[: costs.size // rows_per_step] if costs.size >= rows_per_step else seconds
    fast, slow = np.quantile(full, [0.1, 0.9]) / full.mean()
    return StepTimes(
        imbalance=float(seconds.sum() * dp_size / total),
        bound=float(np.concatenate(bounds).sum() * dp_size / total),
        fast=float(fast),
        slow=float(slow),
    )
