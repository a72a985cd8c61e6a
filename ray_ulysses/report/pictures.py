"""The plots of a report. Each is drawn from a run's record, or raises `NothingToDrawError`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from numpy.typing import NDArray

from ray_ulysses.data.plan.corpus_set import PlannedSource, first_documents
from ray_ulysses.data.plan.segment import Segment
from ray_ulysses.report.drawing import (
    FOREGROUND,
    GRID,
    NARROW,
    SERIES,
    WIDE,
    count_axis,
    curve,
    legend,
    log_if_wide,
    new_figure,
    plain,
    retrieval_grids,
    stack,
)
from ray_ulysses.report.run_record import Floats, NothingToDrawError, RunRecord
from ray_ulysses.report.words import count
from ray_ulysses.tracking.events import (
    AttemptStarted,
    CheckpointCommitted,
    Evaluated,
    RoutersMeasured,
    RowsSkipped,
    SourcesMeasured,
)
from ray_ulysses.tracking.run_time import Timeline
from ray_ulysses.tracking.steps import Rows

Whole = NDArray[np.integer]
_LEAST_LABELLED = 0.1
_BINS = 240
# Maximum number of rows whose pieces are in memory at a time.
_ROWS_AT_ONCE = 1 << 16
# Above this max/min ratio, the loss axis is logarithmic, so that a spike does not flatten the rest of the curve.
_LOSS_RATIO = 15.0
_PARTS = {
    "steps that count": (("steps_s",), SERIES[0]),
    "replayed steps": ((), SERIES[1]),
    "start-up": (("build_s", "startup_s", "waiting_s", "unknown_s"), SERIES[4]),
    "workers form": (("form_s",), SERIES[5]),
    "loading": (("load_s",), SERIES[2]),
    "detection": (("detect_s", "cut_off_s"), SERIES[3]),
    "saves": (("saves_s",), SERIES[6]),
    "evaluation": (("evaluation_s",), SERIES[7]),
    "other": (("other_s", "stages_s"), FOREGROUND),
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot of a report."""

    title: str
    draw: Callable[[RunRecord], Figure]
    """Function that draws the plot, or raises `NothingToDrawError`."""
    note: str
    """Explanation shown below the plot."""
    is_shared: bool = True
    """Whether the curves of several runs are drawn in one plot."""


def loss_picture(record: RunRecord) -> Figure:
    """Draw training loss, evaluation loss and replayed steps, with attempts, stages and plan branches."""
    figure, axes = _over_tokens(record, "loss in nats", is_wide=True)
    figure.set_size_inches(WIDE, 4.0)
    if len(record.lost):
        lost = np.sort(record.lost, order="step")
        axes.plot(record.tokens_at(lost["step"]), lost["loss"], ".", color=SERIES[1], markersize=4, label="replayed")
    curve(axes, record.tokens, record.kept["loss"], "training", SERIES[0])
    found: dict[str, dict[int, float]] = {}
    for one in record.events(Evaluated):
        if one.step <= record.history.step:
            found.setdefault("evaluation", {})[one.step] = one.loss
            for corpus in one.corpora if len(one.corpora) > 1 else ():
                found.setdefault(plain(f"evaluation: {corpus.name}"), {})[one.step] = corpus.loss
    _draw_by_step(axes, record, found, [*SERIES[3:], *SERIES[:3]], marker="o")
    _stages_and_branches(axes, record)
    log_if_wide(axes, record.kept["loss"], _LOSS_RATIO)
    legend(axes)
    return figure


def _over_tokens(record: RunRecord, y_label: str, *, is_wide: bool = False) -> tuple[Figure, Axes]:
    """Return an empty plot with supervised tokens on the x-axis and shaded attempts, labelled if the plot is wide."""
    if not len(record.kept):
        raise NothingToDrawError("no step has completed yet")
    figure, axes = new_figure("supervised tokens", y_label, width=WIDE if is_wide else NARROW)
    steps, tokens = np.append(0, record.kept["step"]), np.append(float(record.inherited_tokens), record.tokens)
    axes.fmt_xdata = lambda x: f"step {np.interp(x, tokens, steps):,.0f}, {count(x)} tokens"
    _attempts(axes, record, has_labels=is_wide)
    count_axis(axes, "x")
    return figure, axes


def _attempts(axes: Axes, record: RunRecord, *, has_labels: bool) -> None:
    """Shade every second attempt, and label wide attempts with their number and layout."""
    starts = {one.attempt: one for one in record.events(AttemptStarted)}
    numbers = record.kept["attempt"]
    firsts = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
    edges = np.append(firsts, len(numbers))
    tokens = np.append(float(record.inherited_tokens), record.tokens)
    whole = (tokens[-1] - tokens[0]) or 1.0
    for place, (first, stop) in enumerate(itertools.pairwise(edges)):
        low, high = tokens[first], tokens[stop]
        if place % 2 and len(firsts) <= _BINS:
            axes.axvspan(low, high, color=GRID, alpha=0.35, linewidth=0)
        start = starts.get(int(numbers[first]))
        if has_labels and start is not None and high - low > _LEAST_LABELLED * whole:
            words = f"{start.attempt}: {start.world_size} = {start.dp_size}×{start.sp_size}"
            axes.annotate(
                words,
                ((low + high) / 2, 1.0),
                xycoords=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontsize=8,
                color=FOREGROUND,
            )


def _stages_and_branches(axes: Axes, record: RunRecord) -> None:
    segments = () if record.plan is None else record.plan.segments
    for before, segment in itertools.pairwise(segments):
        if segment.base_step > record.history.step:
            continue
        is_stage = before.stage_number != segment.stage_number
        axes.axvline(
            float(record.tokens_at(segment.base_step)),
            color=SERIES[4] if is_stage else SERIES[5],
            linestyle="--",
            label="next stage" if is_stage else "branch of the data plan",
        )
    if not segments:
        for event in record.events(RowsSkipped):
            axes.axvline(float(record.tokens_at(event.step)), color=SERIES[5], linestyle="--", label="rows skipped")


def _columns(
    y_label: str,
    labels: Mapping[str, str],
    missing: str = "the journal has no value",
    *,
    from_zero: bool = False,
    is_linear: bool = False,
) -> Callable[[RunRecord], Figure]:
    """Return a function that plots optional step fields against tokens.

    ``missing`` is the message for a run that has none of the fields.
    """

    def draw(record: RunRecord) -> Figure:
        figure, axes = _over_tokens(record, y_label)
        found = []
        for (name, label), color in zip(labels.items(), SERIES, strict=False):
            there = ~np.isnan(record.kept[name])
            if there.any():
                found.append(record.kept[name][there])
                curve(axes, record.tokens[there], found[-1], label, color)
        if not found:
            raise NothingToDrawError(missing)
        if from_zero:
            axes.set_ylim(bottom=0)
        elif not is_linear:
            log_if_wide(axes, np.concatenate(found))
        legend(axes)
        return figure

    return draw


added_losses_picture = _columns(
    "nats per token",
    {"z_loss": "z-loss", "router_loss": "router loss"},
    "the run has neither a z-loss nor a router loss",
)


_NO_PAIRS = "the run has no pairs of answers"
pair_accuracy_picture = _columns("fraction", {"pair_accuracy": "chosen preferred"}, _NO_PAIRS, from_zero=True)
pair_rewards_picture = _columns(
    "reward", {"pair_margin": "chosen minus rejected", "chosen_reward": "chosen"}, _NO_PAIRS, is_linear=True
)
pair_kl_picture = _columns("nats", {"pair_kl": "mean over answers"}, "the run has no reference model", is_linear=True)
accuracy_picture = _columns("fraction", {"accuracy": "training"}, "the documents have no classes", from_zero=True)
_NO_ROUTERS = "the model has no routers that are counted"
router_imbalance_picture = _columns("busiest expert / mean", {"router_imbalance": "worst layer"}, _NO_ROUTERS)
dead_experts_picture = _columns("experts of all layers", {"dead_experts": "dead"}, _NO_ROUTERS, from_zero=True)
router_entropy_picture = _columns("nats", {"router_entropy": "mean over layers"}, _NO_ROUTERS, from_zero=True)


def router_layers_picture(record: RunRecord) -> Figure:
    """Draw each layer's load imbalance over the steps; a column that stands for several steps shows the largest."""
    measured = {one.step: one for one in record.events(RoutersMeasured) if one.step <= record.history.step}
    if not measured:
        raise NothingToDrawError(_NO_ROUTERS)
    steps = sorted(measured)
    layers = measured[steps[-1]].layers
    table = np.array([measured[step].imbalance for step in steps])
    columns = np.array_split(table, min(_BINS, len(steps)))
    figure, axes = new_figure("step", "layer")
    # An image, because a cell of a mesh would be a path of the SVG.
    image = axes.imshow(
        np.stack([column.max(axis=0) for column in columns], axis=1),
        cmap="cividis",
        vmin=1.0,
        aspect="auto",
        interpolation="none",
        origin="lower",
        extent=(steps[0] - 0.5, steps[-1] + 0.5, -0.5, len(layers) - 0.5),
    )
    shown = np.unique(np.linspace(0, len(layers) - 1, 8).astype(int))
    axes.set_yticks(shown, [str(layers[place]) for place in shown])
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, label="busiest expert / mean")
    return figure


def source_losses_picture(record: RunRecord) -> Figure:
    """Draw the training loss of each corpus of a mixture."""
    found: dict[str, dict[int, float]] = {}
    for one in record.events(SourcesMeasured):
        if one.step <= record.history.step:
            for corpus in one.corpora:
                found.setdefault(plain(corpus.name), {})[one.step] = corpus.loss
    figure, axes = _over_tokens(record, "loss in nats per token")
    if not found:
        raise NothingToDrawError("no loss by corpus is recorded")
    _draw_by_step(axes, record, found, SERIES)
    legend(axes)
    return figure


def _draw_by_step(
    axes: Axes, record: RunRecord, found: Mapping[str, Mapping[int, float]], colors: Sequence[str], marker: str = ""
) -> None:
    """Draw curves of values by step. ``marker`` marks the values of the first curve."""
    for number, (name, values) in enumerate(found.items()):
        steps = np.array(sorted(values))
        heights = np.array([values[int(step)] for step in steps])
        color = colors[number % len(colors)]
        curve(axes, record.tokens_at(steps), heights, name, color, marker="" if number else marker)


def tokens_per_second(record: RunRecord) -> Floats:
    """Return the supervised tokens per second of each step that counts."""
    seconds = record.kept["seconds"]
    found: Floats = np.divide(record.kept["tokens"], seconds, out=np.full(len(seconds), np.nan), where=seconds > 0)
    return found


def _speed(record: RunRecord) -> Figure:
    figure, axes = _over_tokens(record, "tokens/s, all ranks")
    curve(axes, record.tokens, tokens_per_second(record), "tokens/s", SERIES[0])
    axes.set_ylim(bottom=0)
    count_axis(axes, "y")
    return figure


def _memory(record: RunRecord) -> Figure:
    there = ~np.isnan(record.kept["peak_memory_gib"])
    if not there.any():
        raise NothingToDrawError("the journal has no memory measurements")
    figure, axes = _over_tokens(record, "memory of rank 0 in GiB")
    curve(axes, record.tokens[there], record.kept["peak_memory_gib"][there], "measured peak", SERIES[0])
    if record.planned_gib is not None:
        axes.axhline(record.planned_gib, color=SERIES[1], linestyle="--", label="planned")
    limits = [one.device_gib for one in record.events(AttemptStarted) if one.device_gib is not None]
    if limits:
        axes.axhline(limits[-1], color=SERIES[3], linestyle=":", label="device memory")
    axes.set_ylim(bottom=0)
    legend(axes)
    return figure


def time_shares(record: RunRecord) -> tuple[Floats, dict[str, Floats]]:
    """Divide a run's time into equal intervals. Return their edges, and the fraction of each category per interval."""
    line = record.timeline
    edges = np.linspace(line.begin, line.end, _BINS + 1)
    width = np.diff(edges)
    ends = record.lost["time"]
    replayed = Timeline(spans={"steps_s": (ends - record.lost["seconds"], ends)} if len(ends) else {})
    lost = replayed.seconds_between("steps_s", edges)
    shares = {
        name: sum((line.seconds_between(part, edges) for part in parts), np.zeros(_BINS))
        for name, (parts, _) in _PARTS.items()
    }
    lost = np.minimum(lost, shares["steps that count"])
    shares["replayed steps"] = lost
    shares["steps that count"] = shares["steps that count"] - lost
    return edges, {name: np.clip(seconds / width, 0.0, 1.0) for name, seconds in shares.items()}


def _time(record: RunRecord) -> Figure:
    if record.timeline.end <= record.timeline.begin:
        raise NothingToDrawError("the journal contains no timings yet")
    edges, shares = time_shares(record)
    length = edges[-1] - edges[0]
    unit, scale = next(
        (u, s)
        for u, s in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0))
        if length > 2 * s or s == 1.0
    )
    figure, axes = new_figure(f"{unit} since the start", "share of the time", width=WIDE)
    figure.set_size_inches(WIDE, 3.4)
    parts = [(name, color, shares[name]) for name, (_, color) in _PARTS.items() if shares[name].max() > 0]
    stack(axes, (edges - edges[0]) / scale, parts)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=5, handlelength=1.0)
    return figure


def _saves(record: RunRecord) -> Figure:
    saved = [one for one in record.events(CheckpointCommitted) if one.seconds is not None]
    if not saved:
        raise NothingToDrawError("no checkpoint has been committed")
    figure, axes = new_figure("step", "seconds")
    saved.sort(key=lambda one: one.step)
    steps = np.array([one.step for one in saved], dtype=np.float64)
    curve(axes, steps, np.array([one.seconds for one in saved], dtype=np.float64), "until committed", SERIES[0])
    stalls = np.array([np.nan if one.stall_seconds is None else one.stall_seconds for one in saved])
    if np.isfinite(stalls).all():
        curve(axes, steps, stalls, "training stalled", SERIES[1])
    axes.set_ylim(bottom=0)
    count_axis(axes, "x")
    legend(axes)
    return figure


def fill_picture(record: RunRecord) -> Figure:
    """Draw the fraction of each step's row capacity that is filled with document tokens."""
    steps, shares = [], []
    for segment, trained in _trained(record):
        tokens = segment.train.stats(0, segment.num_rows).document_tokens
        sums = np.append(0.0, np.cumsum(tokens, dtype=np.float64))
        first, stop = trained["first_row"] - segment.base_row, trained["end_row"] - segment.base_row
        steps.append(trained["step"])
        shares.append((sums[stop] - sums[first]) / ((stop - first) * segment.settings.capacity))
    figure, axes = new_figure("step", "share of the capacity")
    curve(axes, np.concatenate(steps).astype(np.float64), np.concatenate(shares), "fill", SERIES[0])
    return figure


def imbalance_picture(record: RunRecord) -> Figure:
    """Draw the slowest data-parallel ranks' cost divided by the mean cost, summed over micro-batches, per step."""
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
            # In descending order of cost, every dp_size-th row is the most expensive row of a micro-batch.
            slowest, total = ranked[:, ::dp_size].sum(axis=1), ranked.sum(axis=1)
            steps.append(part["step"])
            found.append(np.divide(slowest * dp_size, total, out=np.ones(len(part)), where=total > 0))
    trained_steps, ratios = np.concatenate(steps).astype(np.float64), np.concatenate(found)
    order = np.argsort(trained_steps, kind="stable")
    figure, axes = new_figure("step", "slowest ranks / mean")
    curve(axes, trained_steps[order], ratios[order], "imbalance", SERIES[0])
    return figure


def mix_shares(record: RunRecord) -> tuple[Floats, Floats]:
    """Return each corpus's fraction of the trained tokens, over equal ranges of steps.

    Returns:
        The edges of the ranges, [ranges + 1], and the fractions, [ranges, corpora]. Ranges without steps are NaN.
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
    """Draw each corpus's fraction of the trained tokens."""
    edges, shares = mix_shares(record)
    if shares.shape[1] < 2:
        raise NothingToDrawError("there is only one corpus")
    sources = max((segment.sources for segment, _ in _trained(record)), key=len)
    figure, axes = new_figure("step", "share of the tokens")
    order = np.argsort(-np.nansum(shares, axis=0), kind="stable")
    names = _names(sources)
    parts = [(plain(names[number]), color, shares[:, number]) for number, color in zip(order, SERIES, strict=False)]
    if len(order) > len(SERIES):
        parts.append(("others", FOREGROUND, shares[:, order[len(SERIES) :]].sum(axis=1)))
    stack(axes, edges, parts)
    legend(axes)
    return figure


def _trained(record: RunRecord) -> Iterator[tuple[Segment, Rows]]:
    """Yield each segment of the plan with the steps that trained its rows."""
    if record.plan is None or not len(record.kept):
        raise NothingToDrawError("there is no data plan, or no step has completed yet")
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
        raise NothingToDrawError("the plan does not contain the trained rows")


def _pieces(segment: Segment) -> Iterator[tuple[Whole, Whole, Whole]]:
    """Yield (row, corpus index, number of tokens) arrays over the pieces of a segment, in batches."""
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
    """Return the shortest path suffixes that distinguish the corpora."""
    paths = [PurePosixPath(source.path).parts for source in sources]
    for number in range(1, max(map(len, paths))):
        names = ["/".join(parts[-number:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [source.path for source in sources]


def position_picture(record: RunRecord) -> Figure:
    """Draw the loss by token position in the document, on a logarithmic axis."""
    bins = _part(record, "position_loss")["bins"]
    figure, axes = new_figure("preceding tokens in the document", "loss in nats per token")
    first = np.array([one["first"] for one in bins], dtype=np.float64)
    curve(axes, first, np.array([one["loss"] for one in bins], dtype=np.float64), "loss", SERIES[0], marker="o")
    axes.set_xscale("symlog", base=2, linthresh=1.0)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return figure


def gain_picture(record: RunRecord) -> Figure:
    """Draw the loss reduction by context length, with standard errors."""
    contexts = _part(record, "context_gain")["contexts"]
    figure, axes = new_figure("tokens of context", "gain in nats per token")
    lengths, gains = (
        np.array([one[name] for one in contexts], dtype=np.float64) for name in ("context_tokens", "gain")
    )
    curve(axes, lengths, gains, "gain", SERIES[0], marker="o")
    errors = [one["standard_error"] or 0.0 for one in contexts]
    axes.errorbar(lengths, gains, yerr=errors, fmt="none", ecolor=SERIES[0], capsize=3)
    axes.set_xscale("symlog", base=2, linthresh=1.0)
    # Place ticks at the measured lengths, which may not be powers of two.
    axes.set_xticks(lengths)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return figure


def retrieval_picture(record: RunRecord) -> Figure:
    """Draw the retrieval accuracy by depth and row length."""
    return retrieval_grids(_part(record, "retrieval"))


def _part(record: RunRecord, name: str) -> Any:
    if record.evaluation is None:
        raise NothingToDrawError("no evaluation: run `ray-ulysses evaluate RUN`")
    if not (found := record.evaluation.get(name)):
        raise NothingToDrawError("the newest evaluation does not include this measurement")
    return found


PICTURES = (
    Picture(
        "Loss",
        loss_picture,
        "Every second attempt is shaded. Labels on wide screens: attempt, ranks as data-parallel × sequence-parallel.",
    ),
    Picture(
        "Where the time went",
        _time,
        "Gaps: no command ran. Detection includes the interrupted step. Saves include only the time that blocked "
        "training.",
        False,
    ),
    Picture("Training loss by corpus", source_losses_picture, "Each value covers the steps since the previous one."),
    Picture("Accuracy", accuracy_picture, "Documents of a step whose class is predicted."),
    Picture(
        "Accuracy of pairs",
        pair_accuracy_picture,
        "Pairs whose chosen answer or positive is preferred.",
    ),
    Picture("Rewards of pairs", pair_rewards_picture, "Means over a step's pairs."),
    Picture("Distance from the reference", pair_kl_picture, "Log-probability of an answer minus the reference's."),
    Picture(
        "Z-loss and router loss",
        added_losses_picture,
        "Multiplied by their coefficients, as added to the loss.",
    ),
    Picture("Router imbalance", router_imbalance_picture, "Tokens of the busiest expert over the mean; 1 is balanced."),
    Picture(
        "Router imbalance by layer",
        router_layers_picture,
        "The largest value of the steps in a column. Blue is balanced.",
        False,
    ),
    Picture("Dead experts", dead_experts_picture, "Experts that received none of the step's document tokens."),
    Picture("Router entropy", router_entropy_picture, "A router that always chooses the same experts has entropy 0."),
    Picture("Learning rate", _columns("learning rate", {"learning_rate": "learning rate"}), ""),
    Picture("Gradient norm", _columns("norm before clipping", {"grad_norm": "norm before clipping"}), ""),
    Picture("Speed", _speed, ""),
    Picture("MFU", _columns("share of peak FLOP/s", {"mfu": "share of peak FLOP/s"}), ""),
    Picture(
        "Step time",
        _columns("seconds", {"seconds": "step", "saving_seconds": "checkpoint stall"}, from_zero=True),
        "Includes the wait for the step's rows.",
    ),
    Picture("Memory", _memory, "GPU: allocated memory. CPU: the entire process, while the plan includes only tensors."),
    Picture("Saving", _saves, ""),
    Picture(
        "Data mix over steps", mix_picture, "Each corpus's fraction of the tokens, according to the data plan.", False
    ),
    Picture("Fill", fill_picture, "Fraction of the row capacity that is filled with document tokens."),
    Picture("Imbalance", imbalance_picture, "Cost of the slowest ranks over the mean cost; 1 is ideal."),
    Picture("Loss by position", position_picture, "From the newest `ray-ulysses evaluate`."),
    Picture("Gain by context", gain_picture, "Reduction of the same spans' loss when more context is available."),
    Picture("Retrieval", retrieval_picture, "Accuracy by depth of the fact and length of the row.", False),
)
