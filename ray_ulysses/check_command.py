"""The command ``check``; `cli` registers it."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated

import typer

from ray_ulysses.command_options import AsJson, ConfigPath, Overrides, Quiet, load_run_config
from ray_ulysses.views.streams import put, put_line
from ray_ulysses.views.waiting import Waiting

EXAMPLE = "Example: ray-ulysses check configs/llama-tiny_cpu_sp2-dp2_8k.yaml --steps 20"


def check(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Steps to train before the checkpoint.", min=6)] = 50,
    stage: Annotated[str | None, typer.Option(help="Stage to check.  [default: the last]", show_default=False)] = None,
    max_memory: Annotated[
        float, typer.Option(help="Percentage of memory.device_gib that a rank may take.", min=1, max=100)
    ] = 75.0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the files of the trial run.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a short copy of a run at its full context, and say what would go wrong, before the whole run is paid for.

    The costliest rows come first. Memory, speed, losses and a checkpoint that is written and loaded are held against
    the plan. Exits with 1 and names the lines that failed.
    """
    loaded = load_run_config(config, overrides)
    with Waiting("loading libraries", is_quiet=quiet):
        from ray_ulysses.cluster.check_command import CheckOptions, run_check
        from ray_ulysses.views.check import render_check
        from ray_ulysses.views.console import open_console

    options = CheckOptions(steps=steps, stage=stage, max_memory=max_memory, keep=keep, is_quiet=quiet)
    report = run_check(loaded, options, open_console(stderr=as_json), partial(put_line, stderr=True))
    put(json.dumps(report.to_json(), indent=2) if as_json else render_check(report))
    if report.failed:
        raise typer.Exit(1)
