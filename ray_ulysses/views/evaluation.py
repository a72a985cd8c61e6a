"""Renders the result of ``ray-ulysses evaluate``."""

from __future__ import annotations

from ray_ulysses.evaluation.report import EvaluationReport
from ray_ulysses.evaluation.results import KINDS, ContextGain, PositionLoss
from ray_ulysses.report.words import as_text, count, duration, facts, table
from ray_ulysses.storage.place import Place


def render_evaluation(report: EvaluationReport, out: Place | None) -> str:
    """Return the lines that ``ray-ulysses evaluate`` prints.

    Args:
        report: The result.
        out: Directory of its files; None if they could not be written.
    """
    step = "" if report.step is None else f", step {report.step:,}"
    processes = f"{report.sp_size} process{'es' if report.sp_size > 1 else ''} per row"
    files = [] if out is None else [("files", str(out))]
    lines = [
        f"{report.model}{step}: evaluated in {duration(report.seconds)}",
        *facts([("data", report.data), ("model", f"{report.dtype}, {processes}"), *files]),
    ]
    if report.position_loss is not None:
        lines += _position_lines(report.position_loss)
    if report.context_gain is not None:
        lines += _gain_lines(report.context_gain)
    for kind in KINDS:
        lines += _grid_lines(report, kind)
    return as_text([*lines, *(f"  note: {note}" for note in report.notes)])


def _position_lines(found: PositionLoss) -> list[str]:
    rows = [(f"{one.first:,} - {one.last:,}", count(one.tokens), f"{one.loss:.4f}") for one in found.bins]
    return [
        "",
        f"loss by position, nats per token, {found.documents:,} documents:",
        *table(("tokens before", "tokens", "loss"), [*rows, ("all", count(found.tokens), f"{found.loss:.4f}")]),
    ]


def _gain_lines(found: ContextGain) -> list[str]:
    rows = []
    for one in found.contexts:
        error = "" if one.standard_error is None else f" ± {one.standard_error:.4f}"
        gain = "" if one is found.contexts[0] else f"{one.gain:.4f}{error}"
        rows.append((f"{one.context_tokens:,}", count(one.tokens), f"{one.loss:.4f}", gain))
    return [
        "",
        f"loss of the same {found.spans:,} spans of {found.documents:,} documents with more context:",
        *table(("context", "tokens", "loss", "gain ± standard error"), rows),
    ]


def _grid_lines(report: EvaluationReport, kind: str) -> list[str]:
    grids = {length: cells for (one, length), cells in report.grids().items() if one == kind}
    if not grids:
        return []
    depths = [f"depth {cell.depth:.0%}" for cell in next(iter(grids.values()))]
    rows = []
    for length, cells in grids.items():
        correct, cases = sum(cell.correct for cell in cells), sum(cell.cases for cell in cells)
        shown = sum(cell.chance_shown * cell.cases for cell in cells) / cases
        rows.append(
            (f"{length:,}", *(f"{cell.accuracy:.0%}" for cell in cells), f"{correct / cases:.0%}", f"{shown:.1%}")
        )
    cases = next(iter(grids.values()))[0].cases
    return [
        "",
        f"retrieval, {kind}: right answers of {cases} per length and depth "
        f"(chance {next(iter(grids.values()))[0].chance:.0e})",
        *table(("length", *depths, "all", "chance among the numbers shown"), rows),
    ]
