"""What rank 0 warns of reaches the person: each warning of this package goes into the journal as well."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray_ulysses.logging import get_logger

_MOST_WARNINGS = 1000


class _Forwarder(logging.Handler):
    """Hands each new warning on, up to a bound: what is said again and again is known by then."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a warning on; one that can't be handed on has at least been logged."""
        text = record.getMessage()
        if text in self._told or len(self._told) >= _MOST_WARNINGS:
            return
        self._told.add(text)
        try:
            self._tell(text)
        except Exception:
            self.handleError(record)


@contextmanager
def warnings_told(tell: Callable[[str], None] | None) -> Iterator[None]:
    """Hand on what this package warns of, from any thread, for the time of a block.

    Args:
        tell: Takes the text of a warning; None hands nothing on.
    """
    if tell is None:
        yield
        return
    logger, handler = get_logger("ray_ulysses"), _Forwarder(tell)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
