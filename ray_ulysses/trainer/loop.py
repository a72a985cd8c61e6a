"""One attempt of a run, from the first collective to the last checkpoint: read it from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ray_ulysses.attention.ulysses import apply_ulysses
from ray_ulysses.checkpoint import CheckpointMeta, save_checkpoint
from ray_ulysses.checkpoint.retention import apply_retention
from ray_ulysses.config.resume import resume_fingerprint
from ray_ulysses.data.digest import add_digests
from ray_ulysses.data.steps import num_micro_steps
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.optimizer import learning_rate
from ray_ulysses.engine.zero import build_engine, prepare_process, zero_config
from ray_ulysses.engine.zero_state import export_state
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.mesh import SequenceMesh
from ray_ulysses.planner.settings import run_layout
from ray_ulysses.trainer.data import open_data
from ray_ulysses.trainer.record import Recorder
from ray_ulysses.trainer.resume import Progress, resume
from ray_ulysses.trainer.self_test import check_start
from ray_ulysses.trainer.settings import last_step_of, model_shape, versions, zero_settings
from ray_ulysses.trainer.step import evaluate, train_step
from ray_ulysses.trainer.stop import stop_requested

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ray_ulysses.checkpoint import CheckpointRef
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan import Plan
    from ray_ulysses.data.reader import RowReader, RowSlice
    from ray_ulysses.data.row_source import RowSource
    from ray_ulysses.parallel.layout import ParallelLayout
    from ray_ulysses.trainer.worker import Worker

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """How an attempt ended, when it ended well.

    Attributes:
        status: ``finished`` when the last step is done, ``stopped`` on request.
        step: Completed steps.
    """

    status: Literal["finished", "stopped"]
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attempt:
    """What an attempt is made of once it has started."""

    config: Config
    worker: Worker
    layout: ParallelLayout
    mesh: SequenceMesh
    plan: Plan
    reader: RowReader
    accumulation: int
    engine: Any
    recorder: Recorder


def run_attempt(config: Config, worker: Worker) -> AttemptEnd:
    """Train from the newest committed checkpoint to the last step or a request to stop; every rank must call.

    The default process group exists; nothing else does. What is committed on disk when this returns or raises is all
    that the next attempt needs.

    Args:
        config: The run's configuration, paths absolute.
        worker: This worker.

    Raises:
        RunError: The run can't go on; the text says why.
    """
    # The mesh: who shares rows with whom. The recorder: one attempt number for all, on storage that all share.
    prepare_process(worker.local_rank, worker.device.type)
    shape = model_shape(config)
    layout = run_layout(config, shape, worker.world_size)
    mesh = SequenceMesh.from_layout(layout, timeout=timedelta(seconds=config.elastic.collective_timeout_s))
    recorder = Recorder.open(config, worker, layout)
    try:
        # The data: the plan that the driver has stored. The model: under ZeRO-3, with our attention.
        plan, reader = open_data(config)
        settings = zero_settings(config, num_micro_steps(plan.most_rows_per_step(1), layout.dp_size))
        if config.run.self_test:
            check_start(config, worker, mesh, shape, settings)
        model = build_model(config, partition=zero_config(settings))
        apply_ulysses(model, mesh, attention=config.model.attention, chunks=config.memory.attention_chunks)
        engine = build_engine(model, settings)
        engine.train()
        attempt = _Attempt(
            config=config,
            worker=worker,
            layout=layout,
            mesh=mesh,
            plan=plan,
            reader=reader,
            accumulation=settings.accumulation,
            engine=engine,
            recorder=recorder,
        )
        # The state: from the newest committed checkpoint, at whatever world size it was written.
        progress = resume(engine, config, plan, recorder)
        recorder.attempt_started(progress, last_step_of(config, plan), plan)
        source = worker.make_source(plan, reader, layout, worker.rank)
        try:
            end = _train(attempt, source, progress)
        finally:
            source.close()
        recorder.ended(end.status, end.step)
    except BaseException as error:
        recorder.failed(error)
        raise
    return end


def _train(attempt: _Attempt, source: RowSource, progress: Progress) -> AttemptEnd:
    """Step, evaluate and save until the last step or a request to stop."""
    config = attempt.config
    last_step = last_step_of(config, attempt.plan)
    saved_step = progress.step
    metrics: dict[str, float] = {}
    stop = False
    while progress.step < last_step and not stop:
        progress, metrics, stop = _take_step(attempt, source, progress)
        step = progress.step
        is_last = step == last_step
        if _due(config.run.eval_every_steps, step, is_last):
            slices = _evaluation_slices(attempt)
            attempt.recorder.evaluated(step, *evaluate(attempt.engine, slices, attempt.mesh, attempt.worker.device))
        if _due(config.checkpoint.every_steps, step):
            _save(attempt, progress, metrics)
            saved_step = step
    if progress.step > saved_step and config.checkpoint.save_at_end:
        _save(attempt, progress, metrics)
    return AttemptEnd(status="finished" if progress.step >= last_step else "stopped", step=progress.step)


def _take_step(attempt: _Attempt, source: RowSource, progress: Progress) -> tuple[Progress, dict[str, float], bool]:
    """Train the next step's rows; return how far the run has come, the step's metrics, and whether to stop."""
    config, plan, worker, engine = attempt.config, attempt.plan, attempt.worker, attempt.engine
    step = progress.step + 1
    rows = plan.step_rows(step)
    weights = plan.weights(rows)
    started = worker.clock.monotonic()
    rate = learning_rate(
        step,
        base_rate=config.optimizer.lr,
        warmup_steps=config.schedule.warmup_steps,
        horizon_steps=config.schedule.horizon_steps or plan.planned_steps(step),
        min_ratio=config.schedule.min_lr_ratio,
    )
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    result = train_step(
        engine,
        _padded(attempt, source.step(step)),
        rows=rows,
        tokens=plan.step_tokens(step),
        mesh=attempt.mesh,
        device=worker.device,
        accumulation=attempt.accumulation,
        seed=config.run.seed,
        stop=worker.rank == 0 and stop_requested(config.run_dir, worker.session),
    )
    metrics = attempt.recorder.step_done(
        step,
        result,
        rows=rows,
        seconds=worker.clock.monotonic() - started,
        document_tokens=int(weights.document_tokens.sum(dtype=np.int64)),
        cost=int(weights.sum_squares.sum()),
        learning_rate=rate,
        grad_norm=float(engine.get_global_grad_norm()),
    )
    worker.on_event("step", step)
    done = replace(
        progress,
        step=step,
        digest=add_digests(progress.digest, result.digest),
        tokens=progress.tokens + result.tokens,
    )
    return done, metrics, result.stop


def _save(attempt: _Attempt, progress: Progress, metrics: dict[str, float]) -> None:
    """Commit the state, then let go of what it replaces."""
    worker, recorder, step = attempt.worker, attempt.recorder, progress.step
    cursor = attempt.plan.cursor(step)
    recorder.sync()
    worker.on_event("save", step)
    ref = save_checkpoint(
        recorder.store,
        step=step,
        attempt=recorder.attempt,
        rank=worker.rank,
        world_size=worker.world_size,
        state=export_state(attempt.engine),
        meta=CheckpointMeta(
            sp_size=attempt.layout.sp_size,
            cursor=cursor.to_json(),
            digest=f"{progress.digest:016x}",
            tokens=progress.tokens,
            config_fingerprint=resume_fingerprint(attempt.config),
            versions=versions(),
        ),
        exchange=recorder.exchange,
    )
    recorder.checkpoint_committed(step, ref.folder, cursor, metrics, f"{progress.digest:016x}")
    if worker.rank == 0:
        _let_go(attempt, ref)
    worker.on_event("saved", step)


def _let_go(attempt: _Attempt, newest: CheckpointRef) -> None:
    """Delete what a commit has replaced; what can't be deleted now is tried again after the next commit."""
    try:
        apply_retention(attempt.recorder.store, newest=newest, keep_last=attempt.config.checkpoint.keep_last)
    except OSError as error:
        _log.warning("old checkpoints could not be deleted (%s); trying again after the next commit", error)


def _padded(attempt: _Attempt, slices: Iterator[RowSlice]) -> Iterator[RowSlice]:
    """Fill a short last step up with rows of weight zero: the engine counts micro-steps."""
    layout = attempt.layout
    filler = attempt.reader.filler(layout.sp_rank(attempt.worker.rank), layout.sp_size, layout.ring_size)
    num_rows = 0
    # To its very end: a source moves on to the next step only when it has been asked for more than its last slice.
    for row in slices:
        num_rows += 1
        yield row
    for _ in range(attempt.accumulation - num_rows):
        yield filler


def _evaluation_slices(attempt: _Attempt) -> Iterator[RowSlice]:
    layout, rank = attempt.layout, attempt.worker.rank
    sp_rank, dp_rank = layout.sp_rank(rank), layout.dp_rank(rank)
    for micro_step in attempt.plan.evaluation_schedule(layout.dp_size):
        row = micro_step[dp_rank]
        if row is None:
            yield attempt.reader.filler(sp_rank, layout.sp_size, layout.ring_size)
        else:
            yield attempt.reader.read("evaluation", row, sp_rank, layout.sp_size, layout.ring_size)


def _due(every: int | None, step: int, is_last: bool = False) -> bool:
    """Tell whether something that is done every so many steps is due, at the last step as well."""
    return every is not None and (step % every == 0 or is_last)
