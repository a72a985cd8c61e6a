"""Rich's console and live display, for texts of others: markup does not act, and control characters are shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment

from ray_ulysses.terminal import escape_output, one_line, printable
from ray_ulysses.views.streams import SteadyStream


class PlainConsole(Console):
    """A console that prints a string as one line, as it is, and control characters of any text as escapes."""

    def __init__(self, file: TextIO, **options: Any) -> None:
        """Write to a file, to which control characters of the layout are written as they are."""
        super().__init__(file=file, markup=False, emoji=False, highlight=False, soft_wrap=True, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects; a string is one line."""
        super().print(*(one_line(one) if isinstance(one, str) else one for one in objects), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render an object; only our own control codes stay."""
        for one in super().render(renderable, options):
            yield one if one.control else Segment(printable(one.text), one.style)


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console of standard output or error that never fails.

    Args:
        stderr: Whether it writes to standard error.
        quiet: Whether it writes nothing.
    """
    return PlainConsole(cast("TextIO", SteadyStream("stderr" if stderr else "stdout", escapes=False)), quiet=quiet)


def start_live(renderable: RenderableType, console: Console, *, transient: bool) -> Live:
    """Start a live display, above which goes what others print meanwhile."""
    live = Live(renderable, console=console, auto_refresh=False, transient=transient)
    live.start(refresh=True)
    # Rich's stand-ins for the standard streams obey escapes.
    escape_output()
    return live
