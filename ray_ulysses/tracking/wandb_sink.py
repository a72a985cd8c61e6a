"""Tracks a run in Weights & Biases. All attempts of the run share one W&B run.

W&B's client sends data in the background. If the process is killed, unsent data stays in the run's directory and can be
sent with ``wandb sync``. With ``WANDB_MODE=offline``, all data stays there.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ray_ulysses.storage.regular import refuse_links
from ray_ulysses.tracking.events import CheckpointEvent
from ray_ulysses.tracking.tail import PartlyDelivered, Sink
from ray_ulysses.tracking.updates import AttemptBegan, AttemptOver, SampleText, StepMetrics, Update

if TYPE_CHECKING:
    from wandb import Run

_INIT_S = 20.0
_FINISH_S = 15.0
_EXIT_S = 5.0
_SERVICE = "wandb-core"
# The client prefers the first folder if it exists.
_FOLDERS = (".wandb", "wandb")


class WandbSink(Sink):
    """Delivers updates to one W&B run; used only by the tracker's thread.

    W&B's environment variables select the server, the account and the mode: ``WANDB_API_KEY``, ``WANDB_ENTITY``,
    ``WANDB_BASE_URL`` and ``WANDB_MODE``.

    Args:
        project: Name of the W&B project.
        run_name: Name of the W&B run.
        run_id: Id of the W&B run, the same for all attempts.
        directory: Directory for the client's files.
    """

    def __init__(self, *, project: str, run_name: str, run_id: str, directory: Path) -> None:
        self._project, self._run_name, self._run_id, self._directory = project, run_name, run_id, directory
        self._run: Run | None = None

    def connect(self) -> str:
        """Start or resume the W&B run and return its id. W&B's errors propagate."""
        # The client's own error reports would delay the exit by 20 seconds if the server is unreachable.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._directory.mkdir(parents=True, exist_ok=True)
        for name in _FOLDERS:
            refuse_links(self._directory / name, self._directory)
        run = wandb.init(
            project=self._project,
            name=self._run_name,
            id=self._run_id,
            resume="allow",
            reinit="finish_previous",
            dir=str(self._directory),
            settings=wandb.Settings(
                # Console output would disturb the progress view, and the run's directory already has the configuration.
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                init_timeout=_INIT_S,
                finish_timeout=_FINISH_S,
                finish_timeout_raises=True,
            ),
        )
        # Handlers run in reverse order. Register again to run before the handler of the client; see `_bound_exit`.
        atexit.unregister(_bound_exit)
        atexit.register(_bound_exit)
        # W&B's own step must increase. With a step metric, replayed steps and late evaluations are accepted too.
        run.define_metric("*", step_metric="step")
        self._run = run
        return self._run_id

    def deliver(self, updates: Sequence[Update]) -> None:
        """Pass updates to the client, in order.

        Raises:
            PartlyDelivered: The client failed. ``__cause__`` is the client's error.
        """
        if self._run is None:
            # `_finish` closed the W&B run, and these updates belong to the next attempt.
            self.connect()
        assert self._run is not None
        for number, update in enumerate(updates):
            try:
                self._hand_over(self._run, update)
            except Exception as error:
                raise PartlyDelivered(number) from error

    def _hand_over(self, run: Run, update: Update) -> None:
        match update:
            case StepMetrics():
                # The client records system metrics itself.
                curves = {name: value for name, value in update.metrics.items() if not name.startswith("system/")}
                run.log({"step": update.step, **curves})
            case AttemptBegan():
                # Settings may change between attempts.
                run.config.update({**update.params, "attempt": dict(update.tags)}, allow_val_change=True)  # type: ignore[no-untyped-call]
                run.summary["state"] = "running"
                self._store(run, update.files)
            case SampleText():
                self._store(run, {f"samples-step-{update.step:08d}.md": update.text})
            case CheckpointEvent():
                _show_checkpoint(run, update)
            case AttemptOver():
                self._finish(run, update)

    def _store(self, run: Run, files: Mapping[str, str]) -> None:
        """Store files with the W&B run, and the README as its notes unless the user wrote notes."""
        for name, text in files.items():
            if name == "README.md" and not run.notes:
                run.notes = text
            path = Path(run.dir) / name
            path.write_text(text, encoding="utf-8")
            run.save(str(path), base_path=run.dir, policy="now")

    def _finish(self, run: Run, over: AttemptOver) -> None:
        if over.metrics:
            run.log({"step": over.step, **over.metrics})
        run.summary["state"] = over.status
        for name, value in over.tags.items():
            run.summary[name] = value
        # A stop on request is not a failure.
        run.finish(exit_code=int(over.status == "failed"))
        self._run = None


def _bound_exit() -> None:
    """Kill the client's service process if it is still running `_EXIT_S` seconds after this handler.

    At exit, wandb 0.31 waits for its service for 20 seconds or more if the server is unreachable, although all records
    are already on disk.
    """

    def kill() -> None:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child.name().startswith(_SERVICE):
                    child.kill()

    timer = threading.Timer(_EXIT_S, kill)
    timer.daemon = True
    timer.start()


def _show_checkpoint(run: Run, checkpoint: CheckpointEvent) -> None:
    # Compare attempts first, because a newer attempt may resume from an earlier step.
    found = {"attempt": checkpoint.attempt, "step": checkpoint.step}
    newest = [run.summary.get(f"checkpoint.{name}") or 0 for name in found]  # type: ignore[no-untyped-call]
    if [*found.values()] >= newest:
        run.summary.update({f"checkpoint.{name}": value for name, value in {**found, "path": checkpoint.path}.items()})
