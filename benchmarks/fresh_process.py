"""A part of a benchmark in a Python process of its own: what it takes there is its own alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_fresh(arguments: Sequence[str], timeout_s: float, python: str = sys.executable) -> dict[str, Any]:
    """Run a script and return the JSON object of its last line, with ``process_s``, the process's whole life.

    Raises:
        RuntimeError: It failed; the end of what it wrote.
    """
    start = time.perf_counter()
    ended = subprocess.run([python, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
    seconds = time.perf_counter() - start
    if ended.returncode:
        raise RuntimeError(f"{arguments[0]} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return {**result, "process_s": seconds}


def pin_to_one_core() -> None:
    """Let this process and its children run on one core, the last of those that it may use."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def peak_rss_bytes() -> int:
    """Return this process's peak of resident memory, mapped files included.

    ``ru_maxrss`` is no such thing: a child begins with its parent's.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def forget_pages(folder: Path) -> None:
    """Ask the kernel to drop the files below a folder from its page cache, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
