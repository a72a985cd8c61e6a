"""Renders a rehearsal: what it is going to do, what happens, and its report, in Markdown that is readable as it is."""

from __future__ import annotations

from collections.abc import Sequence

from ray_ulysses.elastic.schedule import MEANINGS, Fault
from ray_ulysses.forensics.recoveries import Recovery
from ray_ulysses.forensics.rehearsal_report import LossComparison, RehearsalReport
from ray_ulysses.report.words import as_text, duration, facts, minutes, percent


def render_intent(
    name: str, facts_of_it: Sequence[tuple[str, str]], faults: Sequence[Fault], notes: Sequence[str] = ()
) -> str:
    """Return what a rehearsal is going to do.

    Args:
        name: The run that it trains.
        facts_of_it: Names and values that a person should know before.
        faults: What is going to happen.
        notes: What else a person should know before.
    """
    rows = [(minutes(fault.at_s), f"{fault.kind:<12} {MEANINGS[fault.kind]}") for fault in faults]
    lines = [f"rehearsal {name!r}", *facts(facts_of_it), "  faults, after the run's first step", *facts(rows, "    ")]
    return as_text([*lines, *(f"  note: {note}" for note in notes)])


def render_report(report: RehearsalReport) -> str:
    """Return the report in Markdown."""
    verdict = "everything holds" if report.holds else "DOES NOT HOLD"
    lines = [f"# Rehearsal {report.name}: {verdict}", "", *report.setting, ""]
    lines += [f"* {problem}" for problem in report.problems] + [""] * bool(report.problems)
    lines += _table(("", ""), _totals(report))
    if report.recoveries:
        lines += [
            "",
            "## What each fault cost",
            "",
            "Seconds after the fault; the pause is from the last step before.",
            "",
        ]
        lines += _table(_HEAD, [_row(one) for one in report.recoveries])
    if report.samples:
        lines += ["", "## Losses beside the run without faults", ""]
        rows = [
            (str(step), f"{ours:.7f}", f"{theirs:.7f}", f"{abs(ours / theirs - 1.0) if theirs else abs(ours):.1e}")
            for step, ours, theirs in report.samples
        ]
        lines += _table(("step", "with faults", "without", "relative difference"), rows)
    return as_text(lines)


_HEAD = ("at", "fault", "noticed", "formed", "loaded", "first step", "pause", "steps lost", "workers", "what happened")


def _totals(report: RehearsalReport) -> list[tuple[str, str]]:
    ettr = "-" if report.ettr is None else percent(report.ettr)
    rows = [
        ("steps", f"{report.steps:,} in {duration(report.seconds)}"),
        ("faults", str(len(report.recoveries))),
        ("rows lost", str(report.rows_lost)),
        ("rows repeated", str(report.rows_repeated)),
        ("rows trained", f"{report.rows:,}, read again from the corpus: digest {report.data_digest}"),
        ("steps lost", f"{report.lost_steps:,} (trained again)"),
        ("effective training time", f"{ettr} of the time went into steps that count"),
        ("loss of steps that were trained again", _difference(report.retrained, report.tolerance)),
    ]
    if report.unbroken is not None:
        rows.append(("loss beside a run without faults", _difference(report.unbroken, report.tolerance)))
    return rows


def _difference(found: LossComparison, tolerance: float) -> str:
    if not found.steps:
        return "no such step"
    return f"differs by {found.largest:.1e} at most, in {found.steps:,} steps (rounding: up to {tolerance:.0e})"


def _row(one: Recovery) -> tuple[str, ...]:
    times = (one.detected_s, one.formed_s, one.loaded_s, one.first_step_s, one.pause_s)
    shown = ["" if seconds is None else f"{seconds:.1f} s" for seconds in times]
    workers = "" if None in one.workers else f"{one.workers[0]} -> {one.workers[1]}"
    lost = "" if one.lost_steps is None else str(one.lost_steps)
    what = one.strike.what
    if one.is_shared:
        what += ", in the same restart as above"
    return (minutes(one.strike.fault.at_s), one.strike.fault.kind, *shown, lost, workers, what)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table whose columns are aligned."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [head, ["-" * max(3, width) for width in widths], *rows]
    return [
        "| " + " | ".join(f"{cell:<{max(3, width)}}" for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
