"""The GPU's clocks, power and temperature while something is measured, as the driver reports them."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
COMMAND = (
    "nvidia-smi",
    "--id=0",
    f"--query-gpu={','.join(FIELDS)}",
    "--format=csv,noheader,nounits",
    "--loop-ms=500",
)


@contextmanager
def logged(command: Sequence[str] = COMMAND) -> Iterator[dict[str, Any]]:
    """Log until the block ends; give a mapping that then holds minimum, median and maximum of each field.

    It stays empty where there is no driver.
    """
    found: dict[str, Any] = {}
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except FileNotFoundError:
        yield found
        return
    try:
        yield found
    finally:
        process.terminate()
        found |= read(process.communicate()[0])


def read(text: str) -> dict[str, list[float]]:
    """Return minimum, median and maximum of each field of the driver's lines (pure)."""
    samples = []
    for line in text.splitlines():
        try:
            samples.append([float(value) for value in line.split(",")])
        except ValueError:
            # The last line may have been cut off; a field that a GPU lacks is "[N/A]".
            continue
    columns = zip(*(one for one in samples if len(one) == len(FIELDS)), strict=True)
    return {
        name: [min(column), statistics.median(column), max(column)]
        for name, column in zip(FIELDS, columns, strict=False)
    }


def in_words(clocks: dict[str, Any]) -> str:
    """Return the SM clock, as a table shows it."""
    if "clocks.sm" not in clocks:
        return ""
    least, middle, most = clocks["clocks.sm"]
    return f"{middle:.0f} ({least:.0f} to {most:.0f})"
