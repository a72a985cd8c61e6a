"""What a stretch of work took from its process: time, CPU, bytes read and written, and memory at its highest."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.fresh_process import peak_rss_bytes

LOOK_S = 0.05
"""Between two looks at the memory of a family of processes."""


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Fill the dictionary that is yielded, at the end of the stretch.

    ``read_bytes`` and ``written_bytes`` are what passed through calls to the kernel (``rchar`` and ``wchar``), from the
    page cache or not; ``grown_bytes`` is the peak of resident memory beyond what was resident at the beginning. CPU and
    bytes are with children that have ended.
    """
    found: dict[str, float] = {}
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    resident, (read, written) = _resident_bytes(), _io_bytes()
    cpu, start = _cpu_s(), time.perf_counter()
    yield found
    found["seconds"], found["cpu_s"] = time.perf_counter() - start, _cpu_s() - cpu
    peak = peak_rss_bytes()
    read_now, written_now = _io_bytes()
    found["read_bytes"], found["written_bytes"] = read_now - read, written_now - written
    found["peak_bytes"], found["grown_bytes"] = float(peak), float(peak - resident)


class FamilyMemory:
    """The memory of this process and its children at its highest, pages that they share counted once."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> FamilyMemory:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()

    def _watch(self) -> None:
        this = psutil.Process()
        while not self._ended.wait(LOOK_S):
            held = 0
            for process in (this, *this.children(recursive=True)):
                try:
                    held += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak_bytes = max(self.peak_bytes, held)


def _cpu_s() -> float:
    """Return the CPU seconds of all threads, and of children that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _io_bytes() -> tuple[float, float]:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return float(lines["rchar"]), float(lines["wchar"])
