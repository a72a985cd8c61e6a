"""Reports the progress of a long reading every few seconds, and nothing for a short one."""

from __future__ import annotations

from collections.abc import Callable

from ray_ulysses.clock import Clock
from ray_ulysses.forensics.row_checks import ReadingProgress
from ray_ulysses.report.words import count, duration, percent, size

_REPORT_EVERY_S = 5.0


class ReadingReport:
    """Prints how much was read, how fast, and how long the rest takes.

    Args:
        write: Called with each line.
        clock: Source of time.
    """

    def __init__(self, write: Callable[[str], None], clock: Clock) -> None:
        self._write, self._clock = write, clock
        self._started: float | None = None
        self._reported = 0.0

    def rows(self, progress: ReadingProgress) -> None:
        """Report rows of a run that were read from its corpora."""
        text = f"{progress.rows:,} of {progress.num_rows:,} rows"
        self._report(text, progress.rows, progress.num_rows, lambda s: f"{count(progress.tokens / s)} tokens/s")

    def bytes(self, done: int, total: int) -> None:
        """Report bytes of a checkpoint that were read."""
        self._report(f"{size(done)} of {size(total)}", done, total, lambda s: f"{size(done / s)}/s")

    def _report(self, text: str, done: int, total: int, rate: Callable[[float], str]) -> None:
        now = self._clock.monotonic()
        if self._started is None:
            self._started = self._reported = now
        if now - self._reported < _REPORT_EVERY_S:
            return
        self._reported = now
        elapsed = now - self._started
        left = duration(elapsed / done * (total - done))
        self._write(f"read {text} ({percent(done / total)}), {rate(elapsed)}, about {left} left")
