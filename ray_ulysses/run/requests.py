"""Requests to a running session, stored as files in the run's directory.

All nodes share the run's storage, so no other communication channel is needed.

======================  ====================  ==========================================================
file                    written by            effect
======================  ====================  ==========================================================
``stop-request``        the driver            the run saves after the current step and stops
``save-request``        users and scripts     the run saves after the current step and continues; it deletes the file
                                              once the checkpoint is committed
``preemption-notice``   users and scripts     the run saves after the current step, repeatedly while the file exists,
                                              and just before the deadline. The file may contain the deadline in
                                              seconds since the epoch (``date +%s``).
``excluded-nodes``      rank 0                the driver continues without these slow nodes if that makes the run
                                              faster
======================  ====================  ==========================================================

``stop-request`` and ``excluded-nodes`` contain the session id, so files of an earlier session have no effect. Users and
scripts create the other two without a session id: ``touch RUN/save-request``, or an object with that key.
"""

from __future__ import annotations

import contextlib
import math
import os
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
# Callers poll repeatedly, and an unreachable object store must not block the command.
_RETRY_S = 1.0

StopReason = Literal["stop", "resize"]
"""Reason to stop: permanently (``stop``), or to continue with another number of workers (``resize``)."""


def announce_session(run_dir: Place, session: str) -> None:
    """Publish the session id for future workers, and delete old stop requests and probe files."""
    store = open_store(run_dir)
    with contextlib.suppress(FileNotFoundError):
        # Delete probe files of attempts that were killed during their storage probe.
        for left in filter(PROBE_NAME.match, store.root_names()):
            store.delete(left)
    store.replace(SESSION_FILE, [session.encode()])
    clear_stop(run_dir)


def request_stop(run_dir: Place, session: str, reason: StopReason = "stop") -> None:
    """Request that the session save and stop after the current step. A ``resize`` never replaces a ``stop``."""
    store, content = open_store(run_dir, must_exist=True, retry_s=_RETRY_S), f"{session} {reason}".encode()
    if reason == "resize" and (create_if_absent(store, STOP_FILE, content) or stop_requested(run_dir, session)):
        return
    store.replace(STOP_FILE, [content])


def stop_requested(run_dir: Place, session: str) -> StopReason | None:
    """Return the reason in this session's stop request, or None if there is no such request."""
    try:
        words = _read(run_dir, STOP_FILE).split()
    except OSError:
        return None
    if words[:1] != [session]:
        return None
    return "resize" if words[1:] == ["resize"] else "stop"


def clear_stop(run_dir: Place, *, retry_s: float = RETRY_S) -> None:
    """Delete the stop request of any session. Retry for up to ``retry_s`` seconds if an object store is unreachable."""
    open_store(run_dir, retry_s=retry_s).delete_files([STOP_FILE])


def exclude_nodes(run_dir: Place, session: str, slow: Mapping[str, float]) -> None:
    """Request that the driver exclude slow nodes, in addition to the nodes that are already excluded.

    Args:
        run_dir: The run's directory.
        session: The session id.
        slow: Compute time of each slow node, as a multiple of the median.

    Raises:
        OSError: The request can't be written.
    """
    every = {**excluded_nodes(run_dir, session), **slow}
    text = " ".join((session, *(f"{node}={ratio:.3f}" for node, ratio in sorted(every.items()))))
    open_store(run_dir, must_exist=True, retry_s=_RETRY_S).replace(EXCLUDED_FILE, [text.encode()])


def excluded_nodes(run_dir: Place, session: str) -> dict[str, float]:
    """Return the session's excluded nodes and their compute times, as multiples of the median."""
    try:
        given, *words = _read(run_dir, EXCLUDED_FILE).split()
    except (OSError, ValueError):
        return {}
    found = (word.rpartition("=") for word in words if given == session)
    return {node: float(ratio) for node, _, ratio in found if node and ratio.replace(".", "", 1).isdecimal()}


def request_save(run_dir: Place) -> None:
    """Request a checkpoint after the current step."""
    open_store(run_dir, must_exist=True, retry_s=_RETRY_S).replace(SAVE_FILE, [b""])


def preemption_noticed(run_dir: Place) -> Notice | None:
    """Return the preemption notice in the run's directory, or None if there is none."""
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
    """A background thread on rank 0 that polls for requests, so that hung storage does not block training.

    On a file system, the thread polls after each step. In an object store, where polling costs requests, the thread
    polls every few seconds.
    """

    def __init__(self, run_dir: Place, session: str, *, every_s: float = LOOK_EVERY_S) -> None:
        """Start the thread.

        Args:
            run_dir: The run's directory.
            session: The session id.
            every_s: Polling interval in an object store, in seconds.
        """
        self._run_dir, self._session = run_dir, session
        self._store = open_store(run_dir, retry_s=_RETRY_S)
        self._stop: StopReason | None = None
        self._notice: Notice | None = None
        # Times of the newest checkpoint request, of the last one taken, and of the last one whose save is committed.
        self._asked: float | None = None
        self.taken: float | None = None
        self._saved: float | None = None
        self._is_near = isinstance(run_dir, Path)
        self._calls = BackgroundCalls("requests", tick=self._look, every_s=None if self._is_near else every_s)
        if not self._is_near:
            self._calls.ask(self._look)

    def look(self) -> None:
        """Poll for new requests on a file system. Call this method after each step."""
        if self._is_near:
            if self._calls.is_idle:
                self._calls.ask(self._look)
            self._calls.wait_promptly()

    def stop(self) -> StopReason | None:
        """Return the reason in this session's stop request, or None if there is no such request."""
        return self._stop

    def take_save(self) -> bool:
        """Take a new checkpoint request, and return whether there was one; ``taken`` is its time."""
        asked = self._asked
        if asked is None or asked == self.taken:
            return False
        self.taken = asked
        return True

    def saved(self, taken: float) -> None:
        """Delete a request after the commit of its checkpoint, unless a newer one has replaced it.

        Until then, the file remains, so that the next attempt serves the request if this one fails. In an object store,
        a newer request within the same second is deleted with it. Any thread may call this method.
        """
        self._saved = taken
        self._calls.ask(self._look)

    def notice(self) -> Notice | None:
        """Return the preemption notice, or None if there is none."""
        return self._notice

    def close(self) -> None:
        """Stop the thread; wait briefly for its last calls."""
        self._calls.wait_promptly()
        self._calls.close()

    def _look(self) -> None:
        try:
            names = self._store.root_names()
        except OSError:
            # Earlier requests remain valid.
            return
        # If a listed file can't be read, the last value read remains valid. A notice without a value has no deadline.
        stop = stop_requested(self._run_dir, self._session) if STOP_FILE in names else None
        self._stop = (stop or self._stop) if STOP_FILE in names else None
        notice = preemption_noticed(self._run_dir) if NOTICE_FILE in names else None
        self._notice = (notice or self._notice or Notice()) if NOTICE_FILE in names else None
        asked = self._asked_at() if SAVE_FILE in names else None
        if asked is not None and asked == self._saved:
            with contextlib.suppress(OSError):
                self._store.delete_files([SAVE_FILE])
                asked = None
        self._asked = asked
        if asked is None:
            # Forget the times: in an object store, a later request within the same second has the same time.
            self.taken = self._saved = None

    def _asked_at(self) -> float | None:
        try:
            return self._store.modified_at(SAVE_FILE)
        except FileNotFoundError:
            return None
        except OSError:
            # A file that can't be read is a request all the same.
            return self._asked or 0.0


def _read(run_dir: Place, key: str) -> str:
    return open_store(run_dir, retry_s=_RETRY_S).read_whole(key, _MOST_BYTES).decode(errors="replace")
