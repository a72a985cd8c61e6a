"""Tracks a run in Weights & Biases, as one run of it across all attempts.

W&B's own client sends in the background. What it had not sent when a process was killed stays in the run's directory,
where ``wandb sync`` finds it; that is also where everything goes with ``WANDB_MODE=offline``.
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
from ray_ulysses.tracking.updates import AttemptBegan, AttemptOver, StepMetrics, Update

if TYPE_CHECKING:
    from wandb import Run, Settings

_INIT_S = 20.0
_FINISH_S = 15.0
_EXIT_S = 5.0
_SERVICE = "wandb-core"
# The client takes the first if it is there.
_FOLDERS = (".wandb", "wandb")


class WandbSink(Sink):
    """Delivers updates to one W&B run; only the tracker's thread may use it.

    Where, as whom and whether to send at once is said by W&B's own variables: ``WANDB_API_KEY``, ``WANDB_ENTITY``,
    ``WANDB_BASE_URL`` and ``WANDB_MODE``.

    Args:
        project: Name of the project.
        run_name: Name of the run in W&B.
        run_id: W&B's id of the run, the same in every attempt.
        directory: Where the client keeps its files.
    """

    def __init__(self, *, project: str, run_name: str, run_id: str, directory: Path) -> None:
        self._project, self._run_name, self._run_id, self._directory = project, run_name, run_id, directory
        self._run: Run | None = None

    def connect(self) -> str:
        """Begin the run, or continue it, and return its id; raises W&B's error if it does not answer or refuses."""
        # What the client tells its makers about its own errors, to the same server, holds up the end by 20 seconds.
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
            settings=_settings(),
        )
        # Registered again behind the client's own, which it has to come before; see `_bound_exit`.
        atexit.unregister(_bound_exit)
        atexit.register(_bound_exit)
        # Steps are a metric like any other: those of a replay, and evaluations that come late, are taken too.
        run.define_metric("*", step_metric="step")
        self._run = run
        return self._run_id

    def deliver(self, updates: Sequence[Update]) -> None:
        """Hand updates to the client, in order.

        Raises:
            PartlyDelivered: The client failed; its error is the cause.
        """
        if self._run is None:
            # An attempt ended before, and these are of the next one: the server was away, or they came late.
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
                # The client records the system itself.
                curves = {name: value for name, value in update.metrics.items() if not name.startswith("system/")}
                run.log({"step": update.step, **curves})
            case AttemptBegan():
                # One attempt may have other settings than the one before.
                run.config.update({**update.params, "attempt": dict(update.tags)}, allow_val_change=True)  # type: ignore[no-untyped-call]
                run.summary["state"] = "running"
                self._store(run, update.files)
            case CheckpointEvent():
                _show_checkpoint(run, update)
            case AttemptOver():
                self._finish(run, update)

    def _store(self, run: Run, files: Mapping[str, str]) -> None:
        """Store texts with the run, and its README as its notes unless a person wrote some."""
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
        # A run that was stopped on request ended as intended.
        run.finish(exit_code=int(over.status == "failed"))
        self._run = None


def _bound_exit() -> None:
    """Kill the client's service if it has not ended some seconds from now, when this process ends.

    wandb 0.31 waits at exit, for 20 seconds and more where its server is away, for a service whose records are on the
    disk.
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
    # An attempt may resume before the checkpoints of the one before it.
    found = {"attempt": checkpoint.attempt, "step": checkpoint.step}
    newest = [run.summary.get(f"checkpoint.{name}") or 0 for name in found]  # type: ignore[no-untyped-call]
    if [*found.values()] >= newest:
        run.summary.update({f"checkpoint.{name}": value for name, value in {**found, "path": checkpoint.path}.items()})


def _settings() -> Settings:
    import wandb

    return wandb.Settings(
        # The terminal belongs to the progress view, and the run's directory holds what it trains with.
        console="off",
        silent=True,
        disable_git=True,
        save_code=False,
        init_timeout=_INIT_S,
        finish_timeout=_FINISH_S,
        finish_timeout_raises=True,
    )
