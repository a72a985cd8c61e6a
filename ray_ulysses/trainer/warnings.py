"""Forwards this package's warnings on rank 0 to the journal, so that they reach the person."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray_ulysses.logging import get_logger

_MOST_WARNINGS = 1000


class _Forwarder(logging.Handler):
    """Forwards each distinct warning once, up to a bound."""

    def __init__(self, forward: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._forward = forward
        self._forwarded: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a warning; one that can't be forwarded has at least been logged."""
        text = record.getMessage()
        if text in self._forwarded or len(self._forwarded) >= _MOST_WARNINGS:
            return
        self._forwarded.add(text)
        try:
            self._forward(text)
        except Exception:
            self.handleError(record)


@contextmanager
def warnings_forwarded(forward: Callable[[str], None] | None) -> Iterator[None]:
    """Forward the warnings that this package logs within a block, from any thread.

    Args:
        forward: Takes the text of a warning; None forwards nothing.
    """
    if forward is None:
        yield
        return
    logger, handler = get_logger("ray_ulysses"), _Forwarder(forward)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
