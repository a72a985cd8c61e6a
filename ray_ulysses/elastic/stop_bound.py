"""How long a process that was killed may take to be gone (pure)."""

from __future__ import annotations

END_S = 10.0
"""Longest wait for the end of a killed process that holds little memory, in seconds."""
_S_PER_GIB = 0.25
"""A GiB in small pages takes the kernel 0.085 s to take back, on an idle machine and not pinned. What is pinned takes
longer, which is not yet measured, and the ranks of a node end at once."""


def end_bound_s(host_bytes: int) -> float:
    """Return the longest wait for the end of a killed process that holds so much host memory, in seconds."""
    return END_S + host_bytes / 2**30 * _S_PER_GIB
