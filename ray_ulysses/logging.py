"""Loggers, and escaping of foreign text, so that a terminal shows its control sequences instead of executing them.

Control characters and invisible ones are shown as escapes, and continuation lines are marked.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

_ROOT = "ray_ulysses"
_MARK = "\n  | "
# All of Unicode's Cc, Cf, Cs, Zl and Zp but for the tab, the line feed, and Arabic, Syriac and Kaithi signs, which are
# visible.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f\ud800-\udfff"
    "\ufeff\ufff9-\ufffb\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)
_LETTER = "[\u0300-\u1fff\u2070-\ud7ff\ue000-\ufefe\uff00-\U000dffff]"
_JOINED = re.compile(f"{_LETTER}[\u200c\u200d]{_LETTER}")
"""A joiner between letters or symbols that are not Latin belongs to the script, or to an emoji."""


def printable(text: str) -> str:
    r"""Return a text with control and invisible characters escaped, such as ``\x1b``; line feeds are kept."""
    # Most texts have nothing to escape, and this check is four times as fast.
    return text if text.replace("\n", "").isprintable() else _UNSEEN.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    if found.start() and _JOINED.match(found.string, found.start() - 1):
        return found[0]
    # JSON leaves this control character as it is, and has no \x7f.
    return r"\u007f" if found[0] == "\x7f" else found[0].encode("unicode_escape").decode()


def one_line(text: str) -> str:
    r"""Return a printable text whose line feeds are shown as ``\n``."""
    return printable(text).replace("\n", r"\n")


def indented(text: str) -> str:
    """Return a printable text with its continuation lines marked; lines that are marked already are kept."""
    return re.sub(r"\n(?!  \| )", _MARK, printable(text.rstrip("\n")))


class EscapingStream:
    """A text stream that escapes with `printable`; it has no ``buffer``, through which bytes would bypass it."""

    def __init__(self, stream: TextIO) -> None:
        self.unescaped = stream
        """The underlying stream, for our own colors and cursor movements."""

    def write(self, text: str) -> int:
        """Write a text."""
        self.unescaped.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "writelines"):
            raise AttributeError(name)
        return getattr(self.unescaped, name)


def escape_output() -> None:
    """Escape everything that this process writes to standard output and error from now on, libraries included."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, EscapingStream):
            # If nobody reads the stream, the next write fails, as it would have without us.
            with suppress(AttributeError, OSError, ValueError):
                # A character that the encoding lacks must not raise.
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, cast("TextIO", EscapingStream(stream)))


@contextmanager
def escaped_output() -> Iterator[None]:
    """Escape everything that is written within the block."""
    before = sys.stdout, sys.stderr
    escape_output()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass ``__name__``."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return indented(super().format(record))


def configure_logging() -> None:
    """Send the package's messages to standard error, one line each; for commands, never called on import."""
    logger = logging.getLogger(_ROOT)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def quiet_libraries() -> None:
    """Silence other libraries in the output of a command; call it before they are imported.

    The environment and ``python -W`` take precedence.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
