"""The report of a run of several stages: that of its last one, with a summary and the problems of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ray_ulysses.config import Config
from ray_ulysses.config.stage_section import StageSection
from ray_ulysses.config.stages import in_stage
from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.errors import Problem
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.planner.choice import Chosen
from ray_ulysses.planner.report import PlanReport, StageFacts, build_report
from ray_ulysses.planner.stages import stages_of


def report_run_of_stages(
    config: Config,
    shape: ModelShape,
    corpora: CorpusSet,
    plan: Plan,
    changed: tuple[Problem, ...],
    chosen: tuple[Chosen, ...],
) -> PlanReport:
    """Build the report of a run; arguments as of `build_report`. One without stages is reported as it is."""
    if not config.stages:
        return build_report(config, shape, corpora, plan, changed, chosen)
    facts: list[StageFacts] = []
    found: list[Problem] = []
    problems, notes = list(changed), []
    for stage, planned in zip(config.stages, stages_of(config, plan), strict=True):
        own, so_far = planned.config, planned.plan
        if so_far.num_steps < plan.num_steps:
            # The run stops in a later stage, if it does.
            own = own.model_copy(update={"run": own.run.model_copy(update={"stop_step": None})})
        report = build_report(own, shape, corpora, so_far, (), chosen, planned, config)
        problems += [in_stage(problem, stage) for problem in report.problems if problem not in found]
        found += report.problems
        notes.append(report.notes)
        facts.append(_trained(stage, own, so_far, report))
    named = tuple(_named(notes, [stage.name for stage in config.stages]))
    return replace(report, problems=tuple(problems), notes=named, stages=tuple(facts))


def _named(notes: Sequence[Sequence[str]], names: Sequence[str]) -> Iterator[str]:
    """Yield the notes of all stages, each once; one that is not of all of them names its own."""
    for note in dict.fromkeys(note for of_stage in notes for note in of_stage):
        holders = [name for name, of_stage in zip(names, notes, strict=True) if note in of_stage]
        where = "" if len(holders) == len(names) else f" (stage {', '.join(holders)})"
        yield f"{note}{where}"


def _trained(stage: StageSection, own: Config, so_far: Plan, report: PlanReport) -> StageFacts:
    """Return the facts of a stage at the end of its plan."""
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
    """Return the facts of a stage.

    Args:
        stage: Its settings.
        own: The configuration that holds in it.
        report: The report on it.
        number: Its number, from 0.
        steps: Its first and last step; None where no corpus is prepared.
        tokens: Tokens of documents in its rows; None where they are not known.
        sources: Directories of its corpora.
    """
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
