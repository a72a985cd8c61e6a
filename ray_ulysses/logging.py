"""The package's loggers, with their level and format."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from ray_ulysses.terminal import indented

_ROOT = "ray_ulysses"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass ``__name__``."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return indented(super().format(record))


def configure_logging(level: int = logging.INFO) -> None:
    """Send the package's messages to standard error, one line each. Commands call it; imports don't."""
    logger = logging.getLogger(_ROOT)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


def quiet_libraries() -> None:
    """Keep the lines of other libraries from what a command prints; call it before they are imported.

    Settings of the environment and of ``python -W`` win.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
