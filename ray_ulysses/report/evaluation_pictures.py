"""Pictures of the newest evaluation of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from ray_ulysses.report.drawing import SERIES, curve, new_figure, retrieval_grids
from ray_ulysses.report.run_record import NothingToDrawError, RunRecord


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
