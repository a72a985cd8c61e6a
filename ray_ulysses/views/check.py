"""Renders the report of ``ray-ulysses check``."""

from __future__ import annotations

from ray_ulysses.forensics.check_report import CheckReport
from ray_ulysses.report.words import as_text, wrapped

_MARKS = {True: "ok", False: "FAILED", None: "-"}
_WIDTH = 100


def render_check(report: CheckReport) -> str:
    """Return the report: one line for each thing that was looked at, and the verdict."""
    width = max(len(line.name) for line in report.lines)
    lines = [f"check of run {report.name!r}", ""]
    for line in report.lines:
        first = f"  {_MARKS[line.holds]:<6}  {line.name:<{width}}  "
        lines += wrapped(f"{line.found} [{line.rule}]", _WIDTH, first, " " * len(first))
    failed = ", ".join(line.name for line in report.failed)
    lines += ["", f"FAILED: {failed}" if failed else "ready for the whole run"]
    return as_text(lines)
