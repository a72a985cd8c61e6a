"""Draws curves as SVG whose colors follow the page: light or dark, and safe for the color-blind."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from ray_ulysses.report.thinning import Floats, not_finite, thin

# Each stands for a variable of the page's style sheet, which knows whether the page is light or dark.
FOREGROUND, GRID = "#010101", "#020202"
SERIES = tuple(f"#0300{number:02x}" for number in range(1, 9))
_VARIABLES = {FOREGROUND: "fg", GRID: "grid"} | {color: f"c{number}" for number, color in enumerate(SERIES, 1)}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ray-ulysses",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.color": FOREGROUND,
    "axes.labelcolor": FOREGROUND,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": FOREGROUND,
    "ytick.color": FOREGROUND,
    "lines.linewidth": 1.2,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "path.simplify": False,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw in the style of the report within the context."""
    with matplotlib.rc_context(_STYLE):
        yield


def new_figure(x_label: str, y_label: str, *, width: float = 5.4) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes; every axis says its unit."""
    figure = Figure(figsize=(width, 3.0), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    # There is no half step.
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=x_label == "step"))
    return figure, axes


def count_axis(axes: Axes, which: str) -> None:
    """Write the ticks of an axis with k, M, G."""
    (axes.xaxis if which == "x" else axes.yaxis).set_major_formatter(EngFormatter(sep=""))


def curve(axes: Axes, x: Floats, y: Floats, label: str, color: str, *, marker: str = "") -> None:
    """Draw a curve with all of its extremes; values that are not finite become crosses at the bottom."""
    columns, values = thin(x, y)
    dot = marker or ("." if 0 < len(columns) <= 60 else "")
    axes.plot(columns, values, color=color, label=label, marker=dot, markersize=7 if marker else 4)
    broken = not_finite(x, y)
    if len(broken):
        bottom = axes.get_xaxis_transform()
        axes.plot(
            broken,
            np.full(len(broken), 0.02),
            "x",
            color=SERIES[3],
            transform=bottom,
            label="not finite",
            clip_on=False,
        )


def plain(label: str) -> str:
    """Return a label as it is shown: between ``$`` Matplotlib reads formulas, and it hides one that begins with _."""
    return ("./" if label.startswith("_") else "") + label.replace("$", r"\$")


def log_if_wide(axes: Axes, y: Floats, ratio: float = 100.0) -> None:
    """Use a logarithmic scale for positive values that differ by more than a ratio."""
    values = y[np.isfinite(y)]
    if len(values) and values.min() > 0 and values.max() > ratio * values.min():
        axes.set_yscale("log")


def legend(axes: Axes) -> None:
    """Name the curves above the picture, where nothing is covered."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if len(unique) > 1:
        axes.figure.legend(
            list(unique.values()), list(unique), loc="outside upper left", ncols=3, handlelength=1.4, columnspacing=1.2
        )


def same_limits(figures: Sequence[Figure]) -> None:
    """Give the axes of the same picture of several runs the same scale and limits, so that they can be compared."""
    axes = [figure.axes[0] for figure in figures]
    if len({one.get_yscale() for one in axes}) > 1:
        for one in axes:
            one.set_yscale("linear" if min(other.get_ylim()[0] for other in axes) <= 0 else "log")
    for get, put in (("get_xlim", "set_xlim"), ("get_ylim", "set_ylim")):
        limits = [getattr(one, get)() for one in axes]
        for one in axes:
            getattr(one, put)(min(low for low, _ in limits), max(high for _, high in limits))


def to_svg(figure: Figure, title: str) -> str:
    """Return a figure as an SVG element of a page, with its title for screen readers."""
    text = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure).print_svg(text, metadata=metadata)  # type: ignore[no-untyped-call]
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg) width="[^"]*" height="[^"]*"|(<svg) height="[^"]*" width="[^"]*"', "<svg", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", svg)
    svg = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font: \1px system-ui, sans-serif", svg)
    for color, name in _VARIABLES.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
