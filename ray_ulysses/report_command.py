"""The command ``report``; `cli` registers it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from ray_ulysses.command_options import Quiet
from ray_ulysses.views.waiting import Waiting

EXAMPLE = "Example: ray-ulysses report runs/llama-tiny --out report.html; ... --beside runs/another; ... --watch"


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory: <run.storage>/<run.name>.")],
    beside: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Another run, drawn beside it with the same axes.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write.  [default: RUN/report.html]", show_default=False)
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve it, drawn again as the run goes on, until Ctrl-C.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="Address that --watch listens on; anyone who reaches it can read.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of --watch; 0 takes a free one.")] = 8800,
    quiet: Quiet = False,
) -> None:
    """Draw what happened in a run as one HTML file that needs no network; the run may be training or broken."""
    from ray_ulysses.errors import RunError, UserError
    from ray_ulysses.forensics.request import check_run

    check_run(run)
    if beside is not None:
        check_run(beside, "--beside")
    if watch:
        if out is not None:
            raise UserError(f"--watch writes no file; leave out --out={str(out)!r}, or --watch")
        _serve(run, beside, host, port)
        return
    from ray_ulysses.run_names import REPORT_FILE
    from ray_ulysses.storage.atomic import write_text

    file = run / REPORT_FILE if out is None else out
    with Waiting("loading libraries", is_quiet=quiet) as wait:
        from ray_ulysses.report.page import render_report

        wait.phase("drawing the report")
        text = render_report(run, beside)
    try:
        write_text(file, text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"--out={str(file)!r}: can't be written ({reason}); give another file") from error
    typer.echo(f"report of run {run.absolute().name!r}: {file} ({os.path.getsize(file):,} bytes)")


def _serve(run: Path, beside: Path | None, host: str, port: int) -> None:
    """Serve the report until interrupted."""
    from ray_ulysses.report.live import LiveReport, open_server

    with open_server(LiveReport(run, beside), host, port) as server:
        typer.echo(
            f"report of run {run.absolute().name!r}: http://{host}:{server.server_address[1]}/  (Ctrl-C ends it)"
        )
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
