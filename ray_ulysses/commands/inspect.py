"""The command ``inspect``: a run's history, checkpoints and data, and the proof that each row was trained on once."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ray_ulysses.clock import Clock, SystemClock
from ray_ulysses.commands.inspect_checks import render_checkpoints, render_verdict, render_verification
from ray_ulysses.commands.options import STEP_NUMBER, AsJson, Quiet, RunDirectory, TrustRun, shortened
from ray_ulysses.commands.output import Waiting, columns, put
from ray_ulysses.errors import UserError
from ray_ulysses.report.words import as_text, count, duration, facts, percent, size, table
from ray_ulysses.run_names import CHECKPOINT_FOLDER

if TYPE_CHECKING:
    from ray_ulysses.inspect.row import RowPiece, RowReport, TextMode, TimesTrained
    from ray_ulysses.inspect.row_checks import ReadingProgress
    from ray_ulysses.inspect.run_data import PlanHistory, SegmentRecord
    from ray_ulysses.storage.place import Place
    from ray_ulysses.tracking.events import RunFailed
    from ray_ulysses.tracking.history import AttemptRecord, RunHistory
    from ray_ulysses.tracking.run_time import StartTime, TimeSpent

EXAMPLE = "Example: ray-ulysses inspect runs/llama-tiny --json; ... --verify; ... --checkpoints"
_LAST_STEPS = 10
_LAST_CHECKPOINTS = 8
_LAST_DIAGNOSTICS = 8
_MOST_DAMAGED = 5
_MOST_NAMED = 5
_STEPS_PER_CHUNK = 1000
_REPORT_EVERY_S = 5.0
_PARTS_OF_A_RUN = {
    "steps_s": "steps that count",
    "startup_s": "start-up",
    "waiting_s": "waiting for workers",
    "recovery_s": "recovery",
    "stages_s": "between stages",
    "lost_steps_s": "lost steps",
    "saves_s": "saves",
    "evaluation_s": "evaluation",
    "other_s": "other",
}
_PARTS_OF_A_START = {
    "cut_off_s": "cut-off steps",
    "detect_s": "detection",
    "form_s": "workers",
    "load_s": "loading",
    "build_s": "building",
    "unknown_s": "unknown",
}


def inspect(
    run: RunDirectory,
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="With --verify: another run whose data is compared.")
    ] = None,
    row: Annotated[
        int | None, typer.Option(help="Show this training row's documents, files, offsets and text.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Prove that every planned row was trained on once; exits with 1 if not.")
    ] = False,
    no_read: Annotated[
        bool, typer.Option("--no-read", help="With --verify: do not read the trained rows from the corpus again.")
    ] = False,
    corpus: Annotated[
        list[str] | None, typer.Option(help="Current location of one of the run's corpora; can be repeated.")
    ] = None,
    text: Annotated[
        Literal["cut", "full", "none"] | None, typer.Option(help="With --row: how much text to show.  [default: cut]")
    ] = None,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="List all checkpoints: state, layout, size, metrics, reason to keep.")
    ] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option("--verify-checkpoint", metavar="STEP", help="Verify every byte of this checkpoint, or latest."),
    ] = None,
    trust_run: TrustRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show a run's attempts, checkpoints, data and goodput, or verify its data."""
    from ray_ulysses.run.run_files import check_run
    from ray_ulysses.storage.place import place_of

    to_verify = None if checkpoint is None else _parse_checkpoint(checkpoint)
    corpora = tuple(map(place_of, corpus or ()))
    place, beside = place_of(run), None if other is None else place_of(other)
    reports = {
        "--row": row is not None,
        "--verify": verify,
        "--checkpoints": checkpoints,
        "--verify-checkpoint": to_verify is not None,
    }
    given = [name for name, is_given in reports.items() if is_given]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: use only one of these options")
    if beside is not None and not verify:
        raise UserError(f"OTHER={str(beside)!r}: comparing two runs requires --verify; add it")
    if no_read and not verify:
        raise UserError("--no-read: applies only to --verify; add --verify, or omit --no-read")
    if corpora and row is None and not verify:
        raise UserError(f"--corpus={corpora[0]}: applies only to --row and --verify; add one of them, or omit --corpus")
    if text is not None and row is None:
        raise UserError(f"--text={text}: applies only to --row; add --row N, or omit --text")
    check_run(place)
    holds = True
    if row is not None:
        _show_row(place, row, corpora, text or "cut", as_json, quiet, trust_run)
    elif verify:
        holds = _show_verification(place, beside, not no_read, corpora, as_json, quiet, trust_run)
    elif checkpoints:
        _show_checkpoints(place, as_json, quiet, trust_run)
    elif to_verify is not None:
        holds = _show_checkpoint(place, to_verify, as_json, quiet, trust_run)
    else:
        _show_history(place, as_json, quiet, trust_run)
    if not holds:
        raise typer.Exit(1)


def _parse_checkpoint(text: str) -> int | Literal["latest"]:
    if text == "latest":
        return "latest"
    if not STEP_NUMBER.match(text):
        raise UserError(f"--verify-checkpoint={shortened(text)}: must be the step of a committed checkpoint, or latest")
    return int(text)


def _show_history(run: Place, as_json: bool, quiet: bool, trust_run: bool) -> None:
    from ray_ulysses.inspect.run_data import read_plan_history, read_run

    with Waiting("reading the journal", is_quiet=quiet):
        history, plan_history = read_run(run, trust_run=trust_run), read_plan_history(run)
    for text in history_json(history, plan_history) if as_json else (render_history(history, plan_history), "\n"):
        put(text, end="", is_exact=as_json)


def _show_row(
    run: Place, row: int, corpora: tuple[Place, ...], text: TextMode, as_json: bool, quiet: bool, trust_run: bool
) -> None:
    from ray_ulysses.inspect.row import report_row

    with Waiting("reading the row", is_quiet=quiet):
        report = report_row(run, row, corpora=corpora, text=text, trust_run=trust_run)
    put(json.dumps(report.to_json(), indent=2) if as_json else render_row(report), is_exact=as_json)


def _show_verification(
    run: Place,
    other: Place | None,
    read: bool,
    corpora: tuple[Place, ...],
    as_json: bool,
    quiet: bool,
    trust_run: bool,
) -> bool:
    from ray_ulysses.inspect.verification import verify_run

    with Waiting("verifying the data", is_quiet=quiet) as wait:
        watch = ReadingReport(wait.say, SystemClock()).rows
        found = verify_run(run, other=other, read=read, corpora=corpora, watch=watch, trust_run=trust_run)
    put(json.dumps(found.to_json(), indent=2) if as_json else render_verification(found), is_exact=as_json)
    return found.holds


def _show_checkpoints(run: Place, as_json: bool, quiet: bool, trust_run: bool) -> None:
    from ray_ulysses.inspect.checkpoint_listing import list_checkpoints

    with Waiting("reading the checkpoints", is_quiet=quiet):
        listing = list_checkpoints(run, trust_run=trust_run)
    put(
        json.dumps(listing.to_json(), indent=2) if as_json else render_checkpoints(listing, columns(sys.stdout)),
        is_exact=as_json,
    )


def _show_checkpoint(run: Place, step: int | Literal["latest"], as_json: bool, quiet: bool, trust_run: bool) -> bool:
    from ray_ulysses.inspect.checkpoint_verification import verify_checkpoint

    with Waiting("verifying the checkpoint", is_quiet=quiet) as wait:
        watch = ReadingReport(wait.say, SystemClock()).bytes
        verdict = verify_checkpoint(run, step, clock=SystemClock(), watch=watch, trust_run=trust_run)
    put(json.dumps(verdict.to_json(), indent=2) if as_json else render_verdict(verdict), is_exact=as_json)
    return verdict.is_whole


def render_history(history: RunHistory, plan_history: PlanHistory | None = None) -> str:
    """Return a run's status, data plan, attempts, checkpoints and last steps as text."""
    lines = [f"run {history.name!r}: {history.status} at step {history.step:,}", *facts(_totals(history))]
    if history.failure is not None:
        lines += ["", *facts(_failure(history.failure))]
    if history.missing_steps:
        ranges = (str(first) if first == last else f"{first}-{last}" for first, last in history.missing_steps)
        lines += ["", f"  MISSING: the journal has no record of steps {', '.join(ranges)}"]
    if history.damaged_records:
        lines += ["", *(f"  DAMAGED: {record}" for record in history.damaged_records[:_MOST_DAMAGED])]
        more = len(history.damaged_records) - _MOST_DAMAGED
        lines += [f"  DAMAGED: {more:,} more records; --json lists all"] if more > 0 else []
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
        if direct := [one.attempt for one in history.attempts if one.lacks_stream]:
            earlier = f" and {len(direct) - _MOST_NAMED:,} earlier attempts" * (len(direct) > _MOST_NAMED)
            named = ", ".join(map(str, direct[-_MOST_NAMED:])) + earlier
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
    if history.samples:
        lines += ["", _titled("samples", 1, len(history.samples))]
        for one in history.samples[-1].samples:
            lines += [f"  step {history.samples[-1].step:,}: {one.prompt}", f"    {one.text}"]
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
    """Yield the output of ``inspect --json`` in chunks, with a line per step: a run may have a million steps."""
    from ray_ulysses.tracking.steps import Steps

    fields = {**replace(history, steps=Steps()).to_json(), **plan_history.to_json()}
    before, begin, after = json.dumps(fields, indent=2).partition('"steps": [')
    yield before + begin
    texts = history.steps.json_lines()
    separator = "\n    "
    while chunk := list(islice(texts, _STEPS_PER_CHUNK)):
        yield separator + ",\n    ".join(chunk)
        separator = ",\n    "
    yield f"\n  {after}\n" if history.steps else f"{after}\n"


def _totals(history: RunHistory) -> list[tuple[str, str]]:
    share, last = history.goodput, history.evaluation
    by_corpus = "" if last is None else ", ".join(f"{one.name} {one.loss:.4f}" for one in last.corpora)
    evaluated = [] if last is None else [("eval loss", f"{last.loss:.4f} after step {last.step:,}")]
    if by_corpus:
        evaluated.append(("  by corpus", by_corpus))
    return [
        ("tokens", f"{count(history.tokens)} ({history.tokens:,})"),
        ("rows consumed", f"{history.rows_consumed:,}"),
        ("data digest", history.data_digest),
        *evaluated,
        ("lost steps", f"{history.lost_steps:,} (discarded by a failure and trained again)"),
        ("goodput", "-" if share is None else f"{percent(share)} of the time was spent on steps that count"),
    ]


def _time(spent: TimeSpent) -> list[str]:
    total = spent.total_s
    if total <= 0:
        return []
    rows = [(f"{seconds:.1f}s", percent(seconds / total), name) for name, seconds in _parts(spent)]
    rows.append((f"{total:.1f}s", percent(1.0), "total of all commands"))
    divided = {"start-up and waiting": spent.starts, "recovery": spent.recovery}
    notes = [f"{name}: {division}" for name, time in divided.items() if (division := _division(time))]
    if spent.between_commands_s > 0:
        notes.append(f"not counted: {duration(spent.between_commands_s)} between commands, when nothing ran")
    return ["", "time", *table(("seconds", "share", "spent on"), rows), *(f"  {note}" for note in notes)]


def goodput_in_words(spent: TimeSpent) -> str:
    """Return the goodput on one line: ``18.90% of 1m22s: steps 15s, start-up 52s``; short parts are omitted."""
    if spent.goodput is None:
        return "- (no step that counts yet)"
    shown = [f"{name} {duration(seconds)}" for name, seconds in _parts(spent) if seconds >= 0.5]
    if division := _division(spent.recovery):
        shown = [f"{part} ({division})" if part.startswith("recovery ") else part for part in shown]
    return f"{percent(spent.goodput)} of {duration(spent.total_s)}: {', '.join(shown)}"


def _division(time: StartTime) -> str:
    """Return the known parts of a start-up or recovery time, in seconds, as text."""
    shown = {name: getattr(time, field) for field, name in _PARTS_OF_A_START.items() if getattr(time, field) >= 0.05}
    return "" if set(shown) <= {"unknown"} else ", ".join(f"{name} {seconds:.1f}s" for name, seconds in shown.items())


def _parts(spent: TimeSpent) -> list[tuple[str, float]]:
    parts = {field: (name, getattr(spent, field)) for field, name in _PARTS_OF_A_RUN.items()}
    if not spent.stages_s:
        # Most runs have none.
        del parts["stages_s"]
    return list(parts.values())


def _failure(failure: RunFailed) -> list[tuple[str, str]]:
    from ray_ulysses.tracking.failures import describe_failure

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
    validation = f"; validation: {', '.join(segment.validation)}" if segment.validation else ""
    return (str(segment.segment), segment.plan_id, *cells, segment.packing, ", ".join(sources) + validation)


def _attempt(attempt: AttemptRecord) -> tuple[str, ...]:
    steps = "-" if attempt.first_step is None else f"{attempt.first_step}-{attempt.last_step}"
    first = "-" if attempt.seconds_to_first_step is None else duration(attempt.seconds_to_first_step)
    sizes = (str(attempt.world_size), str(attempt.sp_size), str(attempt.dp_size))
    source = "-" if attempt.resumed_from is None else attempt.resumed_from.removeprefix(f"{CHECKPOINT_FOLDER}/")
    return (*sizes, source, steps, first, (attempt.reason or "end not recorded").partition("\n")[0])


def _titled(name: str, shown: int, total: int) -> str:
    return name if shown == total else f"{name} (the last {shown} of {total:,})"


def render_row(report: RowReport) -> str:
    """Return a row's figures, a table of its pieces, and each piece's text."""
    lines = [f"row {report.row:,} of run {report.run!r}", *facts(_row_totals(report)), "", "corpora"]
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
        lines += _piece_text(number, piece)
    return as_text(lines)


def _row_totals(report: RowReport) -> list[tuple[str, str]]:
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


def _piece_text(number: int, piece: RowPiece) -> list[str]:
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
    """Describe a piece's supervised tokens; empty if all tokens but the first are supervised, as in plain text."""
    stop = piece.start + piece.length + piece.goes_on
    if piece.labels is None or piece.labels == ((piece.start + 1, stop),):
        return ""
    return "; supervised (between ⟦ and ⟧): " + (", ".join(f"[{a:,}, {b:,})" for a, b in piece.labels) or "nothing")


def _quoted(text: str) -> list[str]:
    return [f"  | {line}".rstrip(" ") for line in text.split("\n")]


class ReadingReport:
    """Prints the amount of data read, the rate and the remaining time.

    Args:
        write: Prints a line.
        clock: Clock that measures the rate.
    """

    def __init__(self, write: Callable[[str], None], clock: Clock) -> None:
        self._write, self._clock = write, clock
        self._started: float | None = None
        self._reported = 0.0

    def rows(self, progress: ReadingProgress) -> None:
        """Report how many of the run's rows have been read from its corpora."""
        text = f"{progress.rows:,} of {progress.num_rows:,} rows"
        self._report(text, progress.rows, progress.num_rows, lambda s: f"{count(progress.tokens / s)} tokens/s")

    def bytes(self, done: int, total: int) -> None:
        """Report how many bytes of a checkpoint have been read."""
        self._report(f"{size(done)} of {size(total)}", done, total, lambda s: f"{size(done / s)}/s")

    def _report(self, text: str, done: int, total: int, rate: Callable[[float], str]) -> None:
        now = self._clock.monotonic()
        if self._started is None:
            self._started = self._reported = now
        if now - self._reported < _REPORT_EVERY_S:
            return
        self._reported = now
        elapsed = now - self._started
        left = duration(elapsed / done * (total - done))
        self._write(f"read {text} ({percent(done / total)}), {rate(elapsed)}, about {left} left")
