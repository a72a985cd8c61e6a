"""The package's loggers, with their level and format."""

from __future__ import annotations

import logging
import sys

_ROOT = "ray_ulysses"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass ``__name__``."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


def configure_logging(level: int = logging.INFO) -> None:
    """Send the package's messages to standard error, one line each. Commands call it; imports don't."""
    logger = logging.getLogger(_ROOT)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
