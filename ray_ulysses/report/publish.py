"""Draws the report of a run and stores it in MLflow, as a process of its own beside the command that trains.

``python -m ray_ulysses.report.publish RUN`` does it once. Drawing takes seconds of Python, for which neither a worker
nor the coordinator of the workers may wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ray_ulysses.errors import UlyssesError
from ray_ulysses.logging import get_logger
from ray_ulysses.run_names import REPORT_FILE
from ray_ulysses.storage.place import Place, place_of, store_at
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity, is_tracked

_log = get_logger(__name__)
_LONGEST_S = 300.0
_LAST_S = 30.0
_NICENESS = 10
# Seconds; a report has megabytes, unlike the metrics, for which the client waits less.
_UPLOAD_S = "60"


class ReportPublisher:
    """Publishes the report of a run again and again, in a thread; a failure is only a warning.

    Args:
        run_dir: The run's directory.
        every_s: Seconds between the end of one and the beginning of the next.
        command: What publishes it once.
    """

    def __init__(self, run_dir: Place, every_s: float, *, command: Sequence[str] = ()) -> None:
        self._run_dir, self._every_s = run_dir, every_s
        self._command = [*command] or [sys.executable, "-m", __name__, str(run_dir)]
        self._ends = threading.Event()
        self._is_warned = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._publish_while_it_trains, name="report", daemon=True)

    def start(self) -> None:
        """Begin; the first one is published after the first interval."""
        self._thread.start()

    def close(self, last_s: float = _LAST_S) -> None:
        """Publish the last one, which may take so many seconds; so may the one that is being published.

        Args:
            last_s: That many; 0 publishes none.
        """
        self._ends.set()
        # One that is ended with the command has not failed.
        self._is_warned |= last_s == 0
        try:
            self._thread.join(last_s)
            if last_s > 0 and not self._thread.is_alive():
                self._publish(last_s)
        finally:
            if self._process is not None and self._process.poll() is None:
                self._process.kill()

    def _publish_while_it_trains(self) -> None:
        while not self._ends.wait(self._every_s):
            self._publish(_LONGEST_S)

    def _publish(self, longest_s: float) -> None:
        """Publish it once; after ``longest_s`` seconds it is killed."""
        # Before there is a run in MLflow, there is nothing to draw either.
        if not is_tracked(self._run_dir):
            return
        try:
            # In a session of its own: Ctrl-C is for the command, which ends it.
            process = self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._warn(str(error))
            return
        try:
            _, said = process.communicate(timeout=longest_s)
        except subprocess.TimeoutExpired:
            self._warn(f"it was not done after {longest_s:g} s")
            return
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if process.returncode != 0:
            lines = said.decode(errors="replace").strip().splitlines()
            self._warn(lines[-1] if lines else f"its process ended with {process.returncode}")

    def _warn(self, reason: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            _log.warning("the report could not be stored in MLflow (%s); the run goes on without it", reason)


@contextmanager
def published(run_dir: Place, every_minutes: float | None, before_last: Callable[[], object]) -> Iterator[None]:
    """Publish the report while a block runs, and once it has ended, unless it is interrupted.

    Args:
        run_dir: The run's directory.
        every_minutes: Minutes from one to the next; None for no report at all.
        before_last: Called before the last one, for which the caller waits.
    """
    if every_minutes is None:
        yield
        return
    publisher = ReportPublisher(run_dir, 60 * every_minutes)
    publisher.start()
    last_s = _LAST_S
    try:
        yield
    except KeyboardInterrupt:
        last_s = 0.0
        raise
    finally:
        if last_s > 0:
            before_last()
        publisher.close(last_s)


def redraw(run_dir: Place, *, trust_run: bool = False) -> None:
    """Draw the report of a run again where it has been drawn: its ``report.html``, and MLflow's copy.

    Args:
        run_dir: The run's directory.
        trust_run: Whether the file of secrets and the servers that only the run names are used.

    Raises:
        OSError: The run can't be read, or the file can't be written.
        RunError: The storage does not answer.
        ArtifactError: MLflow did not store it.
    """
    from ray_ulysses.export.source import read_config
    from ray_ulysses.report.page import render_report
    from ray_ulysses.tracking.mlflow_results import store_text

    is_here = (run_dir / REPORT_FILE).is_file()
    tracking = read_config(run_dir, trust_run=trust_run).tracking
    is_there = is_tracked(run_dir) and tracking.report_minutes is not None
    if not (is_here or is_there):
        return
    text = render_report(run_dir, trust_run=trust_run)
    if is_here:
        store_at(run_dir).replace(REPORT_FILE, [text.encode()])
    if is_there:
        store_text(run_dir, REPORT_FILE, text, trust_run=trust_run, allow_http=tracking.allow_http)


def main(arguments: Sequence[str]) -> int:
    """Publish the report of a run once; return the exit code."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", _UPLOAD_S)
    os.nice(_NICENESS)
    # Only here: they take a second, which the command that trains need not spend.
    from ray_ulysses.report.page import render_report
    from ray_ulysses.run.stored_run import stored_config
    from ray_ulysses.tracking.mlflow_results import ArtifactError, store_text

    run_dir = place_of(arguments[0])
    try:
        # The command that trains has written its own configuration there. Until it has reached its MLflow,
        # tracking.json may be somebody else's.
        config, identity = stored_config(run_dir, trust_run=True), TrackingIdentity.load(run_dir)
        if identity is None or identity.uri != config.tracking_uri:
            raise ArtifactError("MLflow has no run for it yet")
        text = render_report(run_dir, trust_run=True)
        store_text(run_dir, REPORT_FILE, text, trust_run=True, allow_http=config.tracking.allow_http)
    except (ArtifactError, OSError, UlyssesError) as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
