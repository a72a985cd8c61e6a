"""Orders rows, and assigns each step's rows to ranks, so that ranks and micro-batches have similar costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_ulysses.data.plan.rows import Int64Array

MicroBatches = tuple[tuple[int | None, ...], ...]
_STEP_BLOCK = 4096
QUARTERS = 4
"""Most parts by cost from which each step of a window gets rows, and fewest micro-batches that balance well."""


def assign_rows(rows: Sequence[int], costs: Sequence[int] | Int64Array, dp_size: int) -> MicroBatches:
    """Assign the rows of one step to the data-parallel ranks.

    Rows are sorted by descending cost (ties by row) and divided into micro-batches of ``dp_size`` rows, so that ranks
    that wait for each other in a micro-batch have rows of similar cost. Every second micro-batch is assigned in
    reverse, so that no rank always gets the most expensive row.

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
    """Return the number of micro-batches in a step of ``num_rows`` rows."""
    return -(-num_rows // dp_size)


def balance_windows(costs: Int64Array, rows_per_step: int, num_steps: int, first_row: int = 0) -> Int64Array:
    """Reorder rows so that rows of similar cost share a micro-batch and the steps of a window have similar costs.

    The rows of ``num_steps`` steps are sorted by cost and divided into at most four quarters, and each quarter into one
    group of neighbors per step. Each step gets a group from every quarter, alternating forwards and backwards, so that
    a step has rows of all costs, but rows that share a micro-batch are close in cost. This requires a step of at least
    four micro-batches; with fewer, a micro-batch spans several quarters.

    Args:
        costs: Cost of each row, in shuffled order.
        rows_per_step: Rows per step.
        num_steps: Steps per window.
        first_row: Number of earlier rows in the run, which aligns the windows with steps.

    Returns:
        Indices into ``costs``, in the new order.
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
    """Return the order of one window's rows. The first ``skipped`` positions of the window belong to other rows."""
    ranked = np.argsort(-costs, kind="stable")
    window = rows_per_step * num_steps
    size = -(-rows_per_step // min(num_steps, QUARTERS))
    # The rows arrive shuffled, so the places of the most expensive rows put the steps into a random order. Otherwise,
    # the cost of the steps would rise and fall with every window.
    shuffled = np.argsort(np.resize(ranked, num_steps), kind="stable")
    places = np.arange(window).reshape(num_steps, rows_per_step)[shuffled]
    turn = []
    for quarter, column in enumerate(range(0, rows_per_step, size)):
        groups = [step[column : column + size] for step in places]
        turn += groups[::-1] if quarter % 2 else groups
    targets = np.concatenate(turn) - skipped
    targets = targets[(targets >= 0) & (targets < costs.size)]
    order = np.empty(costs.size, dtype=np.int64)
    order[targets] = ranked
    return order


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Balance of a plan's steps, predicted from row costs alone."""

    imbalance: float
    """Total time of all steps, relative to perfectly balanced ranks; 1.0 is optimal."""
    bound: float
    """Lower bound on ``imbalance`` for any assignment of rows within steps: a step takes at least its ranks' mean time
    and at least the time of its most expensive row."""
    fast: float
    """10th percentile of the step times, relative to their mean."""
    slow: float
    """90th percentile of the step times, relative to their mean."""


def step_times(costs: Int64Array, rows_per_step: int, dp_size: int) -> StepTimes:
    """Predict the balance of the steps from each row's cost, in training order.

    A micro-batch is assumed to take as long as its most expensive row.
    """
    total = float(costs.sum(dtype=np.float64))
    times, bounds = [], []
    for first in range(0, costs.size, rows_per_step * _STEP_BLOCK):
        part = costs[first : first + rows_per_step * _STEP_BLOCK]
        steps = np.zeros((-(-part.size // rows_per_step), rows_per_step), dtype=np.int64)
        steps.reshape(-1)[: part.size] = part
        # In descending order, every dp_size-th row is the most expensive row of a micro-batch.
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
