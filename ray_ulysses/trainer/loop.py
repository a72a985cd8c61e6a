"""Runs one attempt of a run, from the first collective to the last checkpoint. This file reads from top to bottom."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import numpy as np

from ray_ulysses.config import Config
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.data.plan.steps import num_micro_batches
from ray_ulysses.data.read.digest import add_digests
from ray_ulysses.data.read.reader import RowReader, RowSlice
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.elastic.hang import Phase
from ray_ulysses.engine.model import build_model
from ray_ulysses.engine.optimizer import learning_rate
from ray_ulysses.engine.plugins import Plugins, load_plugins
from ray_ulysses.engine.prepare import prepare_model
from ray_ulysses.engine.router_health import RouterWatch
from ray_ulysses.engine.zero import build_engine, partition_config, prepare_process
from ray_ulysses.logging import get_logger
from ray_ulysses.parallel.mesh import SequenceMesh
from ray_ulysses.planner.stages import Stage
from ray_ulysses.run.early_stopping import EarlyStop, EarlyStopping
from ray_ulysses.run.masks import read_masking
from ray_ulysses.run.settings import last_step_of, resolve_run, warn_of_unused_shards, zero_settings
from ray_ulysses.run.start_point import RunPosition, known_step
from ray_ulysses.run_names import PLAN_FOLDER
from ray_ulysses.trainer.compute_watch import ComputeWatch
from ray_ulysses.trainer.context import AttemptContext, open_attempt
from ray_ulysses.trainer.diagnostics import MemoryRecorder, memory_explained
from ray_ulysses.trainer.peer_memory_keeper import PeerMemoryKeeper
from ray_ulysses.trainer.record import Recorder
from ray_ulysses.trainer.references import open_references
from ray_ulysses.trainer.resume import AnotherStageError, StartingState, find_state, read_early_stopping, resume
from ray_ulysses.trainer.row_loss import RowObjective, row_objective
from ray_ulysses.trainer.sampling import Sampler, open_sampler
from ray_ulysses.trainer.saving import CheckpointKeeper, StepOutcome
from ray_ulysses.trainer.self_test import check_start
from ray_ulysses.trainer.source_loss import SourceLosses
from ray_ulysses.trainer.step import Flags, StepGuard, StepMeter, evaluate, train_step, with_requests
from ray_ulysses.trainer.worker import Worker

Status = Literal["finished", "stopped", "resized", "stage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """Outcome of an attempt that did not fail."""

    status: Status
    """Reason for the end: ``finished`` after the last step, ``stopped`` on request, ``resized`` if the run continues
    with a different number of workers, or ``stage`` if the run continues in another stage."""
    step: int
    """Number of completed steps."""
    early: EarlyStop | None = None
    """Why the run ends before its last step, if it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attempt:
    context: AttemptContext
    mesh: SequenceMesh
    stage: Stage
    reader: RowReader
    evaluation_reader: RowReader
    accumulation: int
    engine: Any
    meter: StepMeter
    recorder: Recorder
    keeper: CheckpointKeeper
    peer_memory: PeerMemoryKeeper
    guard: StepGuard
    watch: ComputeWatch
    memory: MemoryRecorder
    sampler: Sampler | None
    plugins: Plugins
    routers: RouterWatch
    sources: SourceLosses | None
    stopping: EarlyStopping
    objective: RowObjective | None
    evaluation_objective: RowObjective | None

    @property
    def plan(self) -> Plan:
        return self.stage.plan

    def before_update(self) -> None:
        """Make the next weight update wait for state copies that are in progress."""
        self.keeper.staging.before_update()
        self.peer_memory.before_update()


def run_attempt(config: Config, worker: Worker) -> AttemptEnd:
    """Train from the newest saved state until the last step or a request to stop.

    All ranks must call this function. Beforehand, only the default process group must exist. When the function returns
    or raises, everything that the next attempt needs is committed to storage. All paths in ``config`` must be absolute.

    Raises:
        RunError: The run can't continue; the message contains the reason.
    """
    # The attempt: all ranks agree on one number, on storage that they share.
    prepare_process(worker.local_rank, worker.device.type)
    plugins = load_plugins(config)
    context, journal = open_attempt(resolve_run(config, worker.world_size), worker)
    worker.on_hang(context.diagnostics.leave_flight_record)
    recorder = Recorder(context, journal)
    recorder.phase("opening the data")
    # Rank 0's warnings reach the user through the journal, because worker logs stay on their nodes.
    with warnings_forwarded(recorder.warned if worker.rank == 0 else None):
        try:
            # The data: the plan stored by the driver. The state: the newest state in peer memory or in a committed
            # checkpoint, saved at any world size. The state's step determines the run's current stage.
            start = find_state(load_plan(config.run_dir / PLAN_FOLDER), context, recorder)
            memory = MemoryRecorder(worker.device)
            with memory_explained(context.run, start.stage, context.diagnostics, memory, None):
                return _run(context, recorder, start, memory, plugins)
        except AnotherStageError as left:
            # Not a failure: the same workers continue in an earlier stage, with that stage's model.
            recorder.ended("stage", left.step)
            return AttemptEnd(status="stage", step=left.step)
        except BaseException as error:
            recorder.failed(error)
            raise


def _run(
    whole: AttemptContext, recorder: Recorder, start: StartingState, memory: MemoryRecorder, plugins: Plugins
) -> AttemptEnd:
    worker, stage, config = whole.worker, start.stage, start.stage.config
    run = whole.run if config is whole.run.config else resolve_run(config, worker.world_size)
    context = replace(whole, run=run, stage=stage.name, measured=stage.plan.newest.measured)
    keeper = CheckpointKeeper(context, recorder, ends_stage=not stage.ends_the_run)
    peer_memory = PeerMemoryKeeper(context, recorder)
    try:
        # The mesh: which ranks share rows.
        mesh = SequenceMesh.from_layout(run.layout, timeout=timedelta(seconds=config.elastic.collective_timeout_s))
        most_rows = stage.plan.most_rows_per_step(stage.first_step + 1)
        settings = zero_settings(config, num_micro_batches(most_rows, run.layout.dp_size), context.nodes)
        if worker.rank == 0:
            warn_of_unused_shards(config, context.nodes)
        if config.run.self_test and (not worker.is_tested or start.step == stage.first_step > 0):
            recorder.phase("self-test")
            check_start(run, worker, mesh, settings, context.nodes)
        # The model: under ZeRO, with our attention. Initial weights are drawn or loaded only if there is no state.
        recorder.phase("building the model")
        model = build_model(config, partition_config(settings), start.description)
        prepare_model(model, config, run.shape, mesh, worker.device)
        routers = RouterWatch(model, config.optimizer.router_bias_rate)
        engine = build_engine(model, settings)
        engine.train()
        reader, evaluation_reader = open_rows(config, stage.plan)
        position = resume(engine, start, whole, recorder)
        opened = open_references(config, worker.device, evaluation_reader.sources)
        references = None if opened is None else opened.of
        attempt = _Attempt(
            context=context,
            mesh=mesh,
            stage=stage,
            reader=reader,
            evaluation_reader=evaluation_reader,
            accumulation=settings.accumulation,
            engine=engine,
            meter=StepMeter(run.shape, worker.device, run.layout.world_size),
            recorder=recorder,
            keeper=keeper,
            peer_memory=peer_memory,
            guard=StepGuard(config.elastic, recorder.bad_step),
            watch=ComputeWatch(context, recorder),
            memory=memory,
            sampler=open_sampler(context),
            plugins=plugins,
            routers=routers,
            sources=SourceLosses.of_mixture(stage.plan, worker.device, config.objective.counts),
            stopping=read_early_stopping(context, stage.plan, position.step),
            objective=row_objective(config, evaluation_reader, stage.plan.pieces, references),
            evaluation_objective=row_objective(config, evaluation_reader, stage.plan.evaluation.pieces, references),
        )
        if position.unsaved is None:
            keeper.resumed(position.step)
        peer_memory.resumed(position.step, engine)
        recorder.attempt_started(position, last_step_of(config, stage.plan), stage, run.layout)
        source = worker.make_source(stage.plan, reader, run.layout, worker.rank)
        try:
            end = _train(attempt, source, position)
        finally:
            source.close()
        keeper.finish()
        _report_checkpoints(attempt)
        plugins.call("on_end", worker.rank, end.step, end.status)
        peer_memory.close()
        recorder.ended(end.status, end.step, end.early)
    except BaseException as error:
        peer_memory.close(failed=True)
        keeper.abandon(error, is_in_memory=peer_memory.has_saved)
        raise
    return end


def _train(attempt: _Attempt, source: DirectSource, position: RunPosition) -> AttemptEnd:
    config, plan, worker = attempt.context.run.config, attempt.plan, attempt.context.worker
    planned = last_step = last_step_of(config, plan)
    diagnostics = attempt.context.diagnostics
    last_status: Status = "finished" if attempt.stage.ends_the_run else "stage"
    status = last_status
    if config.run.eval_every_steps is not None and position.step == 0:
        _evaluate(attempt, StepOutcome(position=position, metrics={}, flags=Flags()))
    early = attempt.stopping.stop()
    if position.unsaved is not None and (early is not None or position.step >= last_step):
        # The previous attempt failed while it saved its last state, or after it had saved that state.
        stored = attempt.context.messenger.broadcast(
            known_step(attempt.context.run.store) if worker.rank == 0 else None
        )
        if stored != position.step:
            _save_last(attempt, StepOutcome(position=position, metrics=position.unsaved, flags=Flags()))
    while early is None and position.step < last_step and status == last_status:
        step = position.step + 1
        with (
            memory_explained(attempt.context.run, attempt.stage, diagnostics, attempt.memory, step),
            diagnostics.profiled(config.run.profile, step, partial(worker.beat, "save", step)),
        ):
            outcome = _take_step(attempt, source, position)
        attempt.memory.step_done()
        position, flags = outcome.position, outcome.flags
        if flags.stop and step < last_step:
            status = "resized" if flags.resize else "stopped"
        evaluates = _due(config.run.eval_every_steps, step, is_last=step == last_step)
        # A node that is about to be preempted may not survive until the end of an evaluation.
        saves_first = flags.notice_due or flags.resize or (flags.notice and flags.stop)
        if evaluates and not saves_first:
            outcome = _evaluate(attempt, outcome)
            early = attempt.stopping.stop()
            last_step = last_step if early is None else step
        if attempt.sampler is not None and not saves_first:
            _sample(attempt, attempt.sampler, step, is_last=step == last_step)
        attempt.watch.after_step(flags)
        worker.beat("save", step)
        with attempt.recorder.time.saving():
            attempt.peer_memory.after_step(attempt.engine, outcome, plan.cursor(step))
            attempt.keeper.after_step(attempt.engine, outcome, plan.cursor(step), last_step)
        if evaluates and saves_first:
            _evaluate(attempt, outcome)
            early = attempt.stopping.stop()
            if early is not None:
                _save_last(attempt, replace(outcome, flags=replace(flags, failed=False)))
        attempt.plugins.call("on_step", worker.rank, step, outcome.metrics)
        _report_checkpoints(attempt)
    if early is None or position.step >= planned:
        return AttemptEnd(status=status, step=position.step)
    return AttemptEnd(status="finished", step=position.step, early=early)


def _save_last(attempt: _Attempt, outcome: StepOutcome) -> None:
    """Save the state with which the run ends, unless this attempt has saved it."""
    step = outcome.position.step
    attempt.context.worker.beat("save", step)
    with attempt.recorder.time.saving():
        attempt.keeper.after_step(attempt.engine, outcome, attempt.plan.cursor(step), step)


def _take_step(attempt: _Attempt, source: DirectSource, position: RunPosition) -> StepOutcome:
    context, plan, engine = attempt.context, attempt.plan, attempt.engine
    config, worker = context.run.config, context.worker
    step = position.step + 1
    rows = plan.step_rows(step)
    stats = plan.stats(rows)
    started = worker.clock.monotonic()
    rate = rate_of_step(attempt.stage, step)
    for group in engine.optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]
    result = train_step(
        engine,
        _beating(attempt, "step", step, _padded(attempt, source.step(step))),
        rows=rows,
        tokens=plan.step_tokens(step),
        mesh=attempt.mesh,
        device=worker.device,
        accumulation=attempt.accumulation,
        seed=config.run.seed,
        loss_tile=config.memory.loss_tile,
        z_loss=config.optimizer.z_loss,
        token_loss=attempt.plugins.token_loss,
        objective=attempt.objective,
        num_counted=int(stats.num_pieces.sum()),
        sources=attempt.sources,
        routers=attempt.routers,
        flags=lambda: _flags(attempt),
        num_direct=lambda: source.num_direct or 0,
        before_update=attempt.before_update,
    )
    # Judge the step before recording or saving any of its results.
    attempt.guard.judge(step, rows, plan.segments[plan.segment_of_step(step)].plan_id, result)
    metrics = attempt.meter.numbers(
        result,
        seconds=worker.clock.monotonic() - started,
        document_tokens=int(stats.document_tokens.sum(dtype=np.int64)),
        cost=attempt.reader.sum_squares(rows),
        learning_rate=rate,
    )
    attempt.recorder.step_done(step, result, rows, metrics)
    worker.on_event("step", step)
    done = replace(
        position,
        step=step,
        digest=add_digests(position.digest, result.digest),
        tokens=position.tokens + result.tokens,
    )
    return StepOutcome(position=done, metrics=metrics, flags=result.flags)


def rate_of_step(stage: Stage, step: int) -> float:
    """Return a step's learning rate in the given stage. Steps are numbered from the start of the run."""
    schedule, start = stage.config.schedule, stage.schedule_start
    horizon = schedule.horizon_steps or stage.schedule_end(step) - start
    return learning_rate(
        step - start,
        base_rate=stage.config.optimizer.lr,
        warmup_steps=schedule.warmup(horizon),
        horizon_steps=horizon,
        min_ratio=schedule.min_lr_ratio,
        kind=schedule.kind,
        decay_steps=schedule.decay_steps,
    )


def _flags(attempt: _Attempt) -> Flags:
    own, requests = attempt.peer_memory.flags(attempt.keeper.flags()), attempt.keeper.requests
    if requests is None:
        return own
    own = replace(own, gone=attempt.recorder.is_gone(), compute_due=attempt.watch.is_due())
    return with_requests(own, requests)


def _evaluate(attempt: _Attempt, outcome: StepOutcome) -> StepOutcome:
    context = attempt.context
    clock, device = context.worker.clock, context.worker.device
    started, sets = clock.monotonic(), attempt.plan.evaluation_sets
    slices = _beating(attempt, "evaluation", outcome.position.step, _evaluation_slices(attempt))
    with memory_explained(context.run, attempt.stage, context.diagnostics, attempt.memory, outcome.position.step):
        tile, ends = context.run.config.memory.loss_tile, [one.rows.stop for one in sets]
        sums = evaluate(
            attempt.engine, slices, attempt.mesh, device, tile, ends=ends, objective=attempt.evaluation_objective
        )
    loss = attempt.recorder.evaluated(outcome.position.step, sets, sums, clock.monotonic() - started)
    by_corpus = {one.name: found.loss for one, found in zip(sets, sums, strict=True)}
    attempt.stopping.add(outcome.position.step, loss, by_corpus)
    attempt.plugins.call("on_evaluation", context.rank, outcome.position.step, loss)
    return replace(outcome, metrics={**outcome.metrics, "eval_loss": loss})


def _sample(attempt: _Attempt, sampler: Sampler, step: int, *, is_last: bool) -> None:
    if not _due(attempt.context.run.config.run.sample_every_steps, step, is_last=is_last):
        return
    worker, tile = attempt.context.worker, attempt.context.run.config.memory.loss_tile
    started = worker.clock.monotonic()
    with memory_explained(attempt.context.run, attempt.stage, attempt.context.diagnostics, attempt.memory, step):
        beat = partial(worker.beat, "evaluation", step)
        found = sampler.run(attempt.engine, attempt.mesh, worker.device, tile, beat)
    attempt.recorder.sampled(step, sampler, found, worker.clock.monotonic() - started)


def _report_checkpoints(attempt: _Attempt) -> None:
    committed = attempt.keeper.committed
    while committed:
        attempt.plugins.call("on_checkpoint", attempt.context.rank, *committed.popleft())


def _beating(attempt: _Attempt, phase: Phase, step: int, slices: Iterator[RowSlice]) -> Iterator[RowSlice]:
    """Send a heartbeat before each micro-batch, and report when the rank is waiting for a row."""
    worker = attempt.context.worker
    while True:
        worker.wait_for_row(True)
        row = next(slices, None)
        worker.wait_for_row(False)
        if row is None:
            return
        worker.beat(phase, step)
        yield row


def _padded(attempt: _Attempt, slices: Iterator[RowSlice]) -> Iterator[RowSlice]:
    """Pad a short last step with zero-weight fillers, because each step must have the same number of slices."""
    layout = attempt.context.run.layout
    filler = attempt.reader.filler(layout.sp_rank(attempt.context.rank), layout.sp_size, layout.ring_size)
    num_rows = 0
    # Exhaust the iterator: a source moves to the next step only on a request beyond the last slice.
    for row in slices:
        num_rows += 1
        yield row
    for _ in range(attempt.accumulation - num_rows):
        yield filler


def _evaluation_slices(attempt: _Attempt) -> Iterator[RowSlice]:
    layout, rank = attempt.context.run.layout, attempt.context.rank
    sp_rank, dp_rank = layout.sp_rank(rank), layout.dp_rank(rank)
    for micro_batch in attempt.plan.evaluation_schedule(layout.dp_size):
        row = micro_batch[dp_rank]
        if row is None:
            yield attempt.reader.filler(sp_rank, layout.sp_size, layout.ring_size)
        else:
            yield attempt.evaluation_reader.read("evaluation", row, sp_rank, layout.sp_size, layout.ring_size)


def _due(every: int | None, step: int, is_last: bool = False) -> bool:
    return every is not None and (step % every == 0 or is_last)


def open_rows(config: Config, plan: Plan) -> tuple[RowReader, RowReader]:
    """Return a reader for the training rows of a stage's plan, and one for the evaluation rows.

    Each corpus is read from its configured path, or else from the path in the plan.

    Raises:
        UserError: A corpus can't be read, or differs from the planned corpus.
    """
    sources, validation = plan.newest.sources, plan.newest.validation
    known = {source.fingerprint: source for source in (*sources, *validation)}
    for path in (*(path for path, _ in config.data_sources), *config.data.validation):
        fingerprint = Corpus.open(path).fingerprint
        if fingerprint not in known:
            plan.check_corpus(fingerprint)
        known[fingerprint] = replace(known[fingerprint], path=path)
    # Evaluations number the documents of validation corpora after those of the training corpora.
    trained, all_known = CorpusSet(tuple(known.values())[: len(sources)]), CorpusSet(tuple(known.values()))
    masking = read_masking(config.run_dir) if config.objective.task == "masked_lm" else None
    return RowReader(trained, plan, masking), RowReader(all_known, plan, masking)


_MOST_WARNINGS = 1000


class _Forwarder(logging.Handler):
    """Forwards each distinct warning once, up to a maximum number of warnings."""

    def __init__(self, forward: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._forward = forward
        self._forwarded: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text in self._forwarded or len(self._forwarded) >= _MOST_WARNINGS:
            return
        self._forwarded.add(text)
        try:
            self._forward(text)
        except Exception:
            self.handleError(record)


@contextmanager
def warnings_forwarded(forward: Callable[[str], None] | None) -> Iterator[None]:
    """Forward warnings that this package logs within a block, from any thread. If ``forward`` is None, do nothing."""
    if forward is None:
        yield
        return
    logger, handler = get_logger("ray_ulysses"), _Forwarder(forward)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
