"""Prints what ``inspect`` is asked about a run, and returns whether it holds; imports only what the answer needs."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Literal

from ray_ulysses.views.streams import put
from ray_ulysses.views.waiting import Waiting

if TYPE_CHECKING:
    from ray_ulysses.forensics.request import TextMode
    from ray_ulysses.storage.place import Place


def show_history(run: Place, as_json: bool, quiet: bool, trust_run: bool) -> None:
    """Print what happened in a run."""
    from ray_ulysses.forensics.plan_history import read_plan_history
    from ray_ulysses.forensics.run_storage import read_run
    from ray_ulysses.views.inspect import history_json, render_history

    with Waiting("reading the journal", is_quiet=quiet):
        history, plan_history = read_run(run, trust_run=trust_run), read_plan_history(run)
    for text in history_json(history, plan_history) if as_json else (render_history(history, plan_history), "\n"):
        put(text, end="")


def show_row(
    run: Place, row: int, corpora: tuple[Place, ...], text: TextMode, as_json: bool, quiet: bool, trust_run: bool
) -> None:
    """Print a training row."""
    from ray_ulysses.forensics.row import report_row
    from ray_ulysses.views.inspect_row import render_row

    with Waiting("reading the row", is_quiet=quiet):
        report = report_row(run, row, corpora=corpora, text=text, trust_run=trust_run)
    put(json.dumps(report.to_json(), indent=2) if as_json else render_row(report))


def verify(
    run: Place,
    other: Place | None,
    read: bool,
    corpora: tuple[Place, ...],
    as_json: bool,
    quiet: bool,
    trust_run: bool,
) -> bool:
    """Print whether every planned row was trained on once, and return it."""
    from ray_ulysses.clock import SystemClock
    from ray_ulysses.forensics.verification import verify_run
    from ray_ulysses.views.reading_report import ReadingReport
    from ray_ulysses.views.verification import render_verification

    with Waiting("verifying the data", is_quiet=quiet) as wait:
        watch = ReadingReport(wait.say, SystemClock()).rows
        found = verify_run(run, other=other, read=read, corpora=corpora, watch=watch, trust_run=trust_run)
    put(json.dumps(found.to_json(), indent=2) if as_json else render_verification(found))
    return found.holds


def show_checkpoints(run: Place, as_json: bool, quiet: bool, trust_run: bool) -> None:
    """Print every checkpoint."""
    from ray_ulysses.forensics.checkpoint_listing import list_checkpoints
    from ray_ulysses.views.checkpoints import render_checkpoints

    with Waiting("reading the checkpoints", is_quiet=quiet):
        listing = list_checkpoints(run, trust_run=trust_run)
    put(json.dumps(listing.to_json(), indent=2) if as_json else render_checkpoints(listing, _width()))


def check_checkpoint(run: Place, step: int | Literal["latest"], as_json: bool, quiet: bool, trust_run: bool) -> bool:
    """Print whether every byte of a checkpoint is right, and return it."""
    from ray_ulysses.clock import SystemClock
    from ray_ulysses.forensics.checkpoint_verification import verify_checkpoint
    from ray_ulysses.views.checkpoints import render_verdict
    from ray_ulysses.views.reading_report import ReadingReport

    with Waiting("verifying the checkpoint", is_quiet=quiet) as wait:
        watch = ReadingReport(wait.say, SystemClock()).bytes
        verdict = verify_checkpoint(run, step, clock=SystemClock(), watch=watch, trust_run=trust_run)
    put(json.dumps(verdict.to_json(), indent=2) if as_json else render_verdict(verdict, _width()))
    return verdict.is_whole


def _width() -> int | None:
    """Return the width of the terminal; None if the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
