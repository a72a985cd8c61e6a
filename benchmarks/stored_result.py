"""What every benchmark's result has: where it comes from, tables of text, and a page beside its figures."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
NOT_MEASURED = "not yet measured"
MIB = 2**20


def provenance(packages: Sequence[str], hardware: str) -> dict[str, Any]:
    """Return date, commit, hardware in words and versions.

    Args:
        packages: The distributions whose versions matter.
        hardware: What the cores are used for, said after their number.
    """
    return _provenance(packages, f"{os.cpu_count()} shared CPU cores, no GPU, {hardware}", _commit())


def _commit() -> str:
    git = ["git", "-C", str(REPOSITORY)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    return commit.strip() + ("+dirty" if changed.strip() else "")


def _provenance(packages: Sequence[str], hardware: str, commit: str) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "hardware": hardware,
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def gpu_provenance(packages: Sequence[str], commit: str | None) -> dict[str, Any]:
    """Return date, commit, the GPU and versions; without a GPU, that it was a trial.

    Args:
        packages: The distributions whose versions matter.
        commit: The commit, where the tree came without its history.
    """
    import torch

    if not torch.cuda.is_available():
        return _provenance(packages, "**a trial on CPUs, whose times mean nothing**", commit or _commit())
    gpu = torch.cuda.get_device_properties(0)
    hardware = f"one {gpu.name} ({gpu.total_memory / 2**30:.0f} GiB), CUDA {torch.version.cuda}"
    cudnn = f"cuDNN {torch.backends.cudnn.version()}"
    return _provenance(packages, f"{hardware}, {cudnn}", commit or _commit())


def origin(record: Mapping[str, Any]) -> str:
    """Return the sentences of a page that say where its figures come from."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    made = f"{record['date']}, commit {record['commit']}, {record['hardware']}; {versions}"
    text = f"{made}. Command: `{record['command']}`."
    if "load_before" not in record:
        return text
    before, after = (", ".join(f"{load:.1f}" for load in record[name]) for name in ("load_before", "load_average"))
    return (
        f"{text} Load average over 1, 5 and 15 minutes: {before} before the run, {after} at its end, its own included."
    )


def command(script: str) -> str:
    """Return the command line that this process was started with, without paths of this machine."""
    return " ".join(["python", f"benchmarks/{script}", *(_short(argument) for argument in sys.argv[1:])])


def _short(argument: str) -> str:
    return Path(argument).name if argument.startswith("/") else argument


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Return median, minimum and maximum."""
    return f"{form.format(median(values))} ({form.format(min(values))} to {form.format(max(values))})"


def met(is_met: bool) -> str:
    """Return whether a goal is met, as a word."""
    return "met" if is_met else "**not met**"


def say(text: str) -> None:
    """Show a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def store(name: str, page: str, record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Store a page and the figures that it was made from; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.md", folder / f"{name}.json"]
    paths[0].write_text(page + "\n")
    paths[1].write_text(json.dumps(record, indent=1) + "\n")
    return paths
