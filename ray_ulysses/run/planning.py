"""The data plan of a run: the one that is stored, a first one, or a branch of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_ulysses.checkpoint import newest_committed
from ray_ulysses.data.corpus.repeats import refuse_repeats
from ray_ulysses.data.plan.branching import remainder_after
from ray_ulysses.data.plan.corpus_set import CorpusSet, open_sources, plan_input
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import write_segment
from ray_ulysses.data.plan.planning import Remainder, build_segment
from ray_ulysses.errors import RunError
from ray_ulysses.run.checkpoint_store import checkpoint_location, checkpoint_store, storage_answers
from ray_ulysses.run.start_point import why_no_start
from ray_ulysses.run_names import PLAN_FOLDER

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.plan import PlanSettings


def plan_run(
    config: Config, settings: PlanSettings, stored: Plan | None, *, branch: bool
) -> tuple[CorpusSet, Plan, Remainder | None]:
    """Return a run's corpora and plan, and what it had trained where the plan is a new branch; writes nothing.

    A plan that is stored and made with these settings is taken as it is, however long it took to make.

    Args:
        config: The run's configuration, paths absolute.
        settings: What the configuration plans with.
        stored: The run's plan so far.
        branch: Whether a plan that differs from the stored one goes on from it.

    Raises:
        UserError: A corpus can't be used, or no plan is possible.
    """
    corpora = open_sources(config.data_sources, stored.newest.sources if stored else ())
    for corpus in corpora.corpora:
        corpus.check_files()
    if stored is not None:
        if stored.newest.is_made_of(settings, corpora.sources, stored.newest.branch):
            return corpora, stored, None
        if branch:
            refuse_repeats(corpora.corpora, num_known=len(stored.newest.sources))
            step = committed_step(config)
            remainder = remainder_after(stored, step, corpora.sources, settings.epochs)
            segment = build_segment(plan_input(corpora), settings, remainder)
            return corpora, Plan(segments=(*stored.segments, segment)), remainder
        # What the settings would give: the resume is refused in words, beside the report.
        corpora = open_sources(config.data_sources)
    else:
        refuse_repeats(corpora.corpora)
    return corpora, Plan(segments=(build_segment(plan_input(corpora), settings),)), None


def store_plan(config: Config, corpora: CorpusSet, plan: Plan, remainder: Remainder | None) -> None:
    """Write the newest segment of a plan into the run's directory, unless it is there.

    Raises:
        UserError: Another one is there.
    """
    newest = plan.newest
    if newest.branch is not None and remainder is None:
        return
    number = len(plan.segments) - 1
    write_segment(config.run_dir / PLAN_FOLDER, number, plan_input(corpora), newest.settings, remainder)


def committed_step(config: Config) -> int:
    """Return the step of the newest checkpoint that is committed, whole and part of the run; 0 where there is none.

    Raises:
        RunError: The storage does not answer, a newer one is of another version of ray-ulysses, or there is nothing
            whole although there should be.
    """
    store = checkpoint_store(config)
    with storage_answers(checkpoint_location(config)):
        choice = newest_committed(store, "sizes")
        problem = why_no_start(config, store, choice.manifest, choice.damaged)
    if problem is not None:
        raise RunError(f"run {config.run.name!r}: {problem}")
    return choice.manifest.step if choice.manifest is not None else 0
