"""Handles SIGINT, SIGTERM, SIGHUP and SIGUSR1 in ``train``: requests a timely stop, or a save."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Literal

from ray_ulysses.errors import INTERRUPTED
from ray_ulysses.run.requests import request_save, request_stop, stop_requested
from ray_ulysses.storage.place import Place
from ray_ulysses.tracking.events import CONTINUED, STOP_REASONS, AttemptEnded, AttemptStarted
from ray_ulysses.tracking.journal_reader import JournalTail
from ray_ulysses.tracking.steps import StepGroup

if TYPE_CHECKING:
    from rich.console import Console

_GRACE_S = 4.0
"""Seconds until an interrupted command with nothing to save is forced to exit: Ray may ignore interrupts or hang."""
_SAME_REQUEST_S = 2.0
"""Two signals within this many seconds count as one: `timeout` and some schedulers signal a process and its group."""
_ASK_AGAIN_S = 2.0


class StopSignals:
    """Context manager that turns signals into requests to the workers.

    =======================  ========================================================================================
    SIGINT, SIGTERM, SIGHUP  ends the command if nothing needs saving; else the workers save after their step, and end
    a second one             ends the command immediately, as SIGQUIT does
    SIGUSR1                  the workers save after their step, and continue
    =======================  ========================================================================================

    An ignored SIGHUP stays ignored: ``nohup`` starts commands that outlive their terminal.
    """

    def __init__(self, run_dir: Place, session: str, console: Console) -> None:
        """Prepare the handlers, which are installed when the block is entered."""
        self._run_dir, self._session, self._say = run_dir, session, console.print
        self._signaled_at: float | None = None
        self._asked_at = 0.0
        self._has_workers = False
        self._undecided: tuple[str, threading.Timer] | None = None
        """A signal that arrived before any step was seen, and the timer that ends the command if nothing decides."""
        self._is_ending = False
        self._steps = UnsavedSteps(run_dir)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        """Install the handlers, which only the main thread can do."""
        if threading.current_thread() is threading.main_thread():
            handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM), self._stop) | {signal.SIGUSR1: self._save}
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                handlers[signal.SIGHUP] = self._stop
            self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def workers_start(self) -> None:
        """Record that the workers start or restart, and that `check` will be called from now on."""
        if not self._has_workers:
            self._steps.forget()
        self._has_workers = True

    def check(self, *, workers_are_whole: bool) -> None:
        """End the command if a stop was requested and no step can be saved, for example because a worker is lost.

        Raises:
            KeyboardInterrupt: The command must end now.
        """
        if not workers_are_whole:
            self._steps.lost()
        self._steps.look()
        if self._undecided is not None:
            (name, timer), self._undecided = self._undecided, None
            timer.cancel()
            self._decide(name)
        # Once the command has reported that nothing needs saving, a first step that ends later changes nothing.
        is_decided = self._signaled_at is not None and self._undecided is None
        if self._is_ending or (is_decided and not self._steps.exist):
            _end_in_time()
            raise KeyboardInterrupt
        self._ask_again()

    def _ask_again(self) -> None:
        """Repeat the stop request if resizing workers have removed it, mistaking it for their own."""
        now = time.monotonic()
        if self._signaled_at is None or now - self._asked_at < _ASK_AGAIN_S:
            return
        self._asked_at = now
        with contextlib.suppress(OSError):
            if stop_requested(self._run_dir, self._session) != "stop":
                request_stop(self._run_dir, self._session)

    def _stop(self, number: int, frame: Any) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if self._signaled_at is not None:
            if now - self._signaled_at > _SAME_REQUEST_S:
                _end_in_time()
                raise KeyboardInterrupt
            return
        self._signaled_at = self._asked_at = now
        if self._has_workers and not self._steps.exist:
            # A step may have ended since the last look at the journal.
            self._say(f"{name}: stopping")
            self._undecided = name, _end_in_time()
            return
        self._decide(name)
        if not self._has_workers:
            raise KeyboardInterrupt

    def _decide(self, name: str) -> None:
        """Request a save and a stop if there are steps to save; else announce that the command ends."""
        if not self._steps.exist:
            self._is_ending = True
            self._say(f"{name}: there is no step to save yet; stopping now")
            _end_in_time()
            return
        try:
            request_stop(self._run_dir, self._session)
        except OSError as error:
            self._say(f"the stop request could not be written ({error}); press Ctrl-C again to stop immediately")
            return
        step = "the next step" if self._steps.are_kept else "this step"
        self._say(f"{name}: saving after {step}, then stopping; press Ctrl-C again to stop immediately")

    def _save(self, number: int, frame: Any) -> None:
        try:
            request_save(self._run_dir)
        except OSError as error:
            self._say(f"the save request could not be written ({error})")


def _end_in_time() -> threading.Timer:
    """Force this process to exit after a grace period, unless cancelled; Ray then ends its own processes."""
    timer = threading.Timer(_GRACE_S, os._exit, (INTERRUPTED,))
    timer.daemon = True
    timer.start()
    return timer


class UnsavedSteps:
    """Tracks steps in the journal that no checkpoint contains yet, so that a stop waits until they are saved.

    Either the newest attempt trained these steps, or they are in peer memory and the next attempt resumes from them.
    """

    def __init__(self, run_dir: Place) -> None:
        """Start reading at the beginning of the journal."""
        self._tail = JournalTail(run_dir)
        self._state: Literal["none", "kept", "trained", "saved"] = "none"
        self._kept_step = 0

    @property
    def exist(self) -> bool:
        """Whether a stop should wait, because steps are being trained or have just been saved."""
        return self._state != "none"

    @property
    def are_kept(self) -> bool:
        """Whether only peer memory contains the steps; the next attempt saves them after its first step."""
        return self._state == "kept"

    def forget(self) -> None:
        """Skip the journal's current content, which belongs to an earlier command."""
        self.look()
        self._state = "none"

    def look(self) -> None:
        """Read new journal records."""
        for event in self._tail.poll():
            if isinstance(event, AttemptStarted):
                if not self.are_kept or event.resumed_step < self._kept_step:
                    self._state = "none"
            elif isinstance(event, StepGroup):
                self._state = "trained"
            elif isinstance(event, AttemptEnded):
                # A successful attempt has saved, and its workers end on their own. After a change of size or stage,
                # nothing needs saving until the next attempt.
                is_last = event.reason not in CONTINUED and event.reason.startswith(STOP_REASONS)
                self._state = "saved" if is_last else "none"
                if event.restarts and event.memory_step is not None and event.memory_step > (event.committed_step or 0):
                    self._state, self._kept_step = "kept", event.memory_step

    def lost(self) -> None:
        """Record that a worker was lost along with the steps trained so far; steps in peer memory are kept."""
        if self._state == "trained":
            self._state = "none"
