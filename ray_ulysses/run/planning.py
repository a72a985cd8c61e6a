"""Plans the data of a run: takes the stored plan, makes a first one, or branches it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ray_ulysses.checkpoint import newest_committed
from ray_ulysses.config import load_config
from ray_ulysses.config.resume import stage_conflicts
from ray_ulysses.config.stages import corpus_paths
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import open_sources, plan_input
from ray_ulysses.data.plan.plan_files import has_plan, load_plan, num_segments, write_segment
from ray_ulysses.data.plan.stages import num_made, plan_rest, plan_stages
from ray_ulysses.errors import ConfigError, RunError, UserError
from ray_ulysses.planner.stages import stage_plans
from ray_ulysses.run.checkpoint_store import named_by, storage_answers
from ray_ulysses.run.start_point import start_of
from ray_ulysses.run_names import CONFIG_FILE, PLAN_FOLDER
from ray_ulysses.storage.place import UnnamedServerError, refuse_server

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.corpus_set import CorpusSet
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.data.plan.stages import NewSegment, StagePlan
    from ray_ulysses.run.settings import ResolvedRun
    from ray_ulysses.storage import Store

_NAME_IT = "give the corpus in data.sources with weight 0"


def plan_run(run: ResolvedRun, stored: Plan | None, *, branch: bool) -> tuple[CorpusSet, Plan, tuple[NewSegment, ...]]:
    """Return a run's corpora and plan, and the segments of it that are not stored yet; writes nothing.

    A stored plan that was made with these settings is returned as it is, however long it took to make.

    Corpora that only trained stages were made of may be gone.

    Args:
        run: The run.
        stored: The run's plan so far.
        branch: Whether a plan that differs from the stored one continues it.

    Raises:
        UserError: A corpus can't be used, only the stored plan names its server, or no plan is possible.
        ConfigError: A branch changes what a stage that has begun is made of.
    """
    if stored is not None:
        _refuse_strange_corpora(run.config, stored)
    stages = stage_plans(run.config, run.shape, stored.settings if stored else None)
    # Only a run of several segments has corpora that it does not need any more.
    step = (known_step(run.store) or 0) if stored is not None and len(stored.segments) > 1 else 0
    plan, new = _planned(run, stages, stored, step, branch=branch)
    corpora = open_sources(stages[-1].shares, plan.newest.sources).without_gone(plan.sources_after(step))
    for corpus in corpora.corpora:
        corpus.check_files()
    return corpora, plan, new


def _refuse_strange_corpora(config: Config, stored: Plan) -> None:
    """Refuse a stored plan with a corpus that the configuration does not name, on a server that it does not name."""
    for source in {source for segment in stored.segments for source in segment.sources}:
        try:
            refuse_server(source.path, f"a corpus of {config.run_dir / PLAN_FOLDER}", named_by(config), _NAME_IT)
        except UnnamedServerError:
            # Of one that was moved, the configuration has the present path, where it is read.
            if source.fingerprint not in set(_fingerprints(config)):
                raise


def _fingerprints(config: Config) -> Iterator[str]:
    for path in corpus_paths(config):
        with suppress(UserError):
            yield Corpus.open(path).fingerprint


def _planned(
    run: ResolvedRun, stages: Sequence[StagePlan], stored: Plan | None, step: int, *, branch: bool
) -> tuple[Plan, tuple[NewSegment, ...]]:
    if stored is None:
        return plan_stages(stages)
    kept = stored
    if branch:
        step = committed_step(run)
        # At its border a stage has not begun.
        kept = stored.at_step(max(step - 1, 0))
        _refuse_changed_stages(run.config, kept.newest.stage_number + 1)
    made = num_made(stored, stages, stored.stage_of_step(step + 1))
    if made == len(stages):
        return stored, ()
    if made is not None:
        # A command was killed while it stored them.
        return plan_rest(stages, stored)
    # Without a branch it is the plan that the settings would give: the resume is refused in words, beside the report.
    if not branch:
        return plan_stages(stages)
    if kept.newest.stage is not None and kept.num_steps == step and num_made(kept, stages) is not None:
        return plan_rest(stages, kept)
    return plan_stages(stages, kept, step)


def _refuse_changed_stages(config: Config, num_begun: int) -> None:
    """Refuse a branch that changes what a stage that has begun is made of."""
    path = config.run_dir / CONFIG_FILE
    old = load_config(path) if path.is_file() else config
    problems = stage_conflicts(old, config, num_begun) if old.stages or config.stages else ()
    if problems:
        raise ConfigError(problems, source=f"branch of run {config.run.name!r}")


def store_plan(config: Config, new: Sequence[NewSegment]) -> None:
    """Write new segments of a plan into the run's directory, unless they are stored already."""
    folder = config.run_dir / PLAN_FOLDER
    stored = {segment.plan_id for segment in load_plan(folder).segments} if has_plan(folder) else set()
    for one in new:
        if one.segment.plan_id not in stored:
            settings, documents = one.segment.settings, plan_input(one.corpora)
            write_segment(folder, num_segments(folder), documents, settings, one.remainder, one.part)


def committed_step(run: ResolvedRun) -> int:
    """Return the step of the newest checkpoint that is committed, whole and part of the run; 0 if there is none.

    Raises:
        RunError: The storage does not answer, a newer checkpoint is of another version of ray-ulysses, or none is
            whole although one should be.
    """
    with storage_answers(run.location):
        choice = newest_committed(run.store, "sizes")
        whole = [] if choice.manifest is None else [choice.manifest.step]
        refusal = start_of(run, whole, choice.damaged).refusal
    if refusal is not None:
        raise RunError(f"run {run.config.run.name!r}: {refusal}")
    return whole[0] if whole else 0


def known_step(store: Store) -> int | None:
    """Return the step of the newest whole checkpoint, 0 if there is none; ``None`` if the storage does not answer."""
    try:
        manifest = newest_committed(store, "sizes").manifest
    except (OSError, RunError):
        return None
    return manifest.step if manifest is not None else 0
