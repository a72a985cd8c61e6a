"""One attempt of a run, from the first collective to the last checkpoint: read it from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ray_ulysses.attention.ulysses import apply_ulysses
from ray_ulysses.data.plan.steps import num_micro_batches
from ray_ulysses.data.read.digest import add_digests
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.optimizer import learning_rate
from ray_ulysses.engine.zero import build_engine, partition_config, prepare_process
from ray_ulysses.parallel.mesh import SequenceMesh
from ray_ulysses.planner.settings import run_layout
from ray_ulysses.run.settings import last_step_of, model_shape, zero_settings
from ray_ulysses.trainer.context import AttemptContext, open_attempt
from ray_ulysses.trainer.data import open_data
from ray_ulysses.trainer.record import Recorder
from ray_ulysses.trainer.resume import resume
from ray_ulysses.trainer.saving import CheckpointKeeper, StepOutcome
from ray_ulysses.trainer.self_test import check_start
from ray_ulysses.trainer.step import evaluate, train_step
from ray_ulysses.trainer.warnings import warnings_told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.data.read.reader import RowReader, RowSlice
    from ray_ulysses.data.read.row_source import RowSource
    from ray_ulysses.model_shape import ModelShape
    from ray_ulysses.trainer.progress import Progress
    from ray_ulysses.trainer.worker import Worker


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

    context: AttemptContext
    mesh: SequenceMesh
    plan: Plan
    reader: RowReader
    accumulation: int
    engine: Any
    recorder: Recorder
    keeper: CheckpointKeeper


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
    # The mesh: who shares rows with whom. The attempt: one number for all, on storage that all share.
    prepare_process(worker.local_rank, worker.device.type)
    shape = model_shape(config)
    layout = run_layout(config, shape, worker.world_size)
    mesh = SequenceMesh.from_layout(layout, timeout=timedelta(seconds=config.elastic.collective_timeout_s))
    context, journal = open_attempt(config, worker, layout)
    recorder = Recorder.open(context, journal)
    # What it warns of reaches the person: what a worker logs stays on its node.
    with warnings_told(recorder.warned if worker.rank == 0 else None):
        return _run(context, mesh, shape, recorder)


def _run(context: AttemptContext, mesh: SequenceMesh, shape: ModelShape, recorder: Recorder) -> AttemptEnd:
    """Build everything, resume, and train to the end."""
    config, worker, layout = context.config, context.worker, context.layout
    keeper = CheckpointKeeper(context, recorder)
    try:
        # The data: the plan that the driver has stored. The model: under ZeRO, with our attention.
        plan, reader = open_data(config)
        settings = zero_settings(config, num_micro_batches(plan.most_rows_per_step(1), layout.dp_size))
        if config.run.self_test:
            recorder.phase("self-test")
            check_start(config, worker, mesh, shape, settings)
        recorder.phase("building the model")
        model = build_model(config, partition=partition_config(settings))
        apply_ulysses(model, mesh, attention=config.model.attention, chunks=config.memory.attention_chunks)
        engine = build_engine(model, settings)
        engine.train()
        attempt = _Attempt(
            context=context,
            mesh=mesh,
            plan=plan,
            reader=reader,
            accumulation=settings.accumulation,
            engine=engine,
            recorder=recorder,
            keeper=keeper,
        )
        # The state: from the newest committed checkpoint, at whatever world size it was written.
        progress = resume(engine, plan, context, recorder)
        keeper.resumed(progress.step)
        recorder.attempt_started(progress, last_step_of(config, plan), plan)
        source = worker.make_source(plan, reader, layout, worker.rank)
        try:
            end = _train(attempt, source, progress)
        finally:
            source.close()
        keeper.finish()
        recorder.ended(end.status, end.step)
    except BaseException as error:
        keeper.abandon()
        recorder.failed(error)
        raise
    return end


def _train(attempt: _Attempt, source: RowSource, progress: Progress) -> AttemptEnd:
    """Step, evaluate and save until the last step or a request to stop."""
    config, plan = attempt.context.config, attempt.plan
    last_step = last_step_of(config, plan)
    stop = False
    while progress.step < last_step and not stop:
        outcome = _take_step(attempt, source, progress)
        progress, stop = outcome.progress, outcome.flags.stop
        step = progress.step
        if _due(config.run.eval_every_steps, step, is_last=step == last_step):
            outcome = _evaluate(attempt, outcome)
        with attempt.recorder.time.saving():
            attempt.keeper.after_step(attempt.engine, outcome, plan.cursor(step), last_step)
    return AttemptEnd(status="finished" if progress.step >= last_step else "stopped", step=progress.step)


def _take_step(attempt: _Attempt, source: RowSource, progress: Progress) -> StepOutcome:
    """Train the next step's rows."""
    config, plan, engine = attempt.context.config, attempt.plan, attempt.engine
    worker = attempt.context.worker
    step = progress.step + 1
    rows = plan.step_rows(step)
    stats = plan.stats(rows)
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
        flags=attempt.keeper.flags,
        before_update=attempt.keeper.staging.before_update,
    )
    metrics = attempt.recorder.step_done(
        step,
        result,
        rows=rows,
        seconds=worker.clock.monotonic() - started,
        document_tokens=int(stats.document_tokens.sum(dtype=np.int64)),
        cost=int(stats.sum_squares.sum()),
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
    return StepOutcome(progress=done, metrics=metrics, flags=result.flags)


def _evaluate(attempt: _Attempt, outcome: StepOutcome) -> StepOutcome:
    """Evaluate; the loss joins the step's metrics, since checkpoints are chosen by it."""
    clock = attempt.context.worker.clock
    started = clock.monotonic()
    loss, tokens = evaluate(attempt.engine, _evaluation_slices(attempt), attempt.mesh, attempt.context.worker.device)
    attempt.recorder.evaluated(outcome.progress.step, loss, tokens, clock.monotonic() - started)
    return replace(outcome, metrics={**outcome.metrics, "eval_loss": loss})


def _padded(attempt: _Attempt, slices: Iterator[RowSlice]) -> Iterator[RowSlice]:
    """Fill a short last step up with rows of weight zero: the engine counts micro-batches."""
    layout = attempt.context.layout
    filler = attempt.reader.filler(layout.sp_rank(attempt.context.worker.rank), layout.sp_size, layout.ring_size)
    num_rows = 0
    # To its very end: a source moves on to the next step only when it has been asked for more than its last slice.
    for row in slices:
        num_rows += 1
        yield row
    for _ in range(attempt.accumulation - num_rows):
        yield filler


def _evaluation_slices(attempt: _Attempt) -> Iterator[RowSlice]:
    layout, rank = attempt.context.layout, attempt.context.worker.rank
    sp_rank, dp_rank = layout.sp_rank(rank), layout.dp_rank(rank)
    for micro_batch in attempt.plan.evaluation_schedule(layout.dp_size):
        row = micro_batch[dp_rank]
        if row is None:
            yield attempt.reader.filler(sp_rank, layout.sp_size, layout.ring_size)
        else:
            yield attempt.reader.read("evaluation", row, sp_rank, layout.sp_size, layout.ring_size)


def _due(every: int | None, step: int, is_last: bool = False) -> bool:
    """Tell whether something that is done every so many steps is due, at the last step as well."""
    return every is not None and (step % every == 0 or is_last)
