"""Resolves the stages of a run: the configuration of each stage, and the rules for stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ray_ulysses.config.learning import StageSection
from ray_ulysses.config.model import RopeSection
from ray_ulysses.config.schema import Config, problem_of, with_settings
from ray_ulysses.errors import Problem

# The run's setting that each stage setting replaces.
_PLACES = {
    "context_tokens": "data.context_tokens",
    "rows_per_step": "data.rows_per_step",
    "sp_size": "parallel.sp_size",
    "rope": "model.rope",
    "lr": "optimizer.lr",
}


def stage_config(config: Config, number: int) -> Config:
    """Return the configuration of a stage as if the stage were a separate run without stages.

    A configuration without stages is returned unchanged.
    """
    if not config.stages:
        return config
    stage = config.stages[number]
    changes = {place: value for name, place in _PLACES.items() if (value := getattr(stage, name)) is not None}
    if stage.path is not None or stage.sources is not None:
        changes |= {"data.path": stage.path, "data.sources": stage.sources}
    if stage.sp_size not in (None, config.parallel.sp_size):
        # ring_size was chosen for the run's sp_size, so the stage chooses its own.
        changes["parallel.ring_size"] = None
    schedule = {} if stage.schedule is None else {"schedule": stage.schedule}
    return with_settings(config, changes).model_copy(update={**schedule, "stages": ()})


def stage_configs(config: Config) -> Iterator[Config]:
    """Yield the configuration of each stage. A run without stages counts as one stage."""
    for number in range(max(1, len(config.stages))):
        yield stage_config(config, number)


def corpus_paths(config: Config) -> tuple[str, ...]:
    """Return the path of every corpus that a run trains on or is evaluated on, without duplicates."""
    trained = (path for own in stage_configs(config) for path, _ in own.data_sources)
    return tuple(dict.fromkeys((*trained, *config.data.validation)))


def stage_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each broken rule about stages."""
    names = [stage.name for stage in config.stages]
    for number, stage in enumerate(config.stages):
        path, is_last = f"stages.{number}", number == len(config.stages) - 1
        if stage.name in names[:number]:
            rule, hint = "is the name of another stage", "choose another name"
            yield Problem(path=f"{path}.name", value=stage.name, rule=rule, hint=hint)
        if stage.steps is not None and stage.tokens is not None:
            rule = f"stages.{number}.tokens={stage.tokens} also sets the stage's length"
            yield Problem(path=f"{path}.steps", value=stage.steps, rule=rule, hint="remove steps or tokens")
        elif stage.steps is None and stage.tokens is None and not is_last:
            rule = "every stage except the last requires a length"
            yield Problem(path=f"{path}.steps", rule=rule, hint="set the stage's steps or tokens")
        if stage.path is not None and stage.sources is not None:
            hint = "list every corpus under sources, and remove path"
            yield Problem(path=f"{path}.path", value=stage.path, rule="sources is also set", hint=hint)
        yield from _within_the_run(config, stage, path)
    if config.stages and config.model.resume_from is not None and config.model.resume_state == "all":
        rule = "continues another run at its step, but this run has its own stages"
        yield problem_of(config, "model.resume_state", rule, "set model.resume_state: weights or optimizer")


def _within_the_run(config: Config, stage: StageSection, path: str) -> Iterator[Problem]:
    """Yield a problem if a stage's sizes do not fit the run's, or if its rotary positions could not be exported."""
    if isinstance(stage.rope, RopeSection) and config.model.part == "text":
        yield Problem(
            path=f"{path}.rope",
            rule="changes the text decoder's positions, but model.part=text exports into a copy of the complete "
            "checkpoint, whose config.json is not changed",
            hint="edit the config.json in model.path instead, for the whole run",
        )
    context, sp_size = config.data.context_tokens, config.parallel.sp_size
    if stage.context_tokens is not None and stage.context_tokens > context:
        rule = f"exceeds data.context_tokens={context}, the longest context of the run"
        hint = f"use at most {context}, or set data.context_tokens={stage.context_tokens}"
        yield Problem(path=f"{path}.context_tokens", value=stage.context_tokens, rule=rule, hint=hint)
    if stage.sp_size is not None and sp_size % stage.sp_size:
        rule = f"does not divide parallel.sp_size={sp_size}, which determines how workers are placed"
        yield Problem(path=f"{path}.sp_size", value=stage.sp_size, rule=rule, hint=f"use {divisors(sp_size)}")


def divisors(number: int) -> str:
    """Format the divisors of a number for an error message."""
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def in_stage(problem: Problem, stage: StageSection) -> Problem:
    """Return a stage's problem with the name of the stage added to the rule."""
    return replace(problem, rule=f"{problem.rule} (in stage {stage.name!r})")
