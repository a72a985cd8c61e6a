"""Tells on which cluster a command runs, without importing Ray."""

from __future__ import annotations

import os


def cluster_address(address: str | None) -> str | None:
    """Return the configured address, else ``RAY_ADDRESS``, or None for an embedded Ray."""
    target = address or os.environ.get("RAY_ADDRESS") or None
    return None if target == "local" else target
