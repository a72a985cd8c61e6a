"""Renders the text of ``ray-ulysses inspect RUN --row N``."""

from __future__ import annotations

from collections.abc import Sequence

from ray_ulysses.forensics.row import RowPiece, RowReport, TimesTrained
from ray_ulysses.report.words import as_text, count, facts, table


def render_row(report: RowReport) -> str:
    """Return a row's numbers, a table of its pieces, and the text of each."""
    lines = [f"row {report.row:,} of run {report.run!r}", *facts(_totals(report)), "", "corpora"]
    lines += facts(
        [
            (str(number), corpus.path if corpus.problem is None else f"{corpus.path}: CAN'T BE READ: {corpus.problem}")
            for number, corpus in enumerate(report.corpora)
        ]
    )
    numbers = {corpus.path: number for number, corpus in enumerate(report.corpora)}
    header = ("piece", "document", "start", "length", "labels", "continues", "corpus", "id", "offset", "source")
    rows = [_piece(number, piece, numbers[piece.corpus]) for number, piece in enumerate(report.pieces)]
    lines += ["", "pieces", *table(header, rows)]
    for number, piece in enumerate(report.pieces):
        lines += _text(number, piece)
    return as_text(lines)


def _totals(report: RowReport) -> list[tuple[str, str]]:
    return [
        ("trained", _trained(report)),
        ("discarded", _steps(report.thrown_away) if report.thrown_away else "never"),
        ("plan", f"{report.plan_id}, segment {report.segment}, epoch {report.epoch}, step {report.planned_step:,}"),
        ("tokens", f"{report.tokens:,} and {report.padding:,} of padding: {report.row_tokens:,}"),
        ("supervised", f"{report.supervised:,}"),
        ("cost", f"{count(report.cost)} ({report.cost:,}; attention, quadratic in length, plus a linear part)"),
    ]


def _trained(report: RowReport) -> str:
    if not report.trained:
        return "not trained yet"
    twice = "; MORE THAN ONCE: see `inspect RUN --verify`" if len(report.trained) > 1 else ""
    return _steps(report.trained) + twice


def _steps(times: Sequence[TimesTrained]) -> str:
    return ", ".join(f"step {one.step:,} of attempt {one.attempt}" for one in times)


def _piece(number: int, piece: RowPiece, corpus: int) -> tuple[str, ...]:
    labels = "-" if piece.labels is None else f"{sum(stop - start for start, stop in piece.labels):,}"
    goes_on = "yes" if piece.goes_on else "no"
    place = (f"{piece.document:,}", f"{piece.start:,}", f"{piece.length:,}", labels, goes_on)
    offset = "-" if piece.offset is None else f"{piece.offset:,}"
    return (str(number), *place, str(corpus), piece.id or "-", offset, piece.source or "-")


def _text(number: int, piece: RowPiece) -> list[str]:
    if piece.text is None and piece.text_problem is None:
        return []
    tokens = f"[{piece.start:,}, {piece.start + piece.length:,})"
    lines = ["", f"piece {number}: tokens {tokens} of document {piece.document:,}{_supervised(piece)}"]
    if piece.text is None:
        return [*lines, f"  NO TEXT: {piece.text_problem}"]
    lines += _quoted(piece.text.head)
    if piece.text.left_out:
        lines += [f"  ... {piece.text.left_out:,} characters omitted; --text full prints them ..."]
        lines += _quoted(piece.text.tail)
    return lines


def _supervised(piece: RowPiece) -> str:
    """Describe the supervised tokens of a piece; empty if all but the first are, as in plain text."""
    stop = piece.start + piece.length + piece.goes_on
    if piece.labels is None or piece.labels == ((piece.start + 1, stop),):
        return ""
    return "; supervised (between ⟦ and ⟧): " + (", ".join(f"[{a:,}, {b:,})" for a, b in piece.labels) or "nothing")


def _quoted(text: str) -> list[str]:
    return [f"  | {line}".rstrip(" ") for line in text.split("\n")]
