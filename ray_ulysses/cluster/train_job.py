"""Implements ``train``: claims the run, starts its workers through Ray Train, and reports how it ended."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import ray
import torch
from ray._raylet import RAY_NODE_ID_KEY  # type: ignore[attr-defined]
from ray.exceptions import RayError
from ray.train import RunConfig, ScalingConfig
from ray.train.constants import ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2.api.exceptions import TrainingFailedError

from ray_ulysses.clock import SystemClock
from ray_ulysses.cluster.address import cluster_address
from ray_ulysses.cluster.capacity import Demand, WorkerWatch, hint, places, shortfall
from ray_ulysses.cluster.controller import NoProcessGroup, StopWatch, SupervisedController
from ray_ulysses.cluster.failures import (
    CONTROLLER,
    Ended,
    FailureLog,
    TrainingFailed,
    failure_log,
    record_final_failure,
    train_until_done,
)
from ray_ulysses.cluster.node_watch import watch_nodes
from ray_ulysses.cluster.peer_memory_agents import end_agents
from ray_ulysses.cluster.run_metrics import RunMetrics
from ray_ulysses.cluster.session import (
    cluster_nodes,
    free_memory,
    free_nodes,
    look_at_cluster,
    own_node,
    ray_session,
    session_logs,
)
from ray_ulysses.cluster.signals import StopSignals
from ray_ulysses.cluster.worker import train_worker
from ray_ulysses.cluster.worker_environment import check_secrets, passed_on
from ray_ulysses.config.running import mlflow_is_on
from ray_ulysses.errors import ConfigError, RunError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.planner.problems import gpu_problem, local_problem
from ray_ulysses.report.publish import published
from ray_ulysses.run.checkpoint_store import checkpoint_claim
from ray_ulysses.run.completion import record_command_ended, record_completion
from ray_ulysses.run.ownership import claim_checkpoints, peer_memory_key
from ray_ulysses.run.planning import skip_bad_step
from ray_ulysses.run.preflight import PreparedRun, check_resume, check_writable, claim_directory, refuse_vanished
from ray_ulysses.run.requests import announce_session, clear_stop
from ray_ulysses.run.run_files import RunTexts, describe_run
from ray_ulysses.run.takeover import leave_refusal, refusal
from ray_ulysses.run.trackers import tracked
from ray_ulysses.storage.claim import Claim, run_claim
from ray_ulysses.storage.place import Place, node_folder
from ray_ulysses.storage.regular import refuse_links
from ray_ulysses.tracking.history import RunHistory, read_history
from ray_ulysses.tracking.mlflow_tracker import mlflow_page

if TYPE_CHECKING:
    from rich.console import Console

    from ray_ulysses.config import Config
    from ray_ulysses.run.settings import ResolvedRun

_log = get_logger(__name__)
_LOOK_EVERY_S = 0.2
_CONTROLLER_ENVIRONMENT = {
    # The chosen nodes may no longer have free resources; other nodes are chosen after this timeout.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",
    # Our coordinator moves workers off draining nodes, whereas Ray Train would restart all workers at the first node's
    # deadline.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # Ray Train's own controller triggers this warning.
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
}
"""Defaults of environment variables that Ray Train reads."""


class RunDisplay(Protocol):
    """Progress display of the ``train`` command, implemented in a higher-level package."""

    console: Console

    @property
    def awaits_workers(self) -> bool:
        """Whether the workers have not reported yet."""

    def phase(self, name: str) -> None:
        """Set the current phase."""

    def awaiting_workers(self, phase: str) -> None:
        """Set the workers' start-up phase, unless the workers have already reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """Result of the ``train`` command."""

    history: RunHistory
    """The run's history, read from its journal."""
    was_complete: bool
    """Whether the run was already complete, so that nothing was trained."""
    seconds: float
    """Duration of the command, in seconds."""


def train(prepared: PreparedRun, texts: RunTexts, view: RunDisplay, started: float) -> TrainResult:
    """Train a prepared run until the run ends, is stopped (SIGINT, SIGTERM or SIGHUP), or fails.

    Args:
        prepared: The prepared run, in which no problems were found.
        texts: Descriptions for users, to be written to the run's directory.
        view: Progress display, already entered.
        started: Start time of the command, in seconds since the epoch.

    Raises:
        UserError: Another process has claimed the run, or the configuration contradicts the stored run.
        RunError: Training failed. All committed checkpoints are kept, and the same command resumes the run.
    """
    config, console, session = prepared.config, view.console, uuid.uuid4().hex
    view.phase("checking the storage")
    check_writable(prepared)
    with (
        StopSignals(config.run_dir, session, console) as signals,
        run_claim(config.run_dir, session) as claim,
        checkpoint_claim(config, prepared.run.store, session) as apart,
    ):
        if claim.taken_over_from is not None:
            console.print(f"took over the run from {claim.taken_over_from}, which ended without releasing it")
        claim_checkpoints(prepared.run)
        # Another command may have started the run before this one claimed it.
        prepared = prepared.read_again()
        check_resume(prepared)
        if (history := record_completion(prepared)) is not None:
            return TrainResult(history=history, was_complete=True, seconds=SystemClock().now() - started)
        if cluster_address(config.cluster.address) is None:
            # Check before an embedded Ray is started.
            found = [gpu_problem(config, torch.cuda.device_count())]
            if prepared.local_bytes > (free := free_memory()):
                found.append(local_problem(config, prepared.report.shape, free))
            if problems := [one for one in found if one is not None]:
                raise ConfigError(problems, source="a Ray on this machine")
        claim_directory(prepared)
        try:
            describe_run(config.run_dir, texts)
        except OSError as error:
            _log.warning("the run's README.md and plan.txt could not be written (%s)", error)
        announce_session(config.run_dir, session)
        book = failure_log(config, session, started)
        claims = [claim] if apart is None else [claim, apart]
        with contextlib.ExitStack() as ending:
            if mlflow_is_on(config.tracking):
                ending.enter_context(published(config.run_dir, lambda: view.phase("drawing the report")))
            # Entered after `published`, so that the report shows which results the trackers have received.
            ending.enter_context(tracked(config))
            try:
                _train_to_the_end(
                    prepared.run, book, console, lambda: _train_once(prepared, book, view, signals, claims)
                )
            except (TrainingFailed, UserError):
                record_final_failure(book)
                raise
            finally:
                record_command_ended(config.run_dir, session)
        refuse_vanished(config)
        clear_stop(config.run_dir)
    history = read_history(config.run_dir, store=prepared.run.store)
    return TrainResult(history=history, was_complete=False, seconds=SystemClock().now() - started)


def _train_to_the_end(
    run: ResolvedRun, book: FailureLog, console: Console, train_once: Callable[[], Ended | None]
) -> None:
    """Train until the run ends, skipping the rows of bad steps if the configuration allows it."""
    while True:
        try:
            train_until_done(book, train_once)
            return
        except TrainingFailed:
            skipped = skip_bad_step(run, SystemClock())
            if skipped is None:
                raise
            console.print(skipped)


def _train_once(
    prepared: PreparedRun, book: FailureLog, view: RunDisplay, signals: StopSignals, claims: Sequence[Claim]
) -> Ended | None:
    """Connect to Ray and run the workers; return None if the run is done, or else how Ray Train ended."""
    config = prepared.config
    address = cluster_address(config.cluster.address)
    view.phase("starting Ray" if address is None else f"connecting to Ray at {address}")
    demand = Demand.of(prepared.run)
    environment = passed_on(os.environ, embedded=address is None)
    with ray_session(address, cpus=demand.total_cpus, environment=environment) as embedded:
        if not book.failures():
            # After a failure, the workers wait for lost nodes instead.
            _check_capacity(config, demand, view.console, embedded=embedded)
            if not embedded:
                check_secrets(config, view.console.print)
        ended = _run_workers(prepared.run, demand, book, view, signals, claims)
        view.phase("ending Ray")
        return ended


def _run_workers(
    run: ResolvedRun,
    demand: Demand,
    book: FailureLog,
    view: RunDisplay,
    signals: StopSignals,
    claims: Sequence[Claim],
) -> Ended | None:
    config, session, say = run.config, book.session, view.console.print
    logs = session_logs()
    workers = WorkerWatch(
        demand,
        limit_s=config.elastic.worker_start_timeout_s,
        look=look_at_cluster,
        say=say,
        clock=SystemClock(),
        is_training=lambda: not view.awaits_workers,
    )
    nodes = watch_nodes(config.elastic, say, embedded=cluster_address(config.cluster.address) is None)
    page_of = config.tracking_uri
    signals.workers_start()

    def look() -> None:
        nonlocal page_of
        end_if_lost(claims, config.run_dir, session)
        workers.check()
        metrics.export()
        if nodes is not None:
            nodes.look(workers.nodes)
        signals.check(workers_are_whole=workers.is_whole)
        if view.awaits_workers:
            view.awaiting_workers(workers.awaited)
        elif page_of is not None and (page := mlflow_page(page_of, config.run_dir)).is_run:
            # The tracker's own thread creates the MLflow run, perhaps long after the first step.
            page_of = None
            view.console.print(f"MLflow: {page.in_words()}")

    command = {"session": session, "command_started": book.command_started, "workers_asked": SystemClock().now()}
    try:
        with RunMetrics(config) as metrics:
            _trainer(run, book, look, command).fit()
        if config.elastic.peer_memory:
            # Storage has the final state by now; unreachable agents end on their own.
            with contextlib.suppress(RayError, OSError, RuntimeError):
                end_agents(peer_memory_key(config))
        return None
    except (TrainingFailedError, RayError, RuntimeError, ConnectionError) as error:
        failure = error
    # The workers may have failed because another command took over the run.
    for claim in claims:
        with contextlib.suppress(OSError):
            claim.beat()
    end_if_lost(claims, config.run_dir, session)
    if (text := refusal(config.run_dir, session)) is not None:
        raise UserError(text) from failure
    return Ended(error=failure, logs=logs)


def end_if_lost(claims: Sequence[Claim], run_dir: Place, session: str) -> None:
    """Raise `RunError` if another process has taken over the run; no attempt of this session starts afterwards.

    The caller then closes the connection to Ray, which ends the workers without another checkpoint.
    """
    problem = next((claim.problem for claim in claims if claim.problem is not None), None)
    if problem is None:
        return
    text = (
        f"{problem}; this command ends immediately, without saving. All committed checkpoints are kept, and the other "
        "command continues from the newest one. Train a run with only one command at a time"
    )
    # Otherwise Ray Train would restart the workers if one of them ended before the others.
    leave_refusal(run_dir, session, text)
    raise RunError(text) from problem


class WatchedTrainer(TorchTrainer):
    """A `TorchTrainer` that runs our coordinator and can abort the wait for the workers.

    Args:
        run: The run.
        book: Failure log, which decides whether to restart the workers.
        job: Configuration and command details for the workers.
        look: Called several times per second by the thread that called ``fit``. An error raised by ``look`` ends
            ``fit``, and the workers end with the connection to Ray. No other thread of ours is inside a Ray call at
            that time; such a call would crash when the connection is shut down.
        arguments: Positional arguments of `TorchTrainer`.
    """

    def __init__(
        self,
        *arguments: Any,
        run: ResolvedRun,
        book: FailureLog,
        job: dict[str, Any],
        look: Callable[[], object],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, train_loop_config=job, **options)
        self._run, self._book, self._job, self._look = run, book, job, look

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()  # type: ignore[misc]
        # No data set passes through Ray Train, so the actor that manages them would only cost seconds at the start.
        return [one for one in callbacks if not isinstance(one, DatasetsCallback)]

    def _initialize_and_run_controller(self, **kwargs: Any) -> Any:
        """Run the controller, calling `look` meanwhile, without Ray's SIGINT handler, which would lose steps."""
        # Each worker sees the GPUs of all workers on its node, so that NCCL can access them directly.
        environment = {**get_env_vars_to_propagate(), ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV: "1"}
        actor = ray.remote(
            num_cpus=0,
            label_selector={RAY_NODE_ID_KEY: own_node()},
            runtime_env={"env_vars": environment},
        )(SupervisedController)
        controller: Any = actor.remote(**kwargs, run=self._run, book=self._book, job=self._job)
        asked, running = controller.process.remote(), controller.run.remote()
        watch: StopWatch | None = None
        while not ray.wait([running], timeout=_LOOK_EVERY_S)[0]:
            self._look()
            if watch is not None:
                watch.look()
            elif ray.wait([asked], timeout=0)[0]:
                # If the controller is dead, `run` has ended too.
                with contextlib.suppress(RayError):
                    watch = StopWatch(*ray.get(asked))
        ray.get(running)
        return ray.get(controller.get_result.remote())


def _trainer(run: ResolvedRun, book: FailureLog, look: Callable[[], object], command: dict[str, Any]) -> WatchedTrainer:
    config, cluster = run.config, run.config.cluster
    for name, value in _CONTROLLER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    job = {"config": config.model_dump(mode="json"), **command}
    scaling = ScalingConfig(
        num_workers=cluster.workers.max,
        use_gpu=cluster.gpus_per_worker > 0,
        resources_per_worker={"CPU": cluster.cpus_per_worker, "GPU": float(cluster.gpus_per_worker)},
        placement_strategy="PACK",
    )
    own = node_folder(config.run_dir)
    refuse_links(own / "ray", own)
    return WatchedTrainer(
        train_worker,
        run=run,
        book=replace(book, writer=CONTROLLER),
        job=job,
        look=look,
        torch_config=NoProcessGroup(),
        scaling_config=scaling,
        run_config=RunConfig(
            # Ray Train's own bookkeeping is never read again: recovery starts from our manifests.
            name=command["session"],
            storage_path=str(own / "ray"),
        ),
    )


def _check_capacity(config: Config, demand: Demand, console: Console, *, embedded: bool) -> None:
    """Raise `RunError` before any worker starts if the run does not fit on the cluster's nodes."""
    nodes = cluster_nodes()
    if (lack := shortfall(demand, nodes)) is not None:
        if config.cluster.wait_for_nodes and not embedded:
            return
        wait = "" if embedded else "; cluster.wait_for_nodes=true waits for nodes that join later"
        raise RunError(f"{lack}; {hint(demand, nodes)}{wait}")
    free = places(demand, free_nodes())
    if free < demand.wanted.least:
        console.print(
            f"waiting up to {config.elastic.worker_start_timeout_s:g} s for other jobs to end: the cluster fits "
            f"{demand.setting}={demand.wanted.least} workers, but has free resources for only {free}"
        )
