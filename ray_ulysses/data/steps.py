"""Who trains which row of a step: rows dealt to data-parallel ranks so that every micro-step is level."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MicroSteps = tuple[tuple[int | None, ...], ...]


def assign_rows(rows: Sequence[int], costs: Sequence[int] | NDArray[np.int64], dp_size: int) -> MicroSteps:
    """Deal the rows of one step to the data-parallel ranks.

    Rows are sorted by cost, the dearest first (ties by row), and cut into micro-steps of ``dp_size``, so that
    ranks that wait for one another in a micro-step hold rows of nearly equal cost. Every second micro-step is
    dealt in reverse, so that no rank holds the dearest row of each.

    Args:
        rows: The rows of the step.
        costs: The cost of each of them, in the same order.
        dp_size: Data-parallel ranks.

    Returns:
        ``result[micro_step][dp_rank]``, a row, or None where a zero-weight filler row takes its place.
    """
    assert len(rows) == len(costs), "one cost a row"
    ordered = [row for _, row in sorted((-int(cost), row) for cost, row in zip(costs, rows, strict=True))]
    micro_steps: list[tuple[int | None, ...]] = []
    for first in range(0, len(ordered), dp_size):
        dealt: list[int | None] = list(ordered[first : first + dp_size])
        dealt += [None] * (dp_size - len(dealt))
        micro_steps.append(tuple(dealt[::-1] if len(micro_steps) % 2 else dealt))
    return tuple(micro_steps)


def num_micro_steps(num_rows: int, dp_size: int) -> int:
    """Return how many micro-steps a step of ``num_rows`` rows takes."""
    return -(-num_rows // dp_size)


def imbalance(costs: NDArray[np.int64], rows_per_step: int, dp_size: int) -> float:
    """Return how much longer the steps take than with perfectly level ranks, by attention cost alone.

    A micro-step lasts as long as its dearest row; the ideal is the total cost shared by all ranks. 1.0 is
    level.

    Args:
        costs: Cost of every row, in the order of training.
        rows_per_step: Rows of a global batch.
        dp_size: Data-parallel ranks.
    """
    if costs.size == 0:
        return 1.0
    num_steps = -(-costs.size // rows_per_step)
    steps = np.zeros((num_steps, rows_per_step), dtype=np.int64)
    steps.reshape(-1)[: costs.size] = costs
    # Sorted, the dearest row of each micro-step is every dp_size-th one.
    dearest = -np.sort(-steps, axis=1)[:, ::dp_size]
    return float(dearest.sum(dtype=np.float64) * dp_size / costs.sum(dtype=np.float64))
