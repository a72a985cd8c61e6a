"""Loggers, and escaping of untrusted text so that a terminal shows control sequences instead of executing them.

Control characters and invisible characters are replaced with escapes, and continuation lines are marked.
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
# The Unicode categories Cc, Cf, Cs, Zl and Zp, except for tabs, line feeds, and the visible Arabic, Syriac and Kaithi
# signs.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f\ud800-\udfff"
    "\ufeff\ufff9-\ufffb\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)
_LETTER = "[\u0300-\u1fff\u2070-\ud7ff\ue000-\ufefe\uff00-\U000dffff]"
_JOINED = re.compile(f"{_LETTER}[\u200c\u200d]{_LETTER}")
"""Pattern for a zero-width joiner or non-joiner between non-Latin characters; some scripts and emoji need it."""


def printable(text: str) -> str:
    r"""Escape all control characters except line feeds, and all invisible characters, for example as ``\x1b``."""
    # Most texts need no escapes, and isprintable() is four times as fast as the regular expression.
    return text if text.replace("\n", "").isprintable() else _UNSEEN.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    if found.start() and _JOINED.match(found.string, found.start() - 1):
        return found[0]
    # Use JSON's notation for DEL: JSON encoders leave DEL unescaped, and \x7f is not valid in JSON.
    return r"\u007f" if found[0] == "\x7f" else found[0].encode("unicode_escape").decode()


def one_line(text: str) -> str:
    r"""Return `printable` text with line feeds escaped as ``\n``."""
    return printable(text).replace("\n", r"\n")


def indented(text: str) -> str:
    """Return `printable` text with a mark before each continuation line that does not have a mark yet."""
    return re.sub(r"\n(?!  \| )", _MARK, printable(text.rstrip("\n")))


class EscapingStream:
    """A text stream wrapper that escapes with `printable`. It hides ``buffer``, which would bypass the escaping."""

    def __init__(self, stream: TextIO) -> None:
        self.unescaped = stream
        """Underlying stream, for ray-ulysses' own colors and cursor movements."""

    def write(self, text: str) -> int:
        """Escape and write `text`."""
        self.unescaped.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "writelines"):
            raise AttributeError(name)
        return getattr(self.unescaped, name)


def escape_output() -> None:
    """Escape everything that this process, including its libraries, writes to stdout and stderr from now on."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, EscapingStream):
            # If the stream is closed, reconfigure() fails, and so will the next write.
            with suppress(AttributeError, OSError, ValueError):
                # Characters that the encoding does not support must not raise.
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, cast("TextIO", EscapingStream(stream)))


@contextmanager
def escaped_output() -> Iterator[None]:
    """Escape everything that is written to stdout and stderr within the block."""
    before = sys.stdout, sys.stderr
    escape_output()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def get_logger(name: str) -> logging.Logger:
    """Return the logger for a module; pass ``__name__``."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return indented(super().format(record))


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to the current stderr, which a live display replaces while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def configure_logging() -> None:
    """Send the package's log messages to stderr. Commands call this function; importing the package does not."""
    logger = logging.getLogger(_ROOT)
    if not logger.handlers:
        handler = _Handler()
        handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def quiet_libraries() -> None:
    """Silence other libraries' messages and warnings. Call this function before importing these libraries.

    Existing environment variables and ``python -W`` take precedence.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Numba would start colorama, which resets colors at exit, through a stream that escapes the sequence.
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
    # Transformers imports torchao if it is installed, and torchao 0.18 reports each CUDA extension that it lacks.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
