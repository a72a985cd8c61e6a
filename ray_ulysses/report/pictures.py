"""The pictures of a report: each is a function of a run's record, or says why there is nothing to draw."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from ray_ulysses.report.data_pictures import fill_picture, imbalance_picture, mix_picture
from ray_ulysses.report.drawing import (
    FOREGROUND,
    GRID,
    SERIES,
    count_axis,
    curve,
    legend,
    log_if_wide,
    new_figure,
    retrieval_grids,
)
from ray_ulysses.report.run_record import Floats, NothingToDrawError, RunRecord
from ray_ulysses.tracking.events import AttemptStarted, CheckpointCommitted, Evaluated, RowsSkipped
from ray_ulysses.tracking.run_time import Timeline

_LEAST_LABELLED = 0.1
_BINS = 240
# One spike must not flatten the rest of the curve.
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
    """A picture of a report."""

    title: str
    draw: Callable[[RunRecord], Figure]
    """Draws it; raises `NothingToDrawError`."""
    note: str
    """One sentence on how to read it."""
    is_shared: bool = True
    """Whether two runs get the same axes."""


def loss_picture(record: RunRecord) -> Figure:
    """Draw the loss, the evaluations and the steps that were trained again, with attempts, stages and branches."""
    figure, axes = _over_tokens(record, "loss in nats per token", is_wide=True)
    figure.set_size_inches(11.0, 4.0)
    if len(record.lost):
        lost = np.sort(record.lost, order="step")
        axes.plot(record.tokens_at(lost["step"]), lost["loss"], ".", color=SERIES[1], markersize=4, label="replayed")
    curve(axes, record.tokens, record.kept["loss"], "training", SERIES[0])
    found = {one.step: one.loss for one in record.events(Evaluated) if one.step <= record.history.step}
    if found:
        steps = np.array(sorted(found))
        losses = np.array([found[int(step)] for step in steps])
        curve(axes, record.tokens_at(steps), losses, "evaluation", SERIES[3], marker="o")
    _stages_and_branches(axes, record)
    log_if_wide(axes, record.kept["loss"], _LOSS_RATIO)
    legend(axes)
    return figure


def _over_tokens(record: RunRecord, y_label: str, *, is_wide: bool = False) -> tuple[Figure, Axes]:
    """Return an empty picture over the supervised tokens, in which the attempts are shaded, with labels if it is wide.

    Raises:
        NothingToDrawError: No step is completed yet.
    """
    if not len(record.kept):
        raise NothingToDrawError("no step is completed yet")
    figure, axes = new_figure("supervised tokens", y_label, width=11.0 if is_wide else 5.4)
    _attempts(axes, record, has_labels=is_wide)
    count_axis(axes, "x")
    return figure, axes


def _attempts(axes: Axes, record: RunRecord, *, has_labels: bool) -> None:
    """Shade every other attempt, and say how many ranks it had."""
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
            axes.axvline(float(record.tokens_at(event.step)), color=SERIES[5], linestyle="--", label="rows left out")


def _columns(
    y_label: str, labels: Mapping[str, str], missing: str = "the journal has no value"
) -> Callable[[RunRecord], Figure]:
    """Return the function that draws optional columns of the steps over tokens.

    ``missing`` says why there is no picture where a run has none of them.
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
        log_if_wide(axes, np.concatenate(found))
        if len(labels) > 1:
            legend(axes)
        return figure

    return draw


added_losses_picture = _columns(
    "nats per token",
    {"z_loss": "z-loss", "router_loss": "router loss"},
    "the run has neither a z-loss nor a router loss",
)


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


def _waits(record: RunRecord) -> Figure:
    figure, axes = _over_tokens(record, "seconds")
    curve(axes, record.tokens, record.kept["seconds"], "step", SERIES[0])
    curve(axes, record.tokens, record.kept["saving_seconds"], "stall by a checkpoint", SERIES[1])
    axes.set_ylim(bottom=0)
    legend(axes)
    return figure


def _memory(record: RunRecord) -> Figure:
    there = ~np.isnan(record.kept["peak_memory_gib"])
    if not there.any():
        raise NothingToDrawError("the journal has no measured memory")
    figure, axes = _over_tokens(record, "memory of rank 0 in GiB")
    curve(axes, record.tokens[there], record.kept["peak_memory_gib"][there], "measured peak", SERIES[0])
    if record.planned_gib is not None:
        axes.axhline(record.planned_gib, color=SERIES[1], linestyle="--", label="planned")
    limits = [one.device_gib for one in record.events(AttemptStarted) if one.device_gib is not None]
    if limits:
        axes.axhline(limits[-1], color=SERIES[3], linestyle=":", label="of the device")
    axes.set_ylim(bottom=0)
    legend(axes)
    return figure


def time_shares(record: RunRecord) -> tuple[Floats, dict[str, Floats]]:
    """Return the edges of equal parts of a run's time, and the share of each use in each; the rest is idle."""
    line = record.timeline
    edges = np.linspace(line.begin, line.end, _BINS + 1)
    width = np.diff(edges)
    ends = record.lost["time"]
    replayed = Timeline(spans={"steps_s": (ends - record.lost["seconds"], ends)} if len(ends) else {})
    lost = replayed.seconds_between("steps_s", edges)
    shares = {}
    for name, (parts, _) in _PARTS.items():
        seconds = sum((line.seconds_between(part, edges) for part in parts), np.zeros(_BINS))
        shares[name] = seconds
    lost = np.minimum(lost, shares["steps that count"])
    shares["replayed steps"] = lost
    shares["steps that count"] = shares["steps that count"] - lost
    return edges, {name: np.clip(seconds / width, 0.0, 1.0) for name, seconds in shares.items()}


def _time(record: RunRecord) -> Figure:
    if record.timeline.end <= record.timeline.begin:
        raise NothingToDrawError("the journal has no time yet")
    edges, shares = time_shares(record)
    length = edges[-1] - edges[0]
    unit, scale = next(
        (u, s)
        for u, s in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0))
        if length > 2 * s or s == 1.0
    )
    figure, axes = new_figure(f"{unit} since the start", "share of the time", width=11.0)
    figure.set_size_inches(11.0, 3.4)
    bottom = np.zeros(_BINS)
    for name, (_, color) in _PARTS.items():
        if shares[name].max() > 0:
            top = bottom + shares[name]
            at = (edges - edges[0]) / scale
            axes.stairs(top, at, baseline=bottom, fill=True, color=color, linewidth=0, label=name)
            bottom = top
    axes.set_ylim(0, 1)
    axes.set_xlim(0, length / scale)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=5, handlelength=1.0)
    return figure


def _saves(record: RunRecord) -> Figure:
    saved = [one for one in record.events(CheckpointCommitted) if one.seconds is not None]
    if not saved:
        raise NothingToDrawError("no checkpoint is committed")
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


def position_picture(record: RunRecord) -> Figure:
    """Draw the loss by the number of tokens before, on a logarithmic axis."""
    bins = _part(record, "position_loss")["bins"]
    figure, axes = new_figure("tokens of the document before", "loss in nats per token")
    first = np.array([one["first"] for one in bins], dtype=np.float64)
    curve(axes, first, np.array([one["loss"] for one in bins], dtype=np.float64), "loss", SERIES[0], marker="o")
    axes.set_xscale("symlog", base=2, linthresh=1.0)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return figure


def gain_picture(record: RunRecord) -> Figure:
    """Draw how much lower the loss is with more context, with its standard error."""
    contexts = _part(record, "context_gain")["contexts"]
    figure, axes = new_figure("tokens of context", "gain in nats per token")
    axes.errorbar(
        [one["context_tokens"] for one in contexts],
        [one["gain"] for one in contexts],
        yerr=[one["standard_error"] or 0.0 for one in contexts],
        color=SERIES[0],
        marker="o",
        capsize=3,
    )
    axes.set_xscale("symlog", base=2, linthresh=1.0)
    # The lengths that were measured, which need be no powers of two.
    axes.set_xticks([one["context_tokens"] for one in contexts])
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return figure


def retrieval_picture(record: RunRecord) -> Figure:
    """Draw the share of right answers by depth and length, a grid for each kind of question."""
    return retrieval_grids(_part(record, "retrieval"))


def _part(record: RunRecord, name: str) -> Any:
    if record.evaluation is None:
        raise NothingToDrawError("no evaluation: run `ray-ulysses evaluate RUN`")
    found = record.evaluation.get(name)
    if not found:
        raise NothingToDrawError("the newest evaluation did not measure it")
    return found


PICTURES = (
    Picture(
        "Loss",
        loss_picture,
        "Attempts are shaded by turns; above each: its number, and its ranks as data-parallel × sequence-parallel.",
    ),
    Picture(
        "Where the time went",
        _time,
        "Where nothing is drawn, no command ran. Detection includes the step that was cut off; of saves, what training "
        "waits for is drawn.",
        False,
    ),
    Picture(
        "Z-loss and router loss",
        added_losses_picture,
        "Each with its coefficient, as the gradient has it beside the loss.",
    ),
    Picture("Learning rate", _columns("learning rate", {"learning_rate": "learning rate"}), ""),
    Picture("Gradient norm", _columns("norm before clipping", {"grad_norm": "norm before clipping"}), ""),
    Picture("Speed", _speed, ""),
    Picture("MFU", _columns("share of peak FLOP/s", {"mfu": "share of peak FLOP/s"}), ""),
    Picture("Seconds of a step", _waits, "A step includes the wait for its rows."),
    Picture("Memory", _memory, "Allocated on a GPU; on a CPU the whole process, while the plan counts tensors."),
    Picture("Saving", _saves, ""),
    Picture(
        "Data mix over steps", mix_picture, "Share of each corpus in the tokens of the rows, by the data plan.", False
    ),
    Picture("Fill", fill_picture, "Share of the rows' capacity that holds tokens of documents."),
    Picture("Imbalance", imbalance_picture, "Cost of the slowest ranks over the mean; 1 is the optimum."),
    Picture("Loss by position", position_picture, "From the newest `ray-ulysses evaluate`."),
    Picture("Gain by context", gain_picture, "How much lower the loss of the same spans is with more context."),
    Picture(
        "Retrieval", retrieval_picture, "Share of right answers, by depth of the fact and length of the row.", False
    ),
)
