"""The command ``report``."""

from __future__ import annotations

from typing import Annotated

import typer

from ray_ulysses.commands.options import Quiet, RunDirectory, TrustRun
from ray_ulysses.commands.output import Waiting, put_line
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.run_names import REPORT_FILE

EXAMPLE = "Example: ray-ulysses report runs/llama-tiny --out report.html; ... --beside runs/another"


def report(
    run: RunDirectory,
    beside: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="Another run to draw in the same plots; may be repeated.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="HTML file to write.  [default: RUN/report.html]", show_default=False)
    ] = None,
    trust_run: TrustRun = False,
    quiet: Quiet = False,
) -> None:
    """Write a run's report as one HTML file that needs no network. The run may still be training or have failed."""
    from ray_ulysses.run.run_files import check_run
    from ray_ulysses.storage.place import open_store, place_of

    place, others = place_of(run), [place_of(other) for other in beside or ()]
    check_run(place)
    for other in others:
        check_run(other, "--beside")
    file = place / REPORT_FILE if out is None else place_of(out)
    if file.name in ("", ".."):
        raise UserError(f"--out={out!r}: is not a file name; use a name such as report.html")
    with Waiting("loading libraries", is_quiet=quiet) as wait:
        from ray_ulysses.report.page import render_report

        wait.phase("drawing the report")
        text = render_report(place, others, trust_run=trust_run)
    try:
        open_store(file.parent).replace(file.name, [text.encode()])
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"--out={str(file)!r}: can't be written ({reason}); use another file") from error
    put_line(f"report of run {place.absolute().name!r}: {file} ({len(text.encode()):,} bytes)")
