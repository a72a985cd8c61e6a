"""Pictures of the data that a run's steps trained on, by its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ray_ulysses.data.plan.corpus_set import PlannedSource, first_documents
from ray_ulysses.data.plan.segment import Segment
from ray_ulysses.report.drawing import FOREGROUND, SERIES, curve, legend, new_figure, plain
from ray_ulysses.report.run_record import Floats, NothingToDrawError, RunRecord
from ray_ulysses.tracking.events import AttemptStarted
from ray_ulysses.tracking.steps import Rows

Whole = NDArray[np.integer]
_BINS = 240
# Pieces of so many rows are in memory at once.
_ROWS_AT_ONCE = 1 << 16


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


def mix_shares(record: RunRecord) -> tuple[Floats, Floats]:
    """Return the share of each corpus in the tokens of the trained rows, over equal ranges of steps.

    Returns:
        The ranges' edges, [ranges + 1], and the shares, [ranges, corpora], NaN where no step that counts is known.
    """
    trained = list(_trained(record))
    first, last = (int(edge(record.kept["step"])) for edge in (np.min, np.max))
    num_bins = min(_BINS, last - first + 1)
    edges = np.linspace(first - 0.5, last + 0.5, num_bins + 1)
    num_sources = max(len(segment.sources) for segment, _ in trained)
    tokens = np.zeros(num_bins * num_sources)
    for segment, steps in trained:
        sizes = steps["end_row"] - steps["first_row"]
        rows = np.arange(sizes.sum()) + np.repeat(
            steps["first_row"] - segment.base_row - np.cumsum(sizes) + sizes, sizes
        )
        bins = np.full(segment.train.num_rows, -1)
        bins[rows] = np.repeat(np.searchsorted(edges, steps["step"]) - 1, sizes)
        for row, source, length in _pieces(segment):
            counted = bins[row] >= 0
            cell = bins[row][counted] * num_sources + source[counted]
            tokens += np.bincount(cell, weights=length[counted], minlength=len(tokens))
    table = tokens.reshape(num_bins, num_sources)
    whole = table.sum(axis=1, keepdims=True)
    shares: Floats = np.divide(table, whole, out=np.full_like(table, np.nan), where=whole > 0)
    return edges, shares


def mix_picture(record: RunRecord) -> Figure:
    """Draw what share of the tokens came from each corpus."""
    edges, shares = mix_shares(record)
    if shares.shape[1] < 2:
        raise NothingToDrawError("there is one corpus only")
    sources = max((segment.sources for segment, _ in _trained(record)), key=len)
    figure, axes = new_figure("step", "share of the tokens")
    order = np.argsort(-np.nansum(shares, axis=0), kind="stable")
    names = _names(sources)
    parts = [(names[number], SERIES[place], shares[:, number]) for place, number in enumerate(order[: len(SERIES)])]
    if len(order) > len(SERIES):
        parts.append(("others", FOREGROUND, shares[:, order[len(SERIES) :]].sum(axis=1)))
    bottom = np.zeros(len(shares))
    for name, color, share in parts:
        top = bottom + share
        axes.stairs(top, edges, baseline=bottom, fill=True, color=color, linewidth=0, label=plain(name))
        bottom = top
    axes.set_ylim(0, 1)
    axes.set_xlim(edges[0], edges[-1])
    legend(axes)
    return figure


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


def _pieces(segment: Segment) -> Iterator[tuple[Whole, Whole, Whole]]:
    """Yield the row, the number of the corpus and the tokens of every piece of a segment's rows, in parts."""
    stats = segment.train.stats(0, segment.train.num_rows)
    order = np.argsort(stats.first_piece, kind="stable")
    bases = first_documents(segment.sources)
    for at in range(0, len(order), _ROWS_AT_ONCE):
        rows = order[at : at + _ROWS_AT_ONCE]
        first, numbers = int(stats.first_piece[rows[0]]), stats.num_pieces[rows]
        found = segment.train.closed_pieces(first, first + int(numbers.sum()))
        source = np.searchsorted(bases, found.document, side="right") - 1
        yield np.repeat(rows, numbers), source, found.length


def _names(sources: Sequence[PlannedSource]) -> list[str]:
    """Return the corpora's paths, cut to the fewest last parts that tell them apart."""
    paths = [PurePosixPath(source.path).parts for source in sources]
    for number in range(1, max(map(len, paths))):
        names = ["/".join(parts[-number:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [source.path for source in sources]
