"""Requests to a run: files in its directory that ask rank 0 to stop, to save, or to expect a node's end.

The storage is shared by every node, which is checked at the start, so that a file needs no other channel.

======================  ====================  ==========================================================
file                    left by               effect
======================  ====================  ==========================================================
``stop-request``        the driver            saves after the current step, and stops
``save-request``        anybody, any content  saves after the current step, and continues; the file is removed
``preemption-notice``   anybody               saves after the current step, repeatedly while the file exists, and
                                              just before the deadline: a number in the file, in seconds since
                                              the epoch (``date +%s``); an empty file has none
``excluded-nodes``      rank 0                the driver moves the workers away from these nodes of the cluster, where
                                              the run is faster without them
======================  ====================  ==========================================================

A request to stop carries the session that it is meant for, and so do excluded nodes: one left by an earlier session has
no effect. The other two are for people and scripts, which know no session: ``touch RUN/save-request``.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ray_ulysses.checkpoint.notice import Notice
from ray_ulysses.run_names import EXCLUDED_FILE, NOTICE_FILE, SAVE_FILE, STOP_FILE
from ray_ulysses.storage.regular import open_regular

_MOST_BYTES = 1 << 16

StopReason = Literal["stop", "resize"]
"""Why a run is to stop: for good, or to continue at another size."""


def request_stop(run_dir: Path, session: str, reason: StopReason = "stop") -> None:
    """Ask the running session to save and stop after the current step; a resize takes no place of a stop for good."""
    path = run_dir / STOP_FILE
    if reason == "resize":
        with contextlib.suppress(FileExistsError), path.open("x") as stream:
            stream.write(f"{session} {reason}")
            return
        if stop_requested(run_dir, session) is not None:
            return
    path.write_text(f"{session} {reason}")


def stop_requested(run_dir: Path, session: str) -> StopReason | None:
    """Return why this session was asked to stop; ``None`` if it was not."""
    try:
        words = _read(run_dir / STOP_FILE).split()
    except OSError:
        return None
    if words[:1] != [session]:
        return None
    return "resize" if words[1:] == ["resize"] else "stop"


def clear_stop(run_dir: Path) -> None:
    """Remove a request to stop, of any session."""
    (run_dir / STOP_FILE).unlink(missing_ok=True)


def exclude_nodes(run_dir: Path, session: str, slow: Mapping[str, float]) -> None:
    """Ask the driver of the running session to continue without slow nodes, besides those excluded before.

    Args:
        run_dir: The run's directory, which is not made anew if it was moved away.
        session: The session.
        slow: How many times as long as others' the compute of each node takes.

    Raises:
        OSError: The request can't be written.
    """
    every = {**excluded_nodes(run_dir, session), **slow}
    temporary = run_dir / f"{EXCLUDED_FILE}.new"
    temporary.write_text(" ".join((session, *(f"{node}={ratio:.3f}" for node, ratio in sorted(every.items())))))
    temporary.replace(run_dir / EXCLUDED_FILE)


def excluded_nodes(run_dir: Path, session: str) -> dict[str, float]:
    """Return the nodes that this session is to do without, and how slow each is."""
    try:
        given, *words = _read(run_dir / EXCLUDED_FILE).split()
    except (OSError, ValueError):
        return {}
    found = (word.rpartition("=") for word in words if given == session)
    return {node: float(ratio) for node, _, ratio in found if node and ratio.replace(".", "", 1).isdecimal()}


def request_save(run_dir: Path) -> None:
    """Ask for a checkpoint after the current step."""
    (run_dir / SAVE_FILE).touch()


def take_save_request(run_dir: Path) -> bool:
    """Remove a request for a checkpoint, and return whether there was one."""
    try:
        (run_dir / SAVE_FILE).unlink()
    except OSError:
        return False
    return True


def preemption_noticed(run_dir: Path) -> Notice | None:
    """Return the notice of a node's end that somebody has left in the directory; ``None`` if there is none."""
    path = run_dir / NOTICE_FILE
    try:
        text = _read(path)
    except OSError:
        return Notice() if os.path.lexists(path) else None
    try:
        deadline = float(text)
    except ValueError:
        return Notice()
    return Notice(deadline=deadline if math.isfinite(deadline) else None)


def _read(path: Path) -> str:
    with open_regular(path) as stream:
        return stream.read(_MOST_BYTES).decode(errors="replace")
