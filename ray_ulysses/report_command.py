"""The command ``report``; `cli` registers it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: ray-ulysses report runs/llama-tiny --out report.html; ... --beside runs/another"


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory: <run.storage>/<run.name>.")],
    beside: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Another run, drawn beside it with the same axes.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write.  [default: RUN/report.html]", show_default=False)
    ] = None,
) -> None:
    """Draw what happened in a run as one HTML file that needs no network; the run may be training or broken."""
    from ray_ulysses.errors import RunError
    from ray_ulysses.forensics.request import check_run

    check_run(run)
    if beside is not None:
        check_run(beside, "--beside")
    from ray_ulysses.report.page import render_report
    from ray_ulysses.storage.atomic import write_text

    file = run / "report.html" if out is None else out
    text = render_report(run, beside)
    try:
        write_text(file, text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"--out={str(file)!r}: can't be written ({reason}); give another file") from error
    typer.echo(f"report of run {run.absolute().name!r}: {file} ({os.path.getsize(file):,} bytes)")
