"""Plans the data of a run: takes the stored plan, makes a first one, or branches it."""

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
from ray_ulysses.run.checkpoint_store import storage_answers
from ray_ulysses.run.start_point import start_of
from ray_ulysses.run_names import PLAN_FOLDER

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.plan import PlanSettings
    from ray_ulysses.run.settings import ResolvedRun
    from ray_ulysses.storage import Store


def plan_run(
    run: ResolvedRun, settings: PlanSettings, stored: Plan | None, *, branch: bool
) -> tuple[CorpusSet, Plan, Remainder | None]:
    """Return a run's corpora and plan, and what it had trained where the plan is a new branch; writes nothing.

    A stored plan that was made with these settings is returned as it is, however long it took to make.

    Args:
        run: The run.
        settings: The settings that the configuration plans with.
        stored: The run's plan so far.
        branch: Whether a plan that differs from the stored one continues it.

    Raises:
        UserError: A corpus can't be used, or no plan is possible.
    """
    config = run.config
    corpora = open_sources(config.data_sources, stored.newest.sources if stored else ())
    for corpus in corpora.corpora:
        corpus.check_files()
    if stored is not None:
        if stored.newest.is_made_of(settings, corpora.sources, stored.newest.branch):
            return corpora, stored, None
        if branch:
            refuse_repeats(corpora.corpora, num_known=len(stored.newest.sources))
            remainder = remainder_after(stored, committed_step(run), corpora.sources, settings.epochs)
            segment = build_segment(plan_input(corpora), settings, remainder)
            return corpora, Plan(segments=(*stored.segments, segment)), remainder
        # The plan that the settings would give: the resume is refused in words, beside the report.
        corpora = open_sources(config.data_sources)
    else:
        refuse_repeats(corpora.corpora)
    return corpora, Plan(segments=(build_segment(plan_input(corpora), settings),)), None


def store_plan(config: Config, corpora: CorpusSet, plan: Plan, remainder: Remainder | None) -> None:
    """Write the newest segment of a plan into the run's directory, unless it is stored already.

    Raises:
        UserError: Another one is stored there.
    """
    newest = plan.newest
    if newest.branch is None or remainder is not None:
        number = len(plan.segments) - 1
        write_segment(config.run_dir / PLAN_FOLDER, number, plan_input(corpora), newest.settings, remainder)


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
