"""Stores a run's report in MLflow at the end of the training command.

The report is rendered in a separate process, which runs ``python -m ray_ulysses.report.publish RUN``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ray_ulysses.errors import UlyssesError
from ray_ulysses.logging import get_logger
from ray_ulysses.run_names import REPORT_FILE
from ray_ulysses.storage.place import Place, is_file, open_store, place_of
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity, is_tracked

_log = get_logger(__name__)
_LONGEST_S = 30.0
# HTTP timeout in seconds. Uploading a report takes longer than logging metrics.
_UPLOAD_S = "60"


@contextmanager
def published(run_dir: Place, before: Callable[[], object], *, command: Sequence[str] = ()) -> Iterator[None]:
    """Publish the run's report when the block ends, except on KeyboardInterrupt. A failure only logs a warning.

    Args:
        run_dir: The run's directory.
        before: Called before the report is rendered, for example to inform the user about the wait.
        command: Command that publishes the report; empty for the default.
    """
    is_due = True
    try:
        yield
    except KeyboardInterrupt:
        is_due = False
        raise
    finally:
        # Without an MLflow run there is nowhere to store the report.
        if is_due and is_tracked(run_dir):
            before()
            _publish(run_dir, command)


def _publish(run_dir: Place, command: Sequence[str]) -> None:
    try:
        subprocess.run(
            [*command] or [sys.executable, "-m", __name__, str(run_dir)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=_LONGEST_S, check=True,
        )  # fmt: skip
        return
    except OSError as error:
        reason = str(error)
    except subprocess.TimeoutExpired:
        reason = f"rendering and upload did not finish within {_LONGEST_S:g} s"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {error.returncode}"
    _log.warning("the report could not be stored in MLflow (%s); run `ray-ulysses report` to create it", reason)


def redraw(run_dir: Place, *, trust_run: bool = False) -> None:
    """Update a run's existing reports: ``report.html`` in the run's directory, and the copy in MLflow.

    Raises:
        OSError: The run can't be read, or ``report.html`` can't be written.
        RunError: The storage is unavailable.
        ArtifactError: MLflow did not store the report.
    """
    from ray_ulysses.report.page import render_report
    from ray_ulysses.run.secrets_file import stored_config
    from ray_ulysses.tracking.mlflow_results import store_text

    is_here = is_file(run_dir / REPORT_FILE)
    tracking = stored_config(run_dir, trust_run=trust_run).tracking
    is_there = is_tracked(run_dir)
    if not (is_here or is_there):
        return
    text = render_report(run_dir, trust_run=trust_run)
    if is_here:
        open_store(run_dir).replace(REPORT_FILE, [text.encode()])
    if is_there:
        store_text(run_dir, REPORT_FILE, text, trust_run=trust_run, allow_http=tracking.allow_http)


def main(arguments: Sequence[str]) -> int:
    """Publish a run's report and return the exit code."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", _UPLOAD_S)
    # Import these here, because they take a second, and the training command imports this module.
    from ray_ulysses.report.page import render_report
    from ray_ulysses.run.secrets_file import stored_config
    from ray_ulysses.tracking.mlflow_results import ArtifactError, store_text

    run_dir = place_of(arguments[0])
    try:
        # The training command wrote the configuration, so it can be trusted. But tracking.json may belong to another
        # run until the command has connected to its MLflow server.
        config, identity = stored_config(run_dir, trust_run=True), TrackingIdentity.load(run_dir)
        if identity is None or identity.uri != config.tracking_uri:
            raise ArtifactError("the run has no MLflow run yet")
        text = render_report(run_dir, trust_run=True)
        store_text(run_dir, REPORT_FILE, text, trust_run=True, allow_http=config.tracking.allow_http)
    except (ArtifactError, OSError, UlyssesError) as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
