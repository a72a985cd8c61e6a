"""Requests to a run: files in its directory that ask rank 0 to stop, to save, or to expect a node's end.

Every node shares the storage, which is checked at the start, so files need no other channel.

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

A request to stop and the excluded nodes name the session that they are meant for: those left by an earlier session have
no effect. The other two are for people and scripts, which know no session: ``touch RUN/save-request``, or an object of
that name in an object store.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ray_ulysses.checkpoint.notice import Notice
from ray_ulysses.run_names import EXCLUDED_FILE, NOTICE_FILE, PROBE_NAME, SAVE_FILE, SESSION_FILE, STOP_FILE
from ray_ulysses.storage.background import BackgroundCalls
from ray_ulysses.storage.location import RETRY_S
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.storage.store import create_if_absent

LOOK_EVERY_S = 2.0
_MOST_BYTES = 1 << 16
# Callers ask repeatedly, and an unreachable object store must not hold up the command.
_RETRY_S = 1.0

StopReason = Literal["stop", "resize"]
"""Why a run should stop: for good, or to continue at another size."""


def announce_session(run_dir: Place, session: str) -> None:
    """Write the session's name, before it has workers, where they look for it, and clear requests to stop."""
    store = open_store(run_dir)
    with contextlib.suppress(FileNotFoundError):
        # Left by attempts that were killed while probing.
        for left in filter(PROBE_NAME.match, store.root_names()):
            store.delete(left)
    store.replace(SESSION_FILE, [session.encode()])
    clear_stop(run_dir)


def request_stop(run_dir: Place, session: str, reason: StopReason = "stop") -> None:
    """Ask the running session to save and stop after the current step; a resize does not replace a stop for good."""
    store, content = open_store(run_dir, must_exist=True, retry_s=_RETRY_S), f"{session} {reason}".encode()
    if reason == "resize" and (create_if_absent(store, STOP_FILE, content) or stop_requested(run_dir, session)):
        return
    store.replace(STOP_FILE, [content])


def stop_requested(run_dir: Place, session: str) -> StopReason | None:
    """Return why this session was asked to stop; ``None`` if it was not."""
    try:
        words = _read(run_dir, STOP_FILE).split()
    except OSError:
        return None
    if words[:1] != [session]:
        return None
    return "resize" if words[1:] == ["resize"] else "stop"


def clear_stop(run_dir: Place, *, retry_s: float = RETRY_S) -> None:
    """Remove a request to stop, of any session; requests to an unreachable object store are retried for ``retry_s``."""
    open_store(run_dir, retry_s=retry_s).delete_files([STOP_FILE])


def exclude_nodes(run_dir: Place, session: str, slow: Mapping[str, float]) -> None:
    """Ask the driver of the running session to continue without slow nodes, besides those excluded before.

    Args:
        run_dir: The run's directory, which is not created if it was moved away.
        session: The session.
        slow: Each node's compute time as a multiple of the median.

    Raises:
        OSError: The request can't be written.
    """
    every = {**excluded_nodes(run_dir, session), **slow}
    text = " ".join((session, *(f"{node}={ratio:.3f}" for node, ratio in sorted(every.items()))))
    open_store(run_dir, must_exist=True, retry_s=_RETRY_S).replace(EXCLUDED_FILE, [text.encode()])


def excluded_nodes(run_dir: Place, session: str) -> dict[str, float]:
    """Return the nodes that this session should avoid, and how slow each is."""
    try:
        given, *words = _read(run_dir, EXCLUDED_FILE).split()
    except (OSError, ValueError):
        return {}
    found = (word.rpartition("=") for word in words if given == session)
    return {node: float(ratio) for node, _, ratio in found if node and ratio.replace(".", "", 1).isdecimal()}


def request_save(run_dir: Place) -> None:
    """Ask for a checkpoint after the current step."""
    open_store(run_dir, must_exist=True, retry_s=_RETRY_S).replace(SAVE_FILE, [b""])


def take_save_request(run_dir: Place) -> bool:
    """Remove a request for a checkpoint, and return whether there was one."""
    store = open_store(run_dir, retry_s=_RETRY_S)
    try:
        is_there = SAVE_FILE in store.root_names()
        if is_there:
            store.delete_files([SAVE_FILE])
    except OSError:
        return False
    return is_there


def preemption_noticed(run_dir: Place) -> Notice | None:
    """Return the preemption notice in the directory; ``None`` if there is none."""
    try:
        text = _read(run_dir, NOTICE_FILE)
    except OSError:
        return Notice() if isinstance(run_dir, Path) and os.path.lexists(run_dir / NOTICE_FILE) else None
    try:
        deadline = float(text)
    except ValueError:
        return Notice()
    return Notice(deadline=deadline if math.isfinite(deadline) else None)


class RequestWatch:
    """Watches for requests in a thread, for rank 0 to read after each step: a storage that hangs blocks no step.

    On a path the thread looks after each step. In an object store, where each look costs requests, it looks every few
    seconds.
    """

    def __init__(self, run_dir: Place, session: str, *, every_s: float = LOOK_EVERY_S) -> None:
        """Start the thread.

        Args:
            run_dir: The run's directory.
            session: The session.
            every_s: Time between two looks in an object store, in seconds.
        """
        self._run_dir, self._session = run_dir, session
        self._store = open_store(run_dir, retry_s=_RETRY_S)
        self._stop: StopReason | None = None
        self._notice: Notice | None = None
        self._save = threading.Event()
        self._is_near = isinstance(run_dir, Path)
        self._calls = BackgroundCalls("requests", tick=self._look, every_s=None if self._is_near else every_s)
        if not self._is_near:
            self._calls.ask(self._look)

    def look(self) -> None:
        """Look for new requests, on a path; called after each step."""
        if self._is_near:
            if self._calls.is_idle:
                self._calls.ask(self._look)
            self._calls.wait_promptly()

    def stop(self) -> StopReason | None:
        """Return why the session was asked to stop; None if it was not."""
        return self._stop

    def take_save(self) -> bool:
        """Take a request for a checkpoint, and return whether there was one."""
        if not self._save.is_set():
            # Not cleared otherwise: the thread may be setting it right now.
            return False
        self._save.clear()
        return True

    def notice(self) -> Notice | None:
        """Return the preemption notice; None if there is none."""
        return self._notice

    def close(self) -> None:
        """Stop the thread."""
        self._calls.close()

    def _look(self) -> None:
        try:
            names = self._store.root_names()
        except OSError:
            # Earlier requests still hold.
            return
        # A listed file that can't be read keeps its previous meaning; a notice at least exists.
        stop = stop_requested(self._run_dir, self._session) if STOP_FILE in names else None
        self._stop = (stop or self._stop) if STOP_FILE in names else None
        notice = preemption_noticed(self._run_dir) if NOTICE_FILE in names else None
        self._notice = (notice or self._notice or Notice()) if NOTICE_FILE in names else None
        if SAVE_FILE in names and take_save_request(self._run_dir):
            self._save.set()


def _read(run_dir: Place, key: str) -> str:
    return open_store(run_dir, retry_s=_RETRY_S).read_whole(key, _MOST_BYTES).decode(errors="replace")
