"""Decorators for loops over millions of documents, which Numba compiles at their first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function of integers and arrays when it is first called, and cache the code on disk.

    Without a writable directory it is compiled again in every process.
    """
    return _compile(function, inline="never")


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function that is inlined into the innermost loops of other compiled functions."""
    return _compile(function, inline="always")


def _compile(function: Callable[..., Any], inline: str) -> Any:
    options: dict[str, Any] = {"nogil": True, "inline": inline}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # Numba found no directory for its cache.
        return numba.njit(**options)(function)
