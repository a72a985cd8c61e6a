"""Renders the text and the JSON of ``ray-ulysses inspect``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from ray_ulysses.forensics.plan_history import PlanHistory, SegmentRecord
from ray_ulysses.report.words import as_text, count, duration, facts, percent, table
from ray_ulysses.run_names import CHECKPOINT_FOLDER
from ray_ulysses.tracking.counted_steps import Steps
from ray_ulysses.tracking.events import RunFailed
from ray_ulysses.tracking.failures import describe_failure
from ray_ulysses.tracking.history import AttemptRecord, RunHistory
from ray_ulysses.tracking.time_spent import TimeSpent
from ray_ulysses.views.time_spent import divisions_in_words, pause_in_words, time_rows

_LAST_STEPS = 10
_LAST_CHECKPOINTS = 8
_LAST_DIAGNOSTICS = 8
_MOST_DAMAGED = 5
_MOST_NAMED = 5
_STEPS_PER_CHUNK = 1000


def render_history(history: RunHistory, plan_history: PlanHistory | None = None) -> str:
    """Return a run's state, its data plan, attempts, checkpoints and last steps."""
    lines = [f"run {history.name!r}: {history.status} at step {history.step:,}", *facts(_totals(history))]
    if history.failure is not None:
        lines += ["", *facts(_failure(history.failure))]
    if history.missing_steps:
        lines += ["", f"  MISSING: the journal has no record of steps {_ranges(history.missing_steps)}"]
    if history.damaged_records:
        lines += ["", *(f"  DAMAGED: {record}" for record in history.damaged_records[:_MOST_DAMAGED])]
        more = len(history.damaged_records) - _MOST_DAMAGED
        lines += [f"  DAMAGED: and {more:,} more records; --json lists all"] if more > 0 else []
    if plan_history is not None:
        lines += _plan_lines(plan_history)
    lines += _time(history.time_spent)
    if history.attempts:
        has_stages = any(attempt.stage is not None for attempt in history.attempts)
        header = ("attempt", *["stage"] * has_stages, "workers", "sp", "dp", "from", "steps", "to first step", "ended")
        rows = [
            (str(attempt.attempt), *[attempt.stage or "-"] * has_stages, *_attempt(attempt))
            for attempt in history.attempts
        ]
        lines += ["", "attempts", *table(header, rows)]
        direct = [one.attempt for one in history.attempts if one.lacks_stream]
        if direct:
            named = ", ".join(map(str, direct[-_MOST_NAMED:])) + f" and {len(direct) - _MOST_NAMED:,} earlier ones" * (
                len(direct) > _MOST_NAMED
            )
            attempts = "attempts" if len(direct) > 1 else "attempt"
            lines.append(f"  the stream never started, and the workers read all rows: {attempts} {named}")
    if history.checkpoints:
        shown = history.checkpoints[-_LAST_CHECKPOINTS:]
        checkpoints = [
            (str(c.step), str(c.world_size or "-"), "committed" if c.committed else "not committed", c.path)
            for c in shown
        ]
        lines += ["", _titled("checkpoints", len(shown), len(history.checkpoints))]
        lines += table(("step", "workers", "state", "path"), checkpoints)
    if history.diagnostics:
        left = history.diagnostics[-_LAST_DIAGNOSTICS:]
        lines += ["", _titled("diagnostics", len(left), len(history.diagnostics)), *(f"  {key}" for key in left)]
    if history.steps:
        last = history.steps[-_LAST_STEPS:]
        steps = [
            (
                str(s.step),
                f"{s.loss:.4f}" if math.isfinite(s.loss) else "-",
                f"{s.tokens:,}",
                f"[{s.rows[0]}, {s.rows[1]})",
                str(s.attempt),
            )
            for s in last
        ]
        lines += ["", _titled("steps", len(last), len(history.steps))]
        lines += table(("step", "loss", "tokens", "rows", "attempt"), steps)
    return as_text(lines)


def history_json(history: RunHistory, plan_history: PlanHistory) -> Iterator[str]:
    """Yield the text of ``inspect --json`` in chunks, with one line per step: a run may have a million."""
    fields = {**replace(history, steps=Steps()).to_json(), **plan_history.to_json()}
    before, begin, after = json.dumps(fields, indent=2).partition('"steps": [')
    yield before + begin
    texts = map(json.dumps, history.steps.to_json())
    separator = "\n    "
    while chunk := list(islice(texts, _STEPS_PER_CHUNK)):
        yield separator + ",\n    ".join(chunk)
        separator = ",\n    "
    yield f"\n  {after}\n" if history.steps else f"{after}\n"


def _totals(history: RunHistory) -> list[tuple[str, str]]:
    goodput = "-" if history.goodput is None else percent(history.goodput)
    return [
        ("tokens", f"{count(history.tokens)} ({history.tokens:,})"),
        ("rows consumed", f"{history.rows_consumed:,}"),
        ("data digest", history.data_digest),
        ("lost steps", f"{history.lost_steps:,} (discarded by a failure and trained again)"),
        ("goodput", f"{goodput} of the time was spent on steps that count"),
    ]


def _time(spent: TimeSpent) -> list[str]:
    rows = time_rows(spent)
    if not rows:
        return []
    pause = pause_in_words(spent)
    notes = [*divisions_in_words(spent), *([] if pause is None else [pause])]
    return ["", "time", *table(("seconds", "share", "spent on"), rows), *(f"  {note}" for note in notes)]


def _failure(failure: RunFailed) -> list[tuple[str, str]]:
    rows = [("failed", describe_failure(failure)), ("what to do", f"{failure.way_out}; the same command resumes")]
    return rows if failure.node is None else [*rows, ("node", failure.node)]


def _plan_lines(plan_history: PlanHistory) -> list[str]:
    if plan_history.problem is not None:
        return ["", f"  PLAN: {plan_history.problem}"]
    if not plan_history.segments:
        return []
    header: tuple[str, ...] = (
        "segment", "plan", "after step", "from row", "context", "rows per step", "packing", "sources",
    )  # fmt: skip
    rows = [_segment(segment) for segment in plan_history.segments]
    names = [segment.stage for segment in plan_history.segments]
    if any(names):
        # Most runs have none.
        header = (*header[:2], "stage", *header[2:])
        rows = [(*row[:2], name or "-", *row[2:]) for name, row in zip(names, rows, strict=True)]
    return ["", "plan", *table(header, rows)]


def _segment(segment: SegmentRecord) -> tuple[str, ...]:
    sources = [
        source.path if source.weight is None else f"{source.path} (weight {source.weight:g})"
        for source in segment.sources
    ]
    numbers = (segment.base_step, segment.base_row, segment.context_tokens, segment.rows_per_step)
    cells = tuple(f"{number:,}" for number in numbers)
    return (str(segment.segment), segment.plan_id, *cells, segment.packing, ", ".join(sources))


def _attempt(attempt: AttemptRecord) -> tuple[str, ...]:
    steps = "-" if attempt.first_step is None else f"{attempt.first_step}-{attempt.last_step}"
    first = "-" if attempt.seconds_to_first_step is None else duration(attempt.seconds_to_first_step)
    sizes = (str(attempt.world_size), str(attempt.sp_size), str(attempt.dp_size))
    source = "-" if attempt.resumed_from is None else attempt.resumed_from.removeprefix(f"{CHECKPOINT_FOLDER}/")
    return (*sizes, source, steps, first, (attempt.reason or "end not recorded").partition("\n")[0])


def _titled(name: str, shown: int, total: int) -> str:
    return name if shown == total else f"{name} (the last {shown} of {total:,})"


def _ranges(ranges: tuple[tuple[int, int], ...]) -> str:
    """Format ranges of numbers: ``3, 7-9``."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
