"""Renders the report of one run, or of several runs in the same plots, as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import PurePosixPath

import numpy as np
from matplotlib.figure import Figure

from ray_ulysses.logging import printable
from ray_ulysses.report.drawing import NARROW, legend, overlay, style, to_svg
from ray_ulysses.report.pictures import PICTURES, Picture, tokens_per_second
from ray_ulysses.report.run_record import NothingToDrawError, RunRecord, read_record
from ray_ulysses.report.words import count, duration, percent, size
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.events import AttemptStarted, CheckpointCommitted, Evaluated

_MOST_ROWS = 200
_STYLE = """
:root{color-scheme:light dark;
--bg:#f6f7f9;--card:#fff;--fg:#22272e;--dim:#5f6975;--grid:#d5dae0;--c1:#0072b2;--c2:#d55e00;
--c3:#009e73;--c4:#b0256e;--c5:#8d8f94;--c6:#56b4e9;--c7:#e69f00;--c8:#7a5ccc}
@media (prefers-color-scheme:dark){:root{
--bg:#14171b;--card:#1d2126;--fg:#dde2e8;--dim:#97a1ad;--grid:#3a424b;--c1:#58aee8;
--c2:#f08a4b;--c3:#2fc49a;--c4:#e879ad;--c5:#8a929c;--c6:#f0e442;--c7:#f2bb4d;--c8:#a893f0}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:16px;
background:var(--bg);color:var(--fg);font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0 0 4px}h2{font-size:1rem;margin:0 0 4px}p{margin:4px 0}
.dim{color:var(--dim);font-size:.87rem}
.grid{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));margin:14px 0}
section{background:var(--card);border:1px solid var(--grid);border-radius:8px;padding:12px;min-width:0}
.wide{grid-column:1/-1}.scroll{overflow-x:auto}.grid svg{max-width:600px}.grid .wide svg{max-width:none}
.phone{display:none}@media (max-width:700px){.desk{display:none}.phone{display:block}}
.hover rect:hover{fill:var(--fg);fill-opacity:.08}
.tiles{display:grid;gap:8px;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));margin:10px 0}
dt{color:var(--dim);font-size:.8rem}dd{margin:0;font-size:1.15rem;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
svg{width:100%;height:auto;display:block}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:3px 10px 3px 0;white-space:nowrap}th{color:var(--dim);font-weight:500}
th:last-child,td:last-child{text-align:left}
.texts td{text-align:left;vertical-align:top;white-space:pre-wrap;overflow-wrap:anywhere}
.texts td:last-child{min-width:18em}
pre{overflow-x:auto;font-size:.8rem;margin:8px 0}summary{cursor:pointer}li{overflow-wrap:anywhere}
"""


def render_report(run_dir: Place, beside: Sequence[Place] = (), *, trust_run: bool = False) -> str:
    """Render the report of a run as an HTML page.

    Args:
        run_dir: The run's directory.
        beside: Directories of other runs, whose curves are drawn in the same plots.
        trust_run: See `open_run_storage`.

    Raises:
        OSError: A journal can't be read.
    """
    records = [read_record(run, trust_run=trust_run) for run in (run_dir, *beside)]
    names = " beside ".join(escape(record.history.name) for record in records)
    with style():
        sections = [text for picture in PICTURES for text in _sections(picture, records)]
    body = [
        f"<h1>{names}</h1>",
        *('<div class="grid">', *(_facts(record) for record in records), "</div>"),
        *('<div class="grid">', *sections, "</div>"),
        *('<div class="grid">', *(text for record in records for text in _tables(record)), "</div>"),
    ]
    return printable(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{names}</title><style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _sections(picture: Picture, records: Sequence[RunRecord]) -> list[str]:
    """Return the sections of a picture: a plot of all runs or one per run. Runs without data for it are left out."""
    drawn: list[tuple[str, Figure]] = []
    sections = []
    for record in records:
        name = record.history.name
        try:
            drawn.append((name, picture.draw(record)))
        except NothingToDrawError:
            continue
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # A damaged plan or evaluation must not prevent the other plots.
            reason = escape(f"drawing failed: {type(error).__name__}: {error}")
            sections.append(f'<section><h2>{picture.title} · {escape(name)}</h2><p class="dim">{reason}</p></section>')
    if picture.is_shared and len(drawn) > 1:
        names, figures = zip(*drawn, strict=True)
        drawn = [(", ".join(names), overlay(figures, names))]
    has_names = len(records) > 1 and not (picture.is_shared and len(drawn) == 1)
    for name, figure in drawn:
        title = picture.title + (f" · {escape(name)}" if has_names else "")
        note = f'<p class="dim">{escape(picture.note)}</p>' if picture.note else ""
        is_wide = figure.get_figwidth() > NARROW
        svg = _svg(figure, escape(f"{picture.title} of {name}", quote=True))
        opening = '<section class="wide">' if is_wide else "<section>"
        sections.append(f"{opening}<h2>{title}</h2>{svg}{note}</section>")
    return sections


def _svg(figure: Figure, title: str) -> str:
    """Render a figure, and a wide plot a second time for a phone, where its text would be too small to read."""
    svg = to_svg(figure, title)
    if figure.get_figwidth() <= NARROW or len(figure.axes) > 1:
        return svg
    (axes,) = figure.axes
    figure.set_size_inches(NARROW, 3.6)
    for text in (*axes.texts,):
        text.remove()
    legend(axes)
    return f'<div class="desk">{svg}</div><div class="phone">{to_svg(figure, title)}</div>'


def _facts(record: RunRecord) -> str:
    """Return a section with the run's status, key figures and totals, and the parts that can't be shown."""
    history, spent, num_attempts = record.history, record.history.time_spent, len(record.history.attempts)
    goodput = "" if history.goodput is None else f" · goodput {percent(history.goodput)}"
    lines = [
        f"<h2>{escape(history.name)}: {history.status.replace('_', ' ')} at step {history.step:,}</h2>",
        _tiles(record),
        f"<p>{count(history.tokens)} supervised tokens · {num_attempts} attempt{'s' * (num_attempts != 1)} · "
        f"{history.lost_steps:,} replayed steps · {duration(spent.total_s)}{goodput}</p>",
    ]
    if history.failure is not None:
        lines.append(f"<p>{escape(history.failure.reason)}</p>")
    if record.missing:
        notes = "".join(f"<li>{escape(text)}</li>" for text in record.missing[:_MOST_ROWS])
        lines.append(f'<p>Not shown:</p><ul class="dim">{notes}</ul>')
    return f'<section class="wide">{"".join(lines)}</section>'


def _tiles(record: RunRecord) -> str:
    """Return the figures that a reader looks for first."""
    if not len(record.kept):
        return '<p class="dim">no step has completed yet</p>'
    settings = next((one.settings for one in reversed(record.events(AttemptStarted)) if one.settings), {})
    model = str(settings.get("model.path") or settings.get("model.config.model_type") or "")
    parts = [PurePosixPath(model).name, "" if record.num_parameters is None else count(record.num_parameters)]
    context = settings.get("data.context_tokens")
    losses = [one.loss for one in record.events(Evaluated) if one.step <= record.history.step]
    tiles = {
        "model": " · ".join(part for part in parts if part),
        "context": "" if context is None else f"{context:,} tokens",
        "final loss": f"{record.kept['loss'][-1]:.4f}",
        "validation loss": f"{losses[-1]:.4f}" if losses else "",
        "median step": f"{np.median(record.kept['seconds']):.3g} s",
        "median tokens/s": count(float(np.nanmedian(tokens_per_second(record)))),
    }
    cells = (f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles.items() if value)
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _tables(record: RunRecord) -> list[str]:
    parts = (_samples(record), _attempts(record), _checkpoints(record), _data(record))
    found = [one for one in parts if one]
    versions = next((one.versions for one in reversed(record.events(AttemptStarted)) if one.versions), {})
    if versions:
        found.append(
            _section("Versions", _table(("version", "library"), [(v, k) for k, v in sorted(versions.items())]))
        )
    for name, text in record.texts.items():
        if name != "README.md":
            found.append(_section(name, f"<details><summary>show</summary><pre>{escape(text)}</pre></details>"))
    return found


def _samples(record: RunRecord) -> str:
    rows = [(f"{one.step:,}", sample.prompt, sample.text) for one in record.history.samples for sample in one.samples]
    table = _table(("step", "prompt", "text"), rows)
    return _section("Samples", f'<div class="texts">{table}</div>') if rows else ""


def _attempts(record: RunRecord) -> str:
    rows = [
        (
            one.attempt,
            one.world_size,
            f"{one.dp_size}×{one.sp_size}",
            one.stage or "-",
            "-" if one.first_step is None else f"{one.first_step:,}-{one.last_step:,}",
            "-" if one.seconds_to_first_step is None else duration(one.seconds_to_first_step),
            one.resumed_from or "-",
            one.reason or "end not recorded",
        )
        for one in record.history.attempts
    ]
    header = ("attempt", "ranks", "dp×sp", "stage", "steps", "to first step", "from", "ended by")
    return _section("Attempts", _table(header, rows)) if rows else ""


def _checkpoints(record: RunRecord) -> str:
    if record.listing is None or not record.listing.checkpoints:
        return ""
    times = {one.step: one for one in record.events(CheckpointCommitted)}
    rows = []
    for one in record.listing.checkpoints:
        commit = times.get(one.step)
        saved = "-" if commit is None or commit.seconds is None else f"{commit.seconds:.1f} s"
        stall = "-" if commit is None or commit.stall_seconds is None else f"{commit.stall_seconds:.2f} s"
        ranks = "-" if one.world_size is None else one.world_size
        rows.append((f"{one.step:,}", ranks, size(one.num_bytes), saved, stall, one.condition, one.path))
    header = ("step", "ranks", "size", "saved in", "stall", "condition", "folder")
    place = f'<p class="dim">in {escape(record.listing.location)}</p>'
    return _section("Checkpoints", place + _table(header, rows))


def _data(record: RunRecord) -> str:
    rows = []
    for number, segment in enumerate(() if record.plan is None else record.plan.segments):
        weights = [1.0 if one.weight is None else one.weight for one in segment.sources]
        for source, weight in zip(segment.sources, weights, strict=True):
            share = "all of it" if source.weight is None else percent(weight / sum(weights))
            facts = (f"{segment.base_step:,}", f"{segment.settings.context_tokens:,}", segment.settings.rows_per_step)
            rows.append((number, *facts, percent(segment.fill), share, source.path))
    header = ("segment", "after step", "context", "rows/step", "fill", "share", "corpus")
    return _section("Data mix", _table(header, rows)) if rows else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of the last `_MOST_ROWS` rows."""
    note = f'<p class="dim">The last {_MOST_ROWS} of {len(rows):,}.</p>' if len(rows) > _MOST_ROWS else ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows[-_MOST_ROWS:])
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'{note}<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _section(title: str, body: str) -> str:
    return f'<section class="wide"><h2>{escape(title)}</h2>{body}</section>'
