"""Runs benchmarks: options, fresh processes, what a process used, and the stored page with its figures.

A benchmark is a module with a `Benchmark`, whose ``measure`` returns a record and whose ``page`` makes Markdown of it.
Start it from the repository's root: ``python -m benchmarks.bench_packing``. A part that needs a process of its own is a
function that returns JSON values, called by `fresh`.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
NOT_MEASURED = "not yet measured"
MIB = 2**20
Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What `main` runs."""

    name: str
    """The name of the page and its figures in ``results/``."""
    about: str
    measure: Callable[[argparse.Namespace], dict[str, Any]]
    page: Callable[[Record], str]
    packages: Sequence[str]
    """The distributions whose versions matter."""
    hardware: str
    """What the cores are used for."""
    options: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Default and help of each option; the default gives the type, and a list takes several values."""
    quick: Mapping[str, Any] = field(default_factory=dict)
    """The values of options with ``--quick``, which stores nothing."""


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run a benchmark by a command line, by default this process's; print its page, store it and return its record."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(description=benchmark.about)
    for name, (default, text) in benchmark.options.items():
        several = {"nargs": "*"} if isinstance(default, list) else {}
        sample = default[0] if isinstance(default, list) else default
        kind = str if sample is None else type(sample)
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, type=kind, help=text, **several)  # type: ignore[arg-type]
    parser.add_argument("--quick", action="store_true", help="a small case; stores nothing")
    parser.add_argument("--out", type=Path, help="folder for the page (default: benchmarks/results; --quick: none)")
    options = parser.parse_args(arguments)
    if options.quick:
        for name, value in benchmark.quick.items():
            setattr(options, name, value)
    out = options.out or (None if options.quick else RESULTS)
    record = {
        **provenance(benchmark.packages, f"{os.cpu_count()} shared CPU cores, no GPU, {benchmark.hardware}"),
        # Without paths of this machine.
        "command": " ".join(
            ["python", "-m", _module_name(benchmark.measure)]
            + [Path(one).name if one.startswith("/") else one for one in arguments]
        ),
        "load_before": os.getloadavg(),
    }
    record |= benchmark.measure(options)
    record["load_average"] = os.getloadavg()
    page = benchmark.page(record)
    say(page)
    if out is not None:
        store(benchmark.name, page, record, out)
    return record


def provenance(packages: Sequence[str], hardware: str, commit: str | None = None) -> dict[str, Any]:
    """Return date, commit, hardware in words and versions; give the commit where the tree came without its history."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit or _commit(),
        "hardware": hardware,
        "versions": {name: version for name in packages if (version := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # A machine with a GPU may lack Ray.
        return None


def _commit() -> str:
    git = ["git", "-C", str(REPOSITORY)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    return commit.strip() + ("+dirty" if changed.strip() else "")


def fresh(
    function: Callable[..., Any], *arguments: Any, timeout_s: float = 1800.0, python: str = sys.executable
) -> Any:
    """Call a module's function in a fresh Python process and return its result.

    Args:
        function: Its arguments and result are JSON values; paths become strings.
        arguments: Its arguments.
        timeout_s: Limit for the process.
        python: The interpreter.

    Raises:
        RuntimeError: The process failed; the end of its standard error.
    """
    module = _module_name(function)
    values = json.dumps(arguments, default=str)
    command = [python, "-m", "benchmarks.runner", f"{module}:{function.__name__}", values]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=REPOSITORY)
    if ended.returncode:
        raise RuntimeError(f"{function.__name__} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return json.loads(ended.stdout.strip().splitlines()[-1])


def _module_name(function: Callable[..., Any]) -> str:
    """Return the name by which ``python -m`` finds a function's module, which may be the one that was started."""
    path = Path(sys.modules[function.__module__].__file__ or "")
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)


def peak_rss_bytes() -> int:
    """Return this process's peak of resident memory, mapped files included.

    ``ru_maxrss`` does not work: a child begins with its parent's.
    """
    return _status_kib("VmHWM") * 1024


def _status_kib(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0])


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Fill the yielded dictionary with what the block used.

    ``seconds``; ``cpu_s`` and ``read_bytes`` with children that have ended (bytes through calls to the kernel, from the
    page cache or not); ``peak_bytes`` resident, and ``grown_bytes`` beyond what was resident before.
    """
    found: dict[str, float] = {}
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    resident, read = _status_kib("VmRSS") * 1024, _read_bytes()
    cpu, start = _cpu_s(), time.perf_counter()
    yield found
    found["seconds"], found["cpu_s"] = time.perf_counter() - start, _cpu_s() - cpu
    found["read_bytes"], found["peak_bytes"] = _read_bytes() - read, float(peak_rss_bytes())
    found["grown_bytes"] = found["peak_bytes"] - resident


def _cpu_s() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _read_bytes() -> float:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return float(lines["rchar"])


def gpu_provenance(packages: Sequence[str], commit: str | None) -> dict[str, Any]:
    """Return the `provenance` of a page on a GPU; without a GPU it says that this was a trial."""
    import torch

    if not torch.cuda.is_available():
        return provenance(packages, "**a trial on CPUs, whose times mean nothing**", commit)
    gpu = torch.cuda.get_device_properties(0)
    hardware = f"one {gpu.name} ({gpu.total_memory / 2**30:.0f} GiB), CUDA {torch.version.cuda}"
    return provenance(packages, f"{hardware}, cuDNN {torch.backends.cudnn.version()}", commit)


def header(title: str, record: Record, text: str) -> str:
    """Return the top of a page: title, where the figures come from, and how to read them."""
    return "\n\n".join([f"# {title}", origin(record), text])


def origin(record: Record) -> str:
    """Return the sentences of a page that say where its figures come from."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    made = f"{record['date']}, commit {record['commit']}, {record['hardware']}; {versions}."
    text = f"{made} Command: `{record['command']}`."
    if "load_before" not in record:
        return text
    before, after = (", ".join(f"{one:.1f}" for one in record[name]) for name in ("load_before", "load_average"))
    return f"{text} Load average: {before} before, {after} after, this benchmark included."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def columns(rows: Sequence[Any], /, **cells: Callable[[Any], str]) -> str:
    """Return a Markdown table with a column for each keyword, whose underscores are spaces."""
    return table([name.replace("_", " ") for name in cells], [[cell(row) for cell in cells.values()] for row in rows])


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Return median, minimum and maximum."""
    return f"{form.format(median(values))} ({form.format(min(values))} to {form.format(max(values))})"


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio of each pair."""
    return [one / other for one, other in zip(above, below, strict=True)]


def met(is_met: bool) -> str:
    """Return whether a goal is met, as a word."""
    return "met" if is_met else "**not met**"


def say(text: str) -> None:
    """Print a line immediately."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def store(name: str, page: str, record: Record, folder: Path) -> None:
    """Store a page and the figures that it was made from."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(page + "\n")
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    module_name, _, function_name = sys.argv[1].partition(":")
    result = getattr(importlib.import_module(module_name), function_name)(*json.loads(sys.argv[2]))
    say(json.dumps(result))
