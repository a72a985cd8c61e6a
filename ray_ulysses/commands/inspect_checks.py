"""Renders the output of ``ray-ulysses inspect`` with ``--checkpoints``, ``--verify-checkpoint`` and ``--verify``."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_ulysses.report.words import as_text, count, duration, facts, size, table

if TYPE_CHECKING:
    from ray_ulysses.inspect.checkpoint_listing import CheckpointListing, CheckpointReport
    from ray_ulysses.inspect.checkpoint_verification import CheckpointVerdict, FileVerdict
    from ray_ulysses.inspect.journal_checks import Comparison
    from ray_ulysses.inspect.verification import Verification

_MOST_FILES = 64
_MOST_OF_A_KIND = 10
_STATES = {
    "whole": "whole",
    "damaged": "DAMAGED",
    "unreadable": "UNREADABLE",
    "superseded": "fenced out",
    "set_aside": "set aside",
    "foreign": "other version",
    "being_written": "writing",
    "not_committed": "leftover",
}
_VERDICTS = _STATES | {"superseded": "NOT PART OF THE RUN", "foreign": "OF ANOTHER VERSION"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Column:
    name: str
    cell: Callable[[CheckpointReport], str]
    rank: int = 0
    """Columns with a higher rank are dropped first if a row is too wide."""


def render_checkpoints(listing: CheckpointListing, width: int | None = None) -> str:
    """Return a table of a run's checkpoint directories, with notes.

    Args:
        listing: The checkpoints.
        width: Characters per line, or None for no limit. Columns that do not fit are dropped and listed.
    """
    reports = listing.checkpoints
    lines = [f"run {listing.name!r}: {_summary(listing)}", *facts(_totals(listing))]
    if listing.refusal is not None:
        lines += ["", f"  {listing.refusal}"]
    if reports:
        columns, hidden = _fitting(reports, width)
        header = [column.name for column in columns]
        lines += ["", *table(header, [[column.cell(report) for column in columns] for report in reports])]
        if hidden:
            names = ", ".join(column.name for column in _COLUMNS if column in hidden)
            lines.append(f"  not shown, since the line is too short: {names}")
    for report in reports:
        for note in _notes(report):
            lines += ["", f"  {note}"]
    return as_text(lines)


def _summary(listing: CheckpointListing) -> str:
    if not listing.checkpoints:
        return "no checkpoint yet" if listing.refusal is None else "NO CHECKPOINT FOUND"
    usable = sum(report.condition == "whole" for report in listing.checkpoints)
    words = [f"{usable} checkpoint{'' if usable == 1 else 's'} with files of the right size"]
    for condition, word in _STATES.items():
        number = sum(report.condition == condition for report in listing.checkpoints)
        if number and condition != "whole":
            words.append(f"{number} {word.lower()}")
    return ", ".join(words)


def _totals(listing: CheckpointListing) -> list[tuple[str, str]]:
    rows = [("store", listing.location)]
    if listing.checkpoints or listing.refusal is not None:
        rows.append(("resumes", _start(listing)))
    if listing.checkpoints:
        named = sum(report.num_bytes for report in listing.checkpoints)
        left = sum(report.leftover_bytes for report in listing.checkpoints)
        beside = f", plus {size(left)} of leftover files" if left else ""
        rows.append(("size", f"{size(named)}{beside}"))
    rules = list(dict.fromkeys(rule for report in listing.checkpoints for rule in report.kept))
    if rules:
        rows.append(("kept by", ", ".join(rules)))
    return rows


def _start(listing: CheckpointListing) -> str:
    if listing.refusal is not None:
        return "would be refused (see below)"
    if listing.resumes_from is None:
        return "from model.resume_from if set, else from step 0"
    by_then = f", or from step {max(listing.unless):,} if that checkpoint is readable by then" if listing.unless else ""
    return f"from step {listing.resumes_from:,}{by_then}"


def _fitting(reports: Sequence[CheckpointReport], width: int | None) -> tuple[list[_Column], list[_Column]]:
    """Split the columns into those that fit on a line and those that do not; omit empty columns."""
    columns = [column for column in _COLUMNS if any(column.cell(report) != "-" for report in reports)]
    hidden: list[_Column] = []
    for column in sorted(columns, key=lambda column: -column.rank):
        lines = table([one.name for one in columns], [[one.cell(report) for one in columns] for report in reports])
        if width is None or max(map(len, lines)) <= width or column.rank == 0:
            break
        columns.remove(column)
        hidden.append(column)
    return columns, hidden


def _notes(report: CheckpointReport) -> list[str]:
    notes = []
    if report.condition not in ("whole", "set_aside"):
        notes.append(f"step {report.step}, {_STATES[report.condition]}: {report.why}")
    for aside in report.set_aside:
        when = f", {_moment(aside.at)} UTC" if aside.at is not None else ""
        notes.append(f"step {report.step}, set aside by attempt {aside.attempt}{when}: {aside.reason}")
    if report.condition == "set_aside" and report.is_swept:
        notes[-1] += "; a later commit deletes its remaining files"
    return notes


def _layout(report: CheckpointReport) -> str:
    if report.dp_size is None:
        return "-"
    ring = f" (ring {report.ring_size})" if report.ring_size not in (None, 1) else ""
    return f"{report.dp_size} x {report.sp_size}{ring}"


def _loss(name: str) -> Callable[[CheckpointReport], str]:
    return lambda report: f"{report.metrics[name]:.4f}" if name in report.metrics else "-"


def _moment(seconds: float | None, form: str = "%Y-%m-%d %H:%M") -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime(form) if seconds else "-"


_COLUMNS: tuple[_Column, ...] = (
    _Column(name="step", cell=lambda report: str(report.step)),
    _Column(name="state", cell=lambda report: _STATES[report.condition]),
    _Column(name="attempt", cell=lambda report: _or_dash(report.attempt), rank=2),
    _Column(name="ranks", cell=lambda report: _or_dash(report.world_size), rank=4),
    _Column(name="dp x sp", cell=_layout, rank=6),
    _Column(name="zero", cell=lambda report: _or_dash(report.zero_stage), rank=7),
    _Column(name="size", cell=lambda report: size(report.num_bytes)),
    _Column(name="written UTC", cell=lambda report: _moment(report.written_at, "%m-%d %H:%M"), rank=1),
    _Column(name="loss", cell=_loss("loss"), rank=3),
    _Column(name="eval loss", cell=_loss("eval_loss"), rank=5),
    _Column(name="saved by", cell=lambda report: report.reason or "-", rank=8),
    # The line above the table shows the full rules.
    _Column(
        name="kept by", cell=lambda report: ", ".join(rule.partition(" ")[0] for rule in report.kept) or "-", rank=1
    ),
)


def _or_dash(value: object | None) -> str:
    return "-" if value is None else str(value)


def render_verdict(verdict: CheckpointVerdict) -> str:
    """Return the result of verifying every byte of a checkpoint, as text."""
    title = f"checkpoint of step {verdict.step:,} of run {verdict.name!r}: {_VERDICTS[verdict.condition]}"
    lines = [title, *facts(_read(verdict))]
    if verdict.problem is not None:
        lines += ["", f"  {verdict.problem}"]
    bad = [file for file in verdict.files if file.problem is not None]
    good = [file for file in verdict.files if file.problem is None]
    # A checkpoint may have thousands of files: show the damaged files first.
    shown = [*bad, *good[: max(_MOST_FILES - len(bad), 0)]]
    if shown:
        ordered = [file for file in verdict.files if file in shown]
        lines += ["", *table(("size", "parts", "state", "file"), [_file(file) for file in ordered])]
    if len(shown) < len(verdict.files):
        lines.append(f"  and {len(verdict.files) - len(shown):,} more, all intact (--json lists them)")
    for file in bad:
        lines += ["", f"  {file.problem}"]
    if verdict.condition == "unreadable":
        lines += ["", "  unreadable files may be intact: repair the storage and verify again"]
    return as_text(lines)


def _read(verdict: CheckpointVerdict) -> list[tuple[str, str]]:
    rows = [("store", verdict.location), ("directory", verdict.path)]
    if verdict.attempt is not None:
        num_bytes = sum(file.num_bytes for file in verdict.files)
        speed = f" in {duration(verdict.seconds)}, {size(num_bytes / verdict.seconds)}/s" if verdict.seconds > 1 else ""
        covered = f"{verdict.num_tensors:,} tensors, {count(verdict.num_elements)} elements, each stored once"
        rows += [
            ("written by", f"attempt {verdict.attempt}, {verdict.world_size} ranks"),
            ("manifest", covered),
            ("read", f"{size(num_bytes)}{speed}"),
        ]
    return rows


def _file(file: FileVerdict) -> tuple[str, ...]:
    state = "whole" if file.problem is None else "UNREADABLE" if file.is_unread else "DAMAGED"
    return (size(file.num_bytes), str(file.num_tensors), state, file.file)


def render_verification(found: Verification) -> str:
    """Return the verified claims, the findings and the notes, as text."""
    lines = [f"run {found.name!r} ({found.status}): {_data_verdict(found)}", *facts(_data_totals(found))]
    shown: dict[str, int] = {}
    for finding in found.findings:
        shown[finding.kind] = shown.get(finding.kind, 0) + 1
        if shown[finding.kind] <= _MOST_OF_A_KIND:
            lines += ["", f"  {finding.kind}: {finding.where}", f"    {finding.what}", f"    {finding.meaning}"]
    hidden = {kind: number - _MOST_OF_A_KIND for kind, number in shown.items() if number > _MOST_OF_A_KIND}
    if hidden:
        more = ", ".join(f"{number:,} of {kind}" for kind, number in hidden.items())
        lines += ["", f"  more findings (--json lists all): {more}"]
    for note in found.notes:
        lines += ["", f"  note: {note}"]
    return as_text(lines)


def _data_verdict(found: Verification) -> str:
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


def _data_totals(found: Verification) -> list[tuple[str, str]]:
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
            f"{found.other} trained the same rows and tokens in the {common} of both runs "
            f"({found.own_steps:,} here, {found.other_steps:,} there)"
        )
    if found.answer == "other_plan":
        return f"{found.other} follows another plan from step {found.first_different_step} on"
    return f"{found.other} differs from step {found.first_different_step} on"
