"""Rich's console and live display for untrusted text: markup has no effect, and control characters are escaped."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from ray_ulysses.clock import Clock
from ray_ulysses.commands.output import Display, SteadyStream
from ray_ulysses.logging import escape_output, one_line, printable
from ray_ulysses.report.words import duration, folded, size

if TYPE_CHECKING:
    from ray_ulysses.data.prepare.preparation import PrepareProgress

_LINE_S = 2.0
"""Minimum time between two progress lines, in seconds."""


class PlainConsole(Console):
    """A console that prints a string verbatim on one line, with control characters escaped."""

    def __init__(self, file: TextIO, **options: Any) -> None:
        """Write to ``file``, escaping all control characters except those that Rich itself adds."""
        super().__init__(file=file, markup=False, emoji=False, highlight=False, soft_wrap=True, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects, each string on a single line, or in a terminal on as many lines as its width needs."""
        width = self.width if self.is_terminal else None
        super().print(*(folded(one_line(one), width) if isinstance(one, str) else one for one in objects), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render an object, with all control characters in its text escaped."""
        for one in super().render(renderable, options):
            yield one if one.control else Segment(printable(one.text), one.style)


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console on standard output or standard error whose writes never fail.

    Args:
        stderr: Whether the console writes to standard error.
        quiet: Whether the console writes nothing.
    """
    return PlainConsole(cast("TextIO", SteadyStream("stderr" if stderr else "stdout", escapes=False)), quiet=quiet)


def put_styled(text: str, styles: Mapping[str, str]) -> None:
    """Print text whose lines fit into the terminal, with Rich's styles by regular expression."""
    styled = Text(text)
    for pattern, style in styles.items():
        styled.highlight_regex(pattern, style)
    open_console().print(styled)


def start_live(renderable: RenderableType, console: Console, *, transient: bool) -> Live:
    """Start a live display; other output appears above it, or where stderr is redirected."""
    to_terminal = sys.stderr.isatty()
    live = Live(renderable, console=console, auto_refresh=False, transient=transient, redirect_stderr=to_terminal)
    live.start(refresh=True)
    # Rich's replacements for the standard streams would interpret escape sequences.
    escape_output()
    return live


class PrepareView(Display):
    """Shows a preparation's phase and progress, as a live line in a terminal and as plain lines elsewhere."""

    def __init__(self, console: Console | None = None, clock: Clock | None = None) -> None:
        """Set up the view; nothing is shown before the ``with`` block is entered.

        Args:
            console: Output console; standard output by default. Anything but a terminal gets plain lines.
            clock: Source of time for elapsed time, rate and ETA.
        """
        super().__init__(clock)
        self._console = console or open_console()
        self._phase: str | None = None
        self._began: tuple[float, PrepareProgress] | None = None
        self._latest: PrepareProgress | None = None
        self._num_seen = 0
        self._line_at: float | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Start the display."""
        if self._console.is_terminal:
            self._live = start_live(Text(), self._console, transient=True)
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        """Stop the display and remove the live line before the result is printed."""
        super().__exit__()
        if self._live is not None:
            self._live.stop()

    def phase(self, name: str) -> None:
        """Set the current phase."""
        with self._lock:
            self._phase = name
        self.look()

    def progress(self, progress: PrepareProgress) -> None:
        """Show the progress; call it before the first unit of this command and after each unit."""
        now = self._clock.monotonic()
        with self._lock:
            # The rate excludes the first unit, whose time includes the start of the workers.
            if self._num_seen < 2:
                self._began = now, progress
            self._num_seen += 1
            self._latest = progress
            is_due = self._line_at is None or now - self._line_at >= _LINE_S
            if is_due or progress.units_done == progress.num_units:
                self._line_at = now
                self._print(self._line(progress))
        self.look()

    def look(self) -> None:
        """Show the current phase, and in a terminal the current progress."""
        with self._lock:
            if (line := self._watch.look(self._phase)) is not None:
                self._print(line)
            if self._live is not None:
                parts = [f"{duration(self._watch.elapsed_s)}", one_line(self._phase or "")]
                parts += [self._line(self._latest)] if self._latest is not None else []
                self._live.update(Text("  ".join(parts), no_wrap=True, overflow="ellipsis"), refresh=True)

    def _line(self, progress: PrepareProgress) -> str:
        assert self._began is not None
        began, first = self._began
        return prepare_line(progress, first, self._clock.monotonic() - began)

    def _print(self, line: str) -> None:
        if self._live is None:
            self._console.print(line)


def prepare_line(progress: PrepareProgress, first: PrepareProgress, seconds: float) -> str:
    """Return the progress as one line of ``name=value`` fields, whose values contain no spaces.

    Args:
        progress: Current progress.
        first: Progress after the first unit of this command; the rate excludes earlier work.
        seconds: Seconds since the first unit ended; below one second, no rate is shown.
    """
    fields = [
        f"unit={progress.units_done}/{progress.num_units}",
        f"documents={progress.documents}",
        f"tokens={progress.tokens}",
        f"quarantined={progress.rejected}",
        f"bytes={progress.bytes_done}/{progress.num_bytes}",
    ]
    num_read = progress.bytes_done - first.bytes_done
    if num_read > 0 and seconds >= 1.0:
        rate = num_read / seconds
        fields.append(f"rate={size(rate).replace(' ', '')}/s")
        fields.append(f"eta={duration((progress.num_bytes - progress.bytes_done) / rate)}")
    return " ".join(fields)
