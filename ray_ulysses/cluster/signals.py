"""What SIGINT, SIGTERM and SIGUSR1 do to ``train``: stop, orderly and in time, and save."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ray_ulysses.errors import INTERRUPTED
from ray_ulysses.run.requests import request_save, request_stop
from ray_ulysses.tracking.events import STOP_REASONS, AttemptEnded, AttemptStarted
from ray_ulysses.tracking.step_runs import StepRun
from ray_ulysses.views.journal_tail import JournalTail

if TYPE_CHECKING:
    from rich.console import Console

_GRACE_S = 4.0
"""Longest that ending may take with nothing to save: at times Ray swallows an interrupt, or waits for itself."""
_SAME_REQUEST_S = 2.0
"""`timeout` and some schedulers send a signal to the process and to its group: two that close together are one."""


class StopSignals:
    """Turns signals into requests to the workers, for the time of a block.

    ========================  ==================================================================================
    the first SIGINT/SIGTERM  ends the command while its workers start; else they save after their step, and end
    a second one              ends the command at once
    SIGUSR1                   the workers save after their step, and go on
    ========================  ==================================================================================
    """

    def __init__(self, run_dir: Path, session: str, console: Console) -> None:
        """Prepare; nothing is installed before the block is entered.

        Args:
            run_dir: The run's directory; requests are left in it.
            session: The command, which a request to stop is meant for.
            console: Where the answer to a signal is shown.
        """
        self._run_dir, self._session, self._console = run_dir, session, console
        self._asked_at: float | None = None
        self._has_workers = False
        self._is_ending = False
        self._steps = UnsavedSteps(run_dir)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        """Take the signals; only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            handlers = {signal.SIGINT: self._stop, signal.SIGTERM: self._stop, signal.SIGUSR1: self._save}
            self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def workers_start(self) -> None:
        """From here on `check` is called; ``ray.init`` has put a handler of its own in the place of ours."""
        self._steps.forget()
        self._has_workers = True
        if self._before:
            signal.signal(signal.SIGTERM, self._stop)

    def check(self, *, workers_are_whole: bool) -> None:
        """End the command if it was asked to stop and nobody is there who could save a step.

        Args:
            workers_are_whole: Whether every worker is there: with one of them lost, no step can be saved.

        Raises:
            KeyboardInterrupt: The command is to end now.
        """
        if not workers_are_whole:
            self._steps.lost()
        self._steps.look()
        # Once it is said that there is nothing to save, a first step that is done since changes nothing.
        if self._is_ending or (self._asked_at is not None and not self._steps.are_there):
            _end_in_time()
            raise KeyboardInterrupt

    def _stop(self, number: int, frame: Any) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if self._asked_at is not None:
            if now - self._asked_at > _SAME_REQUEST_S:
                raise KeyboardInterrupt
            return
        self._asked_at = now
        if not self._steps.are_there:
            self._is_ending = True
            self._say(f"{name}: there is no step to save yet; ending what was started")
            _end_in_time()
            if not self._has_workers:
                raise KeyboardInterrupt
            return
        try:
            request_stop(self._run_dir, self._session)
        except OSError as error:
            self._say(f"the request to stop could not be written ({error}); once more stops at once")
            return
        self._say(f"{name}: saving after this step, then stopping; once more to stop at once")

    def _save(self, number: int, frame: Any) -> None:
        try:
            request_save(self._run_dir)
        except OSError as error:
            self._say(f"the request to save could not be written ({error})")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


def _end_in_time() -> None:
    """End this process when the grace is over, whatever it is doing; Ray then ends what belongs to it."""
    timer = threading.Timer(_GRACE_S, os._exit, (INTERRUPTED,))
    timer.daemon = True
    timer.start()


class UnsavedSteps:
    """Whether the newest attempt has trained a step, so that a stop waits until it is saved; told by the journal."""

    def __init__(self, run_dir: Path) -> None:
        """Start before the first record."""
        self._tail = JournalTail(run_dir)
        self._state: Literal["none", "trained", "saved"] = "none"

    @property
    def are_there(self) -> bool:
        """Whether a request to stop is worth its wait: steps are being trained, or have just been saved."""
        return self._state != "none"

    def forget(self) -> None:
        """Read what is there, and take it for an earlier command's."""
        self.look()
        self._state = "none"

    def look(self) -> None:
        """Read what was added to the journal."""
        for event in self._tail.poll():
            if isinstance(event, AttemptStarted):
                self._state = "none"
            elif isinstance(event, StepRun):
                self._state = "trained"
            elif isinstance(event, AttemptEnded):
                # One that ended well has saved, and its workers end by themselves.
                self._state = "saved" if event.reason.startswith(STOP_REASONS) else "none"

    def lost(self) -> None:
        """Count the steps so far as lost: a worker is gone, and with it what was not saved."""
        if self._state == "trained":
            self._state = "none"
