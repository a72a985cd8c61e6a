"""The report of ``ray-ulysses plan``: layout, corpus, data plan and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from ray_ulysses.config import Config
from ray_ulysses.config.learning import StageSection
from ray_ulysses.config.stages import in_stage
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet, PlanInput
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.segment import PlanSettings, Segment
from ray_ulysses.data.plan.steps import step_times
from ray_ulysses.errors import ConfigError, Problem
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.parallel.layout import HeadPlan, assign_heads
from ray_ulysses.planner.flops import step_flops
from ray_ulysses.planner.memory import MemoryEstimate, configured_memory
from ray_ulysses.planner.notes import plan_notes
from ray_ulysses.planner.problems import (
    corpus_problems,
    heads_problems,
    memory_problems,
    plan_problems,
    vocabulary_problems,
)
from ray_ulysses.planner.search import Chosen
from ray_ulysses.planner.settings import allowed_sp, run_layout
from ray_ulysses.planner.stages import Stage, stage_at, stages_of
from ray_ulysses.planner.state_memory import PeerMemoryFacts, peer_memory_facts
from ray_ulysses.planner.throughput import StepTime, Work, configured_time

_MOST_DP_SIZES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutFacts:
    """Parallel layout of the workers."""

    world_size: int
    """Number of workers; in an elastic run, the maximum."""
    least_world_size: int
    """Smallest number of workers, for which memory per rank is largest."""
    sp_size: int
    """Number of ranks that share a row."""
    ulysses_size: int
    """Number of ranks that exchange heads."""
    ring_size: int
    """Number of ranks over which keys and values circulate."""
    ring_is_chosen: bool
    heads: HeadPlan
    dp_size: int
    """Number of rows that are processed concurrently."""
    valid_sp_sizes: tuple[int, ...]
    """Values of ``sp_size`` that a resume may use, because they divide the length of all rows."""
    level_world_sizes: tuple[int, ...]
    """Numbers of workers, with this ``sp_size``, for which no rank idles in a full step."""
    largest_world_size: int
    """Largest number of workers for which every rank gets rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusFacts:
    """Sizes of the prepared corpora or, if no corpus is prepared, of synthetic documents."""

    path: str
    is_made_up: bool
    """Whether no corpus is prepared, so that all sizes describe synthetic documents."""
    num_documents: int
    num_tokens: int
    """Total number of tokens in all documents."""
    longest_document: int
    """Length of the longest document in tokens."""
    max_token_id: int
    """Largest token id, or 0 if no corpus is prepared."""
    unigram_nats: float | None
    """Unigram entropy in nats per byte, or None unless there is a single corpus of bytes."""
    loss_weights: tuple[float, float] | None = None
    """Smallest and largest loss weight of a token, or None if all weights are 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFacts:
    """A corpus of a mixture and its part in the data plan."""

    path: str
    weight: float | None
    """Configured weight, or None if every document is used."""
    tokens: int | None
    """Number of planned tokens in all epochs, or None if it is unknown, as in a stored plan with weights."""
    share: float | None
    """Fraction of all planned tokens. If ``tokens`` is unknown, the fraction that the weight asks for."""
    epochs: float | None
    """Ratio of ``tokens`` to the corpus's tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationFacts:
    """A set of evaluation rows with a loss of its own."""

    name: str
    path: str | None
    """Path of the corpus, or None for held-out documents."""
    rows: int
    tokens: int
    """Number of supervised tokens in the rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """Sizes of the data plan."""

    plan_id: str
    """Identifier of the plan, which every checkpoint stores."""
    row_tokens: int
    """Largest number of tokens per row: the context length, rounded down to a multiple of ``pad_multiple``."""
    pad_multiple: int
    """Number that divides every row's length in tokens."""
    rows_per_step: int
    num_rows: int
    num_steps: int
    """Number of steps needed to use every row of all epochs once."""
    stop_step: int
    """Step after which the run stops."""
    padding_tokens: int
    """Number of padding tokens that extend rows to multiples of ``pad_multiple``."""
    fill: float
    """Ratio of document tokens in the training rows to the rows' capacity."""
    tokens: int
    supervised: int
    """Number of document tokens with a label in the training rows."""
    packing: str
    engine: Literal["ray", "local"]
    """Engine that delivers rows to the workers (``data.engine``)."""
    split_documents: int
    """Number of documents that are split because they are longer than a row, counted once per epoch."""
    truncated_documents: int
    """Number of documents that are truncated to a row."""
    dropped_documents: int
    """Number of documents that are dropped because they are too long."""
    lost_tokens: int
    """Number of tokens that are lost by truncating and dropping documents."""
    skipped_documents: int
    """Number of documents that are skipped because no token has a target."""
    held_out_documents: int
    evaluation: tuple[EvaluationFacts, ...]
    """Held-out documents and validation corpora."""
    imbalance: float
    """Estimated time of all steps relative to perfectly balanced ranks, for the configured ``dp`` size."""
    imbalance_by_dp: tuple[tuple[int, float, float], ...]
    """``(dp size, imbalance, lower bound of the imbalance)`` for several ``dp`` sizes."""
    step_spread: tuple[float, float]
    """10th and 90th percentile of a step's estimated time, relative to the mean."""
    segment: int
    """Index of the plan's newest segment, equal to the number of times that the run's data was changed."""
    base_step: int
    """Number of steps before the segment."""
    flops_per_step: float
    """Mean model FLOPs per step, for the forward and backward passes."""
    mixture: tuple[SourceFacts, ...]
    """Corpora that the segment uses; empty if no corpus is prepared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFacts:
    """Summary of one stage of a run."""

    name: str
    steps: tuple[int, int] | None
    """First and last optimizer step, or None if no corpus is prepared."""
    row_tokens: int
    rows_per_step: int
    tokens: int | None
    """Number of document tokens in the stage's rows, or None if no corpus is prepared."""
    sp_size: int
    dp_size: int
    lr: float
    schedule: str
    """Kind of learning rate schedule, or a note that the run's schedule continues."""
    rope: str
    optimizer: str
    """Whether the optimizer's moments are kept or reset at the stage's start."""
    sources: tuple[str, ...]
    mixture: tuple[SourceFacts, ...]
    """Parts of the sources; empty if no corpus is prepared."""
    device_bytes: int
    step_seconds: float | None
    """Predicted seconds per step, or None if there is no prediction for the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """Report on a run, built before any worker starts."""

    name: str
    shape: ModelShape
    layout: LayoutFacts
    corpus: CorpusFacts
    data: DataFacts
    step_time: StepTime | None
    """Predicted time of a step, term by term, or None if there is no prediction for the device."""
    memory: MemoryEstimate
    """Estimated memory of one rank, term by term."""
    chosen: tuple[Chosen, ...]
    """Memory settings that the planner has chosen, with reasons."""
    peer_memory: PeerMemoryFacts | None
    """Cost of peer memory, or None if ``elastic.peer_memory`` is false."""
    device_gib: float | None
    host_gib: float | None
    has_gpu: bool
    dtype: Literal["fp32", "bf16"]
    """Type of the weights in training, checkpoints and exports."""
    problems: tuple[Problem, ...]
    """Problems that prevent the run from starting."""
    notes: tuple[str, ...]
    """Notes on valid settings that may be unintended."""
    stages: tuple[StageFacts, ...] = ()
    """Summaries of all stages, or empty if the run has no stages. All other fields describe the last stage."""
    source_format: str | None = None
    """Name of the quantized format of the weights in ``model.path``, or None if they are not quantized."""

    def raise_problems(self) -> None:
        """Raise a ``ConfigError`` with all problems, if the report has any."""
        if self.problems:
            raise ConfigError(self.problems, source=f"run {self.name!r}")

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, with the totals of the memory estimate."""
        fields = asdict(self)
        fields["shape"]["num_parameters"] = self.shape.num_parameters
        fields["memory"]["device_bytes"] = self.memory.device_bytes
        fields["memory"]["host_bytes"] = self.memory.host_bytes
        if self.step_time is not None:
            fields["step_time"]["seconds"] = self.step_time.seconds
        fields["problems"] = [str(problem) for problem in self.problems]
        return fields


def build_report(
    config: Config,
    shape: ModelShape,
    corpora: CorpusSet | PlanInput,
    plan: Plan,
    changed: tuple[Problem, ...] = (),
    chosen: tuple[Chosen, ...] = (),
    stage: Stage | None = None,
    run: Config | None = None,
    settled: PlanSettings | None = None,
) -> PlanReport:
    """Build the report of a run or of one of its stages.

    Without a prepared corpus, ``corpora`` are synthetic documents. ``changed`` are problems with resuming the existing
    run with these settings, and ``settled`` are the stored settings of a run that has begun, or None for a new run. If
    ``config`` is that of ``stage``, ``run`` is the run's.
    """
    # Checks of lengths and token ids require a prepared corpus.
    opened = () if isinstance(corpora, PlanInput) else corpora.corpora
    memory, data = configured_memory(config, shape), _data(config, shape, plan, opened)
    of_data = _data_problems(config, shape, opened, plan) if opened else ()
    return PlanReport(
        name=config.run.name,
        shape=shape,
        layout=_layout(config, shape),
        corpus=_made_up(config, corpora) if isinstance(corpora, PlanInput) else _corpus(corpora, config.objective.kind),
        data=data,
        step_time=configured_time(config, shape, _work(plan.newest, shape, data)),
        memory=memory,
        chosen=chosen,
        peer_memory=peer_memory_facts(config, shape),
        device_gib=config.device_gib,
        host_gib=config.memory.host_gib,
        has_gpu=config.cluster.gpus_per_worker > 0,
        dtype=config.model.dtype,
        problems=(*changed, *heads_problems(config, shape), *of_data, *memory_problems(config, shape, memory, run)),
        notes=plan_notes(config, shape, (stage or stage_at(config, plan, 0)) if opened else None, opened, settled),
    )


def _data_problems(config: Config, shape: ModelShape, corpora: Sequence[Corpus], plan: Plan) -> Iterator[Problem]:
    for corpus in corpora:
        yield from vocabulary_problems(corpus.info.max_token_id, shape.vocab_size, str(corpus.folder))
    yield from corpus_problems(config, plan)
    yield from plan_problems(config, plan)


def _layout(config: Config, shape: ModelShape) -> LayoutFacts:
    sp_size, rows = config.parallel.sp_size, config.data.rows_per_step
    layout = run_layout(config, shape)
    # An impossible layout is reported as a problem. Limit the size, so that the report can be built.
    ulysses_size = min(layout.ulysses_size, shape.num_heads)
    return LayoutFacts(
        world_size=layout.world_size,
        least_world_size=config.cluster.workers.min,
        sp_size=sp_size,
        ulysses_size=layout.ulysses_size,
        ring_size=layout.ring_size,
        ring_is_chosen=config.parallel.ring_size is None,
        heads=assign_heads(shape.num_heads, shape.num_kv_heads, ulysses_size),
        dp_size=config.dp_size,
        valid_sp_sizes=allowed_sp(config, shape),
        level_world_sizes=tuple(sp_size * dp for dp in range(1, rows + 1) if rows % dp == 0),
        largest_world_size=sp_size * rows,
    )


def _corpus(corpora: CorpusSet, kind: str) -> CorpusFacts:
    opened = corpora.corpora
    return CorpusFacts(
        path=", ".join(str(corpus.folder) for corpus in opened),
        is_made_up=False,
        num_documents=sum(corpus.num_documents for corpus in opened),
        num_tokens=sum(corpus.info.num_tokens for corpus in opened),
        longest_document=max(int(corpus.lengths.max()) for corpus in opened),
        max_token_id=max(corpus.info.max_token_id for corpus in opened),
        unigram_nats=opened[0].info.byte_unigram_nats if len(opened) == 1 and kind == "next_token" else None,
        loss_weights=corpora.loss_weights,
    )


def _made_up(config: Config, documents: PlanInput) -> CorpusFacts:
    return CorpusFacts(
        path=", ".join(path for path, _ in config.data_sources),
        is_made_up=True,
        num_documents=int(documents.lengths.size),
        num_tokens=int(documents.lengths.sum(dtype=np.int64)),
        longest_document=int(documents.lengths.max()),
        max_token_id=0,
        unigram_nats=None,
    )


def _mixture(segment: Segment, opened: Sequence[Corpus]) -> Iterator[SourceFacts]:
    sizes = {corpus.fingerprint: corpus.info.num_tokens for corpus in opened}
    planned = [sum(tokens) for tokens in zip(*segment.source_tokens, strict=True)]
    weights = sum(source.weight or 0.0 for source in segment.sources)
    if not weights:
        planned = [sizes.get(source.fingerprint, 0) * len(segment.epochs) for source in segment.sources]
    for number, source in enumerate(segment.sources):
        if source.is_used and opened:
            tokens = planned[number] if planned else None
            share = (source.weight or 0.0) / weights if tokens is None else tokens / max(1, sum(planned))
            size = sizes.get(source.fingerprint)
            epochs = tokens / size if tokens is not None and size else None
            yield SourceFacts(path=source.path, weight=source.weight, tokens=tokens, share=share, epochs=epochs)


def _data(config: Config, shape: ModelShape, plan: Plan, opened: Sequence[Corpus]) -> DataFacts:
    segment = plan.newest
    stats = segment.train.stats(0, segment.num_rows)
    tokens = int(stats.document_tokens.sum(dtype=np.int64))
    total = step_flops(shape, tokens=tokens, sum_squared_lengths=int(stats.sum_squares.sum(dtype=np.float64)))
    times = step_times(segment.costs(), segment.settings.rows_per_step, config.dp_size)
    totals = {
        name: getattr(segment.totals, name)
        for name in (
            "split_documents", "truncated_documents", "dropped_documents", "lost_tokens", "skipped_documents",
            "held_out_documents",
        )
    }  # fmt: skip
    return DataFacts(
        plan_id=plan.plan_id,
        row_tokens=segment.settings.capacity,
        pad_multiple=segment.settings.pad_multiple,
        rows_per_step=segment.settings.rows_per_step,
        num_rows=plan.num_rows,
        num_steps=plan.num_steps,
        stop_step=min(config.run.stop_step or plan.num_steps, plan.num_steps),
        fill=segment.fill,
        tokens=tokens,
        supervised=int(stats.supervised.sum(dtype=np.int64)),
        padding_tokens=int(stats.padded_tokens(segment.settings.pad_multiple).sum()) - tokens,
        packing=segment.settings.packing,
        engine=config.data.engine,
        imbalance=times.imbalance,
        imbalance_by_dp=_imbalances(segment),
        step_spread=(times.fast, times.slow),
        segment=len(plan.segments) - 1,
        base_step=segment.base_step,
        flops_per_step=total / max(1, segment.end_step - segment.base_step),
        mixture=tuple(_mixture(segment, opened)),
        evaluation=tuple(
            EvaluationFacts(
                name=one.name,
                path=one.path,
                rows=len(one.rows),
                tokens=int(plan.evaluation.stats(one.rows.start, one.rows.stop).supervised.sum(dtype=np.int64)),
            )
            for one in plan.evaluation_sets
        ),
        **totals,
    )


def _work(segment: Segment, shape: ModelShape, data: DataFacts) -> Work:
    steps = max(1, segment.end_step - segment.base_step)
    tokens = data.tokens / steps
    # The FLOPs that are not proportional to the number of tokens are attention's.
    attention = data.flops_per_step - step_flops(shape, tokens=1, sum_squared_lengths=0) * tokens
    return Work(
        tokens=tokens + data.padding_tokens / steps,
        squares=attention / step_flops(shape, tokens=0, sum_squared_lengths=1),
        rows=data.rows_per_step,
        imbalance=data.imbalance,
    )


def _imbalances(segment: Segment) -> tuple[tuple[int, float, float], ...]:
    """Return ``(dp size, imbalance, lower bound)`` for each power of two up to the number of rows per step."""
    costs, rows = segment.costs(), segment.settings.rows_per_step
    sizes = [1 << power for power in range(1, rows.bit_length()) if 1 << power <= rows]
    found = [(size, step_times(costs, rows, size)) for size in sizes[:_MOST_DP_SIZES]]
    return tuple((size, times.imbalance, times.bound) for size, times in found)


def report_run_of_stages(
    config: Config,
    shape: ModelShape,
    corpora: CorpusSet,
    plan: Plan,
    changed: tuple[Problem, ...],
    chosen: tuple[Chosen, ...],
    settled: PlanSettings | None,
) -> PlanReport:
    """Build the report of a run with or without stages. For the arguments, see `build_report`."""
    if not config.stages:
        return build_report(config, shape, corpora, plan, changed, chosen, settled=settled)
    facts: list[StageFacts] = []
    found: list[Problem] = []
    problems, notes = list(changed), []
    for stage, planned in zip(config.stages, stages_of(config, plan), strict=True):
        own, so_far = planned.config, planned.plan
        if so_far.num_steps < plan.num_steps:
            # run.stop_step is checked in the last stage of the plan.
            own = own.model_copy(update={"run": own.run.model_copy(update={"stop_step": None})})
        report = build_report(own, shape, corpora, so_far, (), chosen, planned, config, settled)
        problems += [in_stage(problem, stage) for problem in report.problems if problem not in found]
        found += report.problems
        notes.append(report.notes)
        facts.append(_trained(stage, own, so_far, report))
    named = tuple(_named(notes, [stage.name for stage in config.stages]))
    return replace(report, problems=tuple(problems), notes=named, stages=tuple(facts))


def _named(notes: Sequence[Sequence[str]], names: Sequence[str]) -> Iterator[str]:
    """Yield each distinct note once, followed by the names of its stages unless all stages have the note."""
    for note in dict.fromkeys(note for of_stage in notes for note in of_stage):
        holders = [name for name, of_stage in zip(names, notes, strict=True) if note in of_stage]
        where = "" if len(holders) == len(names) else f" (stage {', '.join(holders)})"
        yield f"{note}{where}"


def _trained(stage: StageSection, own: Config, so_far: Plan, report: PlanReport) -> StageFacts:
    number = so_far.newest.stage_number
    segments = [segment for segment in so_far.segments if segment.stage_number == number]
    ends = [*(one.base_row for one in segments[1:]), so_far.num_rows]
    tokens = sum(
        int(one.train.stats(0, end - one.base_row).document_tokens.sum(dtype="int64"))
        for one, end in zip(segments, ends, strict=True)
    )
    steps = (so_far.stage_start(number) + 1, so_far.num_steps)
    sources = tuple(source.path for source in so_far.newest.sources if source.is_used)
    return stage_facts(stage, own, report, number, steps, tokens, sources)


def stage_facts(
    stage: StageSection,
    own: Config,
    report: PlanReport,
    number: int,
    steps: tuple[int, int] | None,
    tokens: int | None,
    sources: tuple[str, ...],
) -> StageFacts:
    """Summarize a stage. ``steps`` and ``tokens`` are None if no corpus is prepared."""
    return StageFacts(
        name=stage.name,
        steps=steps,
        row_tokens=report.data.row_tokens,
        rows_per_step=report.data.rows_per_step,
        tokens=tokens,
        sp_size=report.layout.sp_size,
        dp_size=report.layout.dp_size,
        lr=own.optimizer.lr,
        schedule=own.schedule.kind if stage.schedule is not None else "the run's",
        rope=_rope(own),
        optimizer="reset" if stage.optimizer == "reset" and number > 0 else "kept",
        sources=sources,
        mixture=report.data.mixture,
        device_bytes=report.memory.device_bytes,
        step_seconds=None if report.step_time is None else report.step_time.seconds,
    )


def _rope(config: Config) -> str:
    rope = config.model.rope
    if rope is None or isinstance(rope, str):
        return "the model's"
    given = rope.model_dump(exclude_none=True)
    shown = {name: f"{value:g}" if isinstance(value, float) else value for name, value in given.items()}
    return ", ".join(f"{name.removeprefix('rope_')} {value}" for name, value in shown.items())
