"""Loops over a hundred million documents, compiled by Numba the first time they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function of integers and arrays when it is first called, and keep the code on disk.

    Where no directory can be written, it is compiled again in every process.
    """
    return _compile(function, inline="never")


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function that other compiled functions call in their innermost loop."""
    return _compile(function, inline="always")


def _compile(function: Callable[..., Any], inline: str) -> Any:
    options: dict[str, Any] = {"nogil": True, "inline": inline}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # Numba has found no directory for its cache.
        return numba.njit(**options)(function)
