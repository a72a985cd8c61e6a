"""``train``: claims the run, starts its workers through Ray Train, shows it, and says how it ended."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig

from ray_ulysses.cluster.failures import WatchedTrainer
from ray_ulysses.cluster.restarts import Ended, TrainingFailed, failure_book, settle_failure, train_until_done
from ray_ulysses.cluster.session import missing_resources, ray_session, session_logs
from ray_ulysses.cluster.start_view import StartView
from ray_ulysses.cluster.worker import leave_refusal, refusal, train_worker
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.storage.holding import HoldWatch
from ray_ulysses.storage.lock import RunLock
from ray_ulysses.tracking.history import read_history
from ray_ulysses.trainer.checkpoint_store import checkpoint_location, checkpoint_lock, checkpoint_store
from ray_ulysses.trainer.completion import say_command_ended, settle_completed
from ray_ulysses.trainer.failures import CONTROLLER
from ray_ulysses.trainer.preflight import check_resume, check_writable, claim_directory, refuse_vanished
from ray_ulysses.trainer.requests import clear_stop, request_save, request_stop
from ray_ulysses.trainer.run_files import describe_run
from ray_ulysses.trainer.shared_storage import announce_session
from ray_ulysses.views.plan import render_plan
from ray_ulysses.views.run_readme import render_readme

if TYPE_CHECKING:
    from rich.console import Console

    from ray_ulysses.config import Config
    from ray_ulysses.storage.holding import Hold
    from ray_ulysses.tracking.history import RunHistory
    from ray_ulysses.trainer.failures import FailureBook
    from ray_ulysses.trainer.preflight import PreparedRun
    from ray_ulysses.views.progress import ProgressView

_SAME_REQUEST_S = 2.0
"""`timeout` and some schedulers send a signal to the process and to its group: two that close together are one."""
_STORAGE_PREFIXES = ("AWS_", "AZURE_STORAGE_", "GOOGLE_")
"""Variables by which an object store is found and entered: what the driver has checked, the workers must find, too."""
_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """How ``train`` ended.

    Attributes:
        history: The run as its journal has it.
        was_complete: Whether nothing was left to do.
        seconds: Duration of the command.
    """

    history: RunHistory
    was_complete: bool
    seconds: float


def train(prepared: PreparedRun, view: ProgressView, started: float) -> TrainResult:
    """Train a prepared run to its end, to a request to stop (SIGINT or SIGTERM), or to a failure.

    Args:
        prepared: What ``prepare_run`` returned, without problems.
        view: Where progress is shown; it has begun.
        started: When the command began, in seconds since the epoch.

    Raises:
        UserError: The run is held by another process, or contradicts what is stored.
        RunError: Training failed; what is committed stays, and the same command resumes.
    """
    config, console = prepared.config, view.console
    view.phase("looking at the storage")
    check_writable(config)
    check_resume(prepared)
    with RunLock(config.run_dir) as lock, checkpoint_lock(config) as lease:
        if lock.taken_over_from is not None:
            console.print(f"taken over from {lock.taken_over_from}, which ended without a word", soft_wrap=True)
        # Once more: another command may have started the run between the check and the lock.
        check_resume(prepared)
        history = settle_completed(prepared)
        if history is not None:
            return TrainResult(history=history, was_complete=True, seconds=time.time() - started)
        claim_directory(prepared)
        _describe(prepared)
        session = uuid.uuid4().hex
        announce_session(config.run_dir, session)
        clear_stop(config.run_dir)
        book = failure_book(config, session)
        holds = [lock] if lease is None else [lock, lease]
        try:
            train_until_done(book, lambda: _train_once(prepared, book, started, view, holds))
            view.phase("ending Ray")
        except (TrainingFailed, UserError):
            settle_failure(book)
            raise
        finally:
            say_command_ended(config.run_dir, session)
        refuse_vanished(config)
        clear_stop(config.run_dir)
    history = read_history(config.run_dir, store=checkpoint_store(config))
    return TrainResult(history=history, was_complete=False, seconds=time.time() - started)


def _describe(prepared: PreparedRun) -> None:
    """Write down for people what the run is; it goes on without."""
    config, report = prepared.config, prepared.report
    readme = render_readme(report, config.run_dir, checkpoint_location(config))
    try:
        describe_run(config.run_dir, plan=render_plan(report), readme=readme)
    except OSError as error:
        _log.warning("README.md and plan.txt of the run could not be written (%s)", error)


def _train_once(
    prepared: PreparedRun, book: FailureBook, started: float, view: ProgressView, holds: Sequence[Hold]
) -> Ended | None:
    """Connect to Ray and run the workers until the run ends, or Ray can't go on; return what it ended with."""
    config = prepared.config
    where = config.cluster.address or os.environ.get("RAY_ADDRESS")
    view.phase(f"connecting to Ray at {where}" if where else "starting Ray")
    with ray_session(config.cluster.address, cpus=_cpus(config), environment=_worker_environment()) as embedded:
        if not embedded:
            _say_what_is_missing(config, view.console)
        return _run_workers(prepared, book, started, view, holds)


def _run_workers(
    prepared: PreparedRun, book: FailureBook, started: float, view: ProgressView, holds: Sequence[Hold]
) -> Ended | None:
    config, session = prepared.config, book.session
    trainer = _trainer(config, book, {"session": session, "command_started": started, "workers_asked": time.time()})
    failure: list[BaseException] = []
    logs = session_logs()

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            failure.append(error)

    # Not in the main thread: there Ray Train would install a SIGINT handler of its own, which loses the last steps.
    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    with _requests_by_signal(config.run_dir, session, view.console), HoldWatch(holds) as watch:
        thread.start()
        wait_while_held(thread, watch, config.run_dir, session, StartView(view, config).look)
        if failure:
            # It may be what the loss of the run has done to the workers.
            watch.look()
            end_if_lost(watch, config.run_dir, session)
    if not failure:
        return None
    text = refusal(config.run_dir, session)
    if text is not None:
        raise UserError(text) from failure[0]
    return Ended(error=failure[0], logs=logs)


def wait_while_held(
    thread: threading.Thread,
    watch: HoldWatch,
    run_dir: Path,
    session: str,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Wait for the thread that runs the workers, for as long as the run is this command's.

    Args:
        thread: The thread.
        watch: Whether the run is still this command's.
        run_dir: The run's directory.
        session: The command's name.
        meanwhile: Called a few times a second.

    Raises:
        RunError: Another process has taken the run over; the workers end with the connection to Ray, which the caller
            gives up, without another checkpoint.
    """
    while thread.is_alive():
        end_if_lost(watch, run_dir, session)
        meanwhile()
        thread.join(timeout=0.2)


def end_if_lost(watch: HoldWatch, run_dir: Path, session: str) -> None:
    """Raise `RunError` if another process has the run now; then no attempt of this session begins any more."""
    if watch.problem is None:
        return
    text = (
        f"{watch.problem}; this command ends at once and saves nothing more. Nothing that was committed is lost, and "
        "the other goes on from it. Let one command at a time train a run"
    )
    # Ray would start the workers anew if one of them ended before the others.
    leave_refusal(run_dir, session, text)
    raise RunError(text) from watch.problem


def _trainer(config: Config, book: FailureBook, command: dict[str, Any]) -> WatchedTrainer:
    cluster = config.cluster
    for name, value in _controller_environment(config).items():
        os.environ.setdefault(name, value)
    return WatchedTrainer(
        train_worker,
        book=replace(book, writer=CONTROLLER),
        train_loop_config={"config": config.model_dump(mode="json"), **command},
        torch_config=TorchConfig(
            backend="nccl" if cluster.gpus_per_worker else "gloo",
            timeout_s=max(1, round(config.elastic.collective_timeout_s)),
        ),
        scaling_config=ScalingConfig(
            num_workers=cluster.workers,
            use_gpu=cluster.gpus_per_worker > 0,
            resources_per_worker={"CPU": cluster.cpus_per_worker, "GPU": float(cluster.gpus_per_worker)},
            placement_strategy="PACK",
        ),
        run_config=RunConfig(
            # Ray Train's own bookkeeping is never read again: recovery starts from our manifests.
            name=command["session"],
            storage_path=str(config.run_dir / "ray"),
        ),
    )


def _cpus(config: Config) -> float:
    return config.cluster.workers * config.cluster.cpus_per_worker + 2 * config.cluster.data_cpus


def _worker_environment() -> dict[str, str]:
    names = ("HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    found = {name: value for name, value in os.environ.items() if name in names or name.startswith(_STORAGE_PREFIXES)}
    return found | {"TOKENIZERS_PARALLELISM": "false"}


def _controller_environment(config: Config) -> dict[str, str]:
    return {
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(config.elastic.worker_start_timeout_s),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "3",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
    }


def _say_what_is_missing(config: Config, console: Console) -> None:
    cluster = config.cluster
    gpus = float(cluster.workers * cluster.gpus_per_worker)
    missing = missing_resources(cpus=_cpus(config), gpus=gpus)
    if missing is not None:
        console.print(f"waiting up to {config.elastic.worker_start_timeout_s:g} s for nodes: {missing}", soft_wrap=True)


@contextmanager
def _requests_by_signal(run_dir: Path, session: str, console: Console) -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into a request to save and stop, and a second one into an interrupt.

    SIGUSR1 asks for a checkpoint, and the run goes on.

    Installed after ``ray.init``, which replaces handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    asked_at: list[float] = []

    def handle(number: int, frame: Any) -> None:
        now = time.monotonic()
        if asked_at and now - asked_at[0] > _SAME_REQUEST_S:
            raise KeyboardInterrupt
        asked_at.append(now)
        if len(asked_at) > 1:
            return
        try:
            request_stop(run_dir, session)
        except OSError as error:
            console.print(
                f"the request to stop could not be written ({error}); once more stops at once", soft_wrap=True
            )
            return
        name = signal.Signals(number).name
        console.print(f"{name}: saving after this step, then stopping; once more to stop at once", soft_wrap=True)

    def save(number: int, frame: Any) -> None:
        try:
            request_save(run_dir)
        except OSError as error:
            console.print(f"the request to save could not be written ({error})", soft_wrap=True)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, save)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
