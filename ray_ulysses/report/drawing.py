"""Draws plots as SVG, in a colorblind-safe palette that follows the page's light or dark theme.

A curve with a million points is downsampled to the plot's resolution without losing extreme values.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import StepPatch
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

Floats = NDArray[np.float64]
COLUMNS = 480
"""Horizontal resolution of a plot. A curve has at most four points per column."""
_BANDS = 96
"""Maximum number of ranges of a plot whose values are shown when the pointer is over them."""
NARROW, WIDE = 5.4, 11.0
"""Widths of plots, in inches."""
# Placeholder colors, replaced by CSS variables that the page defines for its light and dark themes.
FOREGROUND, GRID = "#010101", "#020202"
SERIES = tuple(f"#0300{number:02x}" for number in range(1, 9))
_VARIABLES = {FOREGROUND: "fg", GRID: "grid"} | {color: f"c{number}" for number, color in enumerate(SERIES, 1)}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
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


def style() -> AbstractContextManager[None]:
    """Return a context manager that applies the report's Matplotlib style."""
    return matplotlib.rc_context(_STYLE)


def new_figure(x_label: str, y_label: str, *, width: float = NARROW) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes. Labels should include units."""
    figure = Figure(figsize=(width, 3.0), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.fmt_xdata = lambda x: f"{x_label} {x:,.6g}"
    # Fractional steps have no meaning.
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=x_label == "step"))
    return figure, axes


def count_axis(axes: Axes, which: str) -> None:
    """Format an axis's tick labels with the suffixes k, M and G."""
    (axes.xaxis if which == "x" else axes.yaxis).set_major_formatter(EngFormatter(sep=""))


def curve(axes: Axes, x: Floats, y: Floats, label: str, color: str, *, marker: str = "") -> None:
    """Draw a downsampled curve that preserves extreme values. Non-finite values are drawn as crosses at the bottom."""
    columns, values = thin(x, y)
    dot = marker or ("." if 0 < len(columns) <= 60 else "")
    axes.plot(columns, values, color=color, label=label, marker=dot, markersize=7 if marker else 4)
    if len(broken := not_finite(x, y)):
        at: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(broken, np.full(len(broken), 0.02), "x", color=SERIES[3], label="not finite", **at)


def stack(axes: Axes, edges: Floats, parts: Iterable[tuple[str, str, Floats]]) -> None:
    """Draw stacked fractions. ``parts`` contains (label, color, one fraction per interval of ``edges``)."""
    bottom = np.zeros(len(edges) - 1)
    for label, color, share in parts:
        axes.stairs(bottom + share, edges, baseline=bottom, fill=True, color=color, linewidth=0, label=label)
        bottom = bottom + share
    axes.set_ylim(0, 1)
    axes.set_xlim(edges[0], edges[-1])


def plain(label: str) -> str:
    """Escape a label for Matplotlib, which renders text between ``$`` as math and hides labels starting with ``_``."""
    return ("./" if label.startswith("_") else "") + label.replace("$", r"\$")


def log_if_wide(axes: Axes, y: Floats, ratio: float = 100.0) -> None:
    """Use a logarithmic y-axis if all finite values are positive and max/min exceeds ``ratio``."""
    values = y[np.isfinite(y)]
    if len(values) and values.min() > 0 and values.max() > ratio * values.min():
        axes.set_yscale("log")


def legend(axes: Axes) -> None:
    """Draw the legend above the plot, in place of an earlier one, if there are several labels."""
    axes.figure.legends.clear()
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if len(unique) > 1:
        axes.figure.legend(
            list(unique.values()), list(unique), loc="outside upper left", ncols=3, handlelength=1.4, columnspacing=1.2
        )


def same_limits(figures: Sequence[Figure]) -> None:
    """Set the same scale and axis limits in the corresponding plots of several runs."""
    axes = [figure.axes[0] for figure in figures]
    if len({one.get_yscale() for one in axes}) > 1:
        for one in axes:
            one.set_yscale("linear" if min(other.get_ylim()[0] for other in axes) <= 0 else "log")
    for get, put in (("get_xlim", "set_xlim"), ("get_ylim", "set_ylim")):
        limits = [getattr(one, get)() for one in axes]
        for one in axes:
            getattr(one, put)(min(low for low, _ in limits), max(high for _, high in limits))


def overlay(figures: Sequence[Figure], names: Sequence[str]) -> Figure:
    """Draw the curves of several runs in the plot of the first, with one color per run and one dash per label."""
    same_limits(figures)
    axes = figures[0].axes[0]
    runs = [[line for line in _curves(one.axes[0]) if line.get_linestyle() != "None"] for one in figures]
    labels = list(dict.fromkeys(str(line.get_label()) for lines in runs for line in lines))
    for artist in (*axes.lines, *axes.patches, *axes.texts, *axes.collections):
        artist.remove()
    # Positions of one run, such as its steps by tokens, do not apply to the others.
    axes.fmt_xdata = lambda x: f"{axes.get_xlabel()} {x:,.6g}"
    for number, (name, lines) in enumerate(zip(names, runs, strict=True)):
        for line in lines:
            label = str(line.get_label())
            axes.plot(
                *line.get_data(),
                color=SERIES[number % len(SERIES)],
                linestyle=("-", "--", ":", "-.")[labels.index(label) % 4],
                marker=line.get_marker(),
                markersize=4,
                label=plain(name) if len(labels) == 1 else plain(f"{name}: {label}"),
            )
    legend(axes)
    return figures[0]


def _curves(axes: Axes) -> list[Line2D]:
    """Return the labelled lines whose points are data, in contrast to lines that span the axes."""
    return [
        line
        for line in axes.lines
        if line.get_transform() is axes.transData and not str(line.get_label()).startswith("_")
    ]


def _hover(figure: Figure) -> str:
    """Return invisible SVG rectangles over a plot whose titles give the values of all curves in that range."""
    if len(figure.axes) > 1:
        return ""
    axes = figure.axes[0]
    found: list[tuple[str, Floats, Floats]] = []
    for line in _curves(axes):
        x, y = (np.asarray(part, dtype=np.float64) for part in line.get_data())
        found.append((str(line.get_label()), x, y))
    for patch in axes.patches:
        if isinstance(patch, StepPatch):
            values, edges, baseline = patch.get_data()
            shares = values - baseline
            there = shares > 0
            found.append((str(patch.get_label()), ((edges[:-1] + edges[1:]) / 2)[there], shares[there]))
    found = [(label, x, y) for label, x, y in found if len(x)]
    if not found:
        return ""
    left, bottom, width, height = axes.bbox.bounds
    pixels = [axes.transData.transform(np.stack((x, np.ones_like(x)), axis=1))[:, 0] for _, x, _ in found]
    middles = np.unique(np.concatenate(pixels).round(1))
    if len(middles) > _BANDS:
        middles = np.linspace(middles[0], middles[-1], _BANDS)
    limits = np.concatenate(([left], (middles[:-1] + middles[1:]) / 2, [left + width]))
    words: list[list[str]] = [[] for _ in middles]
    for (label, x, y), at in zip(found, pixels, strict=True):
        band = np.searchsorted(limits[1:-1], at)
        for number in np.unique(band):
            inside = band == number
            if not words[number]:
                words[number].append(_span(x[inside], axes.format_xdata))
            words[number].append(f"{label} {_span(y[inside], '{:.4g}'.format)}".replace(r"\$", "$"))
    place = f'y="{figure.bbox.height - bottom - height:.1f}" height="{height:.1f}"'
    rects = (
        f'<rect x="{limits[n]:.1f}" width="{limits[n + 1] - limits[n]:.1f}" {place}>'
        f"<title>{escape(chr(10).join(lines))}</title></rect>"
        for n, lines in enumerate(words)
        if lines
    )
    return f'<g class="hover" fill="transparent">{"".join(rects)}</g>'


def _span(values: Floats, form: Callable[[float], str]) -> str:
    low, high = form(float(values.min())), form(float(values.max()))
    return low if low == high else f"{low} to {high}"


def to_svg(figure: Figure, title: str) -> str:
    """Render a figure as an inline SVG element, with ``title`` as its label for screen readers.

    Where the pointer is over a plot, the browser shows the values there.
    """
    text = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # The resolution of SVG, so that positions in `_hover` are those of the drawing.
    figure.set_dpi(72)
    # Ids must differ between the drawings of a page: a reference into a hidden drawing shows nothing.
    with matplotlib.rc_context({"svg.hashsalt": f"{title} {figure.get_size_inches()}"}):
        FigureCanvasSVG(figure).print_svg(text, metadata=metadata)  # type: ignore[no-untyped-call]
    svg = text.getvalue().replace("</svg>", f"{_hover(figure)}</svg>")
    tag, _, rest = svg[svg.index("<svg ") :].partition(">")
    tag = re.sub(r' (?:xmlns(?::xlink)?|width|height)="[^"]*"', "", tag)
    svg = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font: \1px system-ui, sans-serif", f"{tag}>{rest}")
    for color, name in _VARIABLES.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def retrieval_grids(cells: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the retrieval accuracy by depth and row length, with one grid per kind of question.

    Args:
        cells: The ``retrieval`` field of `EvaluationReport.to_json`.
    """
    kinds = list(dict.fromkeys(cell["kind"] for cell in cells))
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    figure = Figure(figsize=(WIDE, 0.9 + 0.36 * len(depths)), layout="constrained")
    for number, kind in enumerate(kinds):
        axes = figure.add_subplot(1, len(kinds), number + 1)
        grid = np.full((len(depths), len(lengths)), np.nan)
        for cell in cells:
            if cell["kind"] == kind:
                grid[depths.index(cell["depth"]), lengths.index(cell["length"])] = cell["accuracy"]
        axes.pcolormesh(grid, cmap="cividis", vmin=0.0, vmax=1.0, edgecolors="none")
        for (row, column), share in np.ndenumerate(grid):
            if np.isfinite(share):
                color = "#ffffff" if share < 0.6 else "#111111"
                axes.text(column + 0.5, row + 0.5, f"{share:.0%}", ha="center", va="center", color=color, fontsize=9)
        axes.set_title(kind.replace("_", " "), fontsize=10)
        axes.set_xticks(np.arange(len(lengths)) + 0.5, [f"{length:,}" for length in lengths])
        axes.set_yticks(np.arange(len(depths)) + 0.5, [f"{depth:.0%}" for depth in depths])
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set_xlabel("row length in tokens")
        axes.set_ylabel("depth" if number == 0 else "")
    return figure


def retrieval_svg(cells: Sequence[Mapping[str, Any]], model: str) -> str:
    """Render `retrieval_grids` as a standalone SVG file in the light theme."""
    title = f"Retrieval accuracy: {model}"
    with style():
        figure = retrieval_grids(cells)
        figure.suptitle(plain(title))
        svg = to_svg(figure, escape(title, quote=True))
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return svg.replace("<svg", f'<svg {names} style="--fg:#22272e;--grid:#d5dae0;background:#fff"', 1)


def thin(x: Floats, y: Floats, columns: int = COLUMNS) -> tuple[Floats, Floats]:
    """Downsample a curve to the first, lowest, highest and last point of each column, in their original order.

    A line through these points covers the same pixels as a line through all points. Points with a non-finite value are
    omitted; see `not_finite`.

    Args:
        x: Ascending x-coordinates.
        y: Values, with the same length as ``x``.
        columns: Number of equally wide columns.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= 4 * columns:
        return x, y
    column, starts = _columns(x, columns)
    ends = np.append(starts[1:], len(x)) - 1
    # Sort by column, then by value: each column's lowest point comes first, and its highest point last.
    order = np.lexsort((y, column))
    keep = np.unique(np.concatenate((starts, ends, order[starts], order[ends])))
    return x[keep], y[keep]


def not_finite(x: Floats, y: Floats, columns: int = COLUMNS) -> Floats:
    """Return the x-coordinates of non-finite values, at most one per column if there are many."""
    found = x[np.isfinite(x) & ~np.isfinite(y)]
    return found if len(found) <= columns else found[_columns(found, columns)[1]]


def _columns(x: Floats, columns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the column of each x-coordinate, and the index of each column's first point. ``x`` must ascend."""
    width = (x[-1] - x[0]) or 1.0
    column = np.minimum(((x - x[0]) / width * columns).astype(np.int64), columns - 1)
    return column, np.flatnonzero(np.append(True, np.diff(column) > 0))
