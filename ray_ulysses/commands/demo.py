"""The command ``demo``."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import typer

from ray_ulysses.commands.options import Quiet
from ray_ulysses.commands.output import put, put_line

EXAMPLE = "Example: mkdir demo && cd demo && ray-ulysses demo"
CONFIG = Path(__file__).parents[1] / "demo.yaml"
"""Path of the smallest configuration that the package ships."""
_CORPUS = "runs/corpus-stdlib"


def demo(quiet: Quiet = False) -> None:
    """Prepare a corpus, plan and train a small model on this machine's CPU in a few minutes. Writes to ./runs.

    The corpus is Python's standard library. Needs no download and no GPU, and prints each command that it runs.
    """
    config = Path.cwd() / "demo.yaml"
    if not config.exists():
        config.write_bytes(CONFIG.read_bytes())
    library = sysconfig.get_path("stdlib")
    chosen = ["--pattern", "*.py", "--exclude", "site-packages", "--tokenizer", "bytes", "--out", _CORPUS]
    for arguments in (["prepare", library, *chosen], ["plan", config.name]):
        done = subprocess.run(_said(arguments, quiet), check=False)
        if done.returncode != 0:
            raise typer.Exit(done.returncode)
    # `train` replaces this process, so that it alone receives Ctrl-C and saves.
    command = _said(["train", config.name], quiet)
    os.execv(command[0], command)


def _said(arguments: list[str], quiet: bool) -> list[str]:
    """Print a command as a user would type it, and return the argument list that runs it with this interpreter."""
    if quiet:
        arguments = [*arguments, "--quiet"]
    else:
        put("")
        put_line(f"$ ray-ulysses {shlex.join(arguments)}")
    return [sys.executable, "-m", "ray_ulysses", *arguments]
