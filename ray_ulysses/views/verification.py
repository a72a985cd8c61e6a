"""Renders the text of ``ray-ulysses inspect RUN --verify``."""

from __future__ import annotations

from ray_ulysses.forensics.verification_report import Comparison, Finding, Verification
from ray_ulysses.report.words import as_text, count, facts

_MOST_OF_A_KIND = 10


def render_verification(found: Verification) -> str:
    """Return what was verified, each finding, and the notes."""
    lines = [f"run {found.name!r} ({found.status}): {_verdict(found)}", *facts(_totals(found))]
    shown: dict[str, int] = {}
    for finding in found.findings:
        shown[finding.kind] = shown.get(finding.kind, 0) + 1
        if shown[finding.kind] <= _MOST_OF_A_KIND:
            lines += ["", *_finding(finding)]
    hidden = {kind: number - _MOST_OF_A_KIND for kind, number in shown.items() if number > _MOST_OF_A_KIND}
    if hidden:
        more = ", ".join(f"{number:,} of {kind}" for kind, number in hidden.items())
        lines += ["", f"  and more, which --json lists: {more}"]
    for note in found.notes:
        lines += ["", f"  note: {note}"]
    return as_text(lines)


def _verdict(found: Verification) -> str:
    if found.findings:
        number = len(found.findings)
        return f"DOES NOT HOLD: {number:,} finding{'s' if number > 1 else ''}"
    if not found.steps:
        return "nothing to verify yet"
    rows = "every planned row"
    if found.last_step < found.planned_steps:
        rows += f" up to step {found.last_step:,} of {found.planned_steps:,}"
    if found.reading is None:
        return f"{rows} was trained on once; the corpus was not read again"
    return f"{rows} was trained on once, with the right tokens"


def _totals(found: Verification) -> list[tuple[str, str]]:
    rows = [
        ("plan", " > ".join(found.plan_ids)),
        ("steps", f"{found.steps:,} that count, {found.lost_steps:,} discarded"),
        ("rows", f"{found.rows:,}"),
        ("tokens", f"{count(found.tokens)} supervised ({found.tokens:,})"),
        ("digest", f"{found.data_digest} in the journal"),
    ]
    if found.reading is None:
        rows.append(("corpus", "not read again (--no-read)"))
    else:
        reading = found.reading
        rows.append(("corpus", f"{reading.digest:016x} from {reading.rows:,} rows of {reading.steps:,} steps"))
    rows.append(("checkpoints", f"{found.num_manifests:,} on disk, {found.num_commits:,} recorded in the journal"))
    if found.comparison is not None:
        rows.append(("compared", _comparison(found.comparison)))
    return rows


def _comparison(found: Comparison) -> str:
    common = f"{found.common_steps:,} steps"
    if found.answer == "same":
        return f"{found.other} trained the same rows and tokens in all {common}"
    if found.answer == "same_so_far":
        return (
            f"{found.other} trained the same rows and tokens in the {common} that both have "
            f"({found.own_steps:,} here, {found.other_steps:,} there)"
        )
    if found.answer == "other_plan":
        return f"{found.other} follows another plan from step {found.first_different_step} on"
    return f"{found.other} differs from step {found.first_different_step} on"


def _finding(finding: Finding) -> list[str]:
    return [f"  {finding.kind}: {finding.where}", f"    {finding.what}", f"    {finding.meaning}"]
