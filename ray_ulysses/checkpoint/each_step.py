"""Examines many checkpoints concurrently, since on an object store each waits for its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_MOST_THREADS = 16

_Found = TypeVar("_Found")


def for_each_step(steps: Iterable[int], look: Callable[[int], _Found]) -> list[_Found]:
    """Return what a function finds at each step, in the order of the steps.

    Args:
        steps: The steps.
        look: It returns what is needed of a manifest and not the manifest itself: in a large world one takes tens of
            megabytes, and a run may have a thousand.
    """
    with ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="ray-ulysses-steps") as threads:
        return list(threads.map(look, steps))
