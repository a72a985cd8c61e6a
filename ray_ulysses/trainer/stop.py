"""A request to stop, left in the run's directory by whoever got the signal and seen by rank 0.

Storage is shared by construction (every node is probed for it), so a file needs no other channel. It carries the
session that it is meant for: a request left over from an earlier session stops nothing.
"""

from __future__ import annotations

from pathlib import Path

STOP_FILE = "stop-request"


def request_stop(run_dir: Path, session: str) -> None:
    """Ask the running session to save and stop after the step it is in."""
    (run_dir / STOP_FILE).write_text(session)


def stop_requested(run_dir: Path, session: str) -> bool:
    """Whether this session was asked to stop."""
    try:
        return (run_dir / STOP_FILE).read_text() == session
    except OSError:
        return False


def clear_stop(run_dir: Path) -> None:
    """Remove a request, this session's or a left-over one."""
    (run_dir / STOP_FILE).unlink(missing_ok=True)
