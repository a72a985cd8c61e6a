"""Limits of a process."""

from __future__ import annotations

import resource


def allow_open_files() -> None:
    """Raise this process's limit on open files as far as it may."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
