"""Plans the data of a run: takes the stored plan, makes a first one, or branches it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from ray_ulysses.config.resume import stage_conflicts
from ray_ulysses.config.stages import corpus_paths
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import open_sources, plan_input
from ray_ulysses.data.plan.plan_files import load_plan, num_segments, write_segment
from ray_ulysses.data.plan.stages import num_made, plan_rest, plan_stages
from ray_ulysses.errors import ConfigError, RunError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.planner.stages import stage_plans
from ray_ulysses.run.checkpoint_store import named_by
from ray_ulysses.run.start_point import committed_step, known_step
from ray_ulysses.run_names import PLAN_FOLDER
from ray_ulysses.storage.place import UnnamedServerError, refuse_server
from ray_ulysses.tracking.events import BadStep, RowsSkipped
from ray_ulysses.tracking.journal import open_journal
from ray_ulysses.tracking.journal_files import attempt_numbers
from ray_ulysses.tracking.journal_reader import read_entries

if TYPE_CHECKING:
    from ray_ulysses.clock import Clock
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.corpus_set import CorpusSet
    from ray_ulysses.data.plan.plan import Plan
    from ray_ulysses.data.plan.stages import NewSegment, StagePlan
    from ray_ulysses.run.settings import ResolvedRun
    from ray_ulysses.run.stored_run import StoredRun

_NAME_IT = "give the corpus in data.sources with weight 0"


def plan_run(
    run: ResolvedRun, stored: Plan | None, stored_run: StoredRun, *, branch: bool
) -> tuple[CorpusSet, Plan, tuple[NewSegment, ...]]:
    """Return a run's corpora and plan, and the plan's segments that are not stored yet; writes nothing.

    A stored plan that was made with these settings is returned as it is. Corpora that only completed stages use may be
    gone.

    Args:
        run: The run.
        stored: The run's plan so far.
        stored_run: Everything else that is stored of it.
        branch: Whether a plan that differs from the stored one continues it.

    Raises:
        UserError: A corpus can't be used, only the stored plan names its server, or no plan is possible.
        ConfigError: A branch changes the data of a stage that has begun.
    """
    if stored is not None:
        _refuse_strange_corpora(run.config, stored)
    stages = stage_plans(run.config, run.shape, stored.settings if stored else None)
    # Only a run of several segments can have corpora that are no longer needed.
    step = (known_step(run.store) or 0) if stored is not None and len(stored.segments) > 1 else 0
    began_with = stored_run.config or run.config
    plan, new = _planned(run, stages, stored, step, began_with if branch else None)
    corpora = open_sources(stages[-1].shares, plan.newest.sources).without_gone(plan.sources_after(step))
    for corpus in corpora.corpora:
        corpus.check_files()
    return corpora, plan, new


def _refuse_strange_corpora(config: Config, stored: Plan) -> None:
    """Refuse a stored plan with a corpus on a server if the configuration names neither."""
    for source in {source for segment in stored.segments for source in segment.sources}:
        try:
            refuse_server(source.path, f"a corpus of {config.run_dir / PLAN_FOLDER}", named_by(config), _NAME_IT)
        except UnnamedServerError:
            # If a corpus was moved, the configuration has its present path.
            here = set()
            for path in corpus_paths(config):
                with suppress(UserError):
                    here.add(Corpus.open(path).fingerprint)
            if source.fingerprint not in here:
                raise


def _planned(
    run: ResolvedRun, stages: Sequence[StagePlan], stored: Plan | None, step: int, branches_from: Config | None
) -> tuple[Plan, tuple[NewSegment, ...]]:
    if stored is None:
        return plan_stages(stages)
    kept = stored
    if branches_from is not None:
        step = committed_step(run)
        # At its first step a stage has not begun yet.
        kept = stored.at_step(max(step - 1, 0))
        if branches_from.stages or run.config.stages:
            # A branch must not change the data of a stage that has begun.
            problems = stage_conflicts(branches_from, run.config, kept.newest.stage_number + 1)
            if problems:
                raise ConfigError(problems, source=f"branch of run {run.config.run.name!r}")
    made = num_made(stored, stages, stored.stage_of_step(step + 1))
    if made == len(stages):
        return stored, ()
    if made is not None:
        # A command was killed while storing them.
        return plan_rest(stages, stored)
    # Without a branch, this is the plan of the new settings: the resume is refused later, together with the report.
    if branches_from is None:
        return plan_stages(stages)
    if kept.newest.stage is not None and kept.num_steps == step and num_made(kept, stages) is not None:
        return plan_rest(stages, kept)
    return plan_stages(stages, kept, step)


def store_plan(config: Config, new: Sequence[NewSegment], stored: Plan | None) -> None:
    """Write new segments of a plan into the run's directory, unless they are stored already.

    Args:
        config: The run's configuration.
        new: The segments, in order.
        stored: The plan that is there; None if there is none.
    """
    folder = config.run_dir / PLAN_FOLDER
    known = {segment.plan_id for segment in stored.segments} if stored is not None else set()
    missing = [one for one in new if one.segment.plan_id not in known]
    # Segments that a branch has replaced keep their numbers.
    first = num_segments(folder) if missing and stored is not None else 0
    for number, one in enumerate(missing, start=first):
        settings, documents = one.segment.settings, plan_input(one.corpora)
        write_segment(folder, number, documents, settings, one.remainder, one.part)


_WRITER = "command"
_log = get_logger(__name__)


def skip_bad_step(run: ResolvedRun, clock: Clock) -> str | None:
    """Leave out the rows of the bad step that ended the newest attempt, if one did.

    The caller holds the run, and no worker is alive. The rows between the newest checkpoint and the bad step are
    replanned with all that follow; rows left out of an epoch are not trained in later segments of that epoch.

    Args:
        run: The run.
        clock: Time.

    Returns:
        A message about what was done; None if nothing was, and the run must end.
    """
    elastic, run_dir = run.config.elastic, run.config.run_dir
    newest = max(attempt_numbers(run_dir), default=0)
    events = read_entries(run_dir, ends_only=True)
    bad = next((one for one in events if isinstance(one, BadStep) and one.attempt == newest), None)
    if bad is None or elastic.bad_steps != "skip":
        return None
    since = clock.now() - elastic.failure_window_s
    number = 1 + sum(isinstance(one, RowsSkipped) and one.time >= since for one in events)
    if number > elastic.max_skipped_steps:
        _log.warning(
            "the rows of step %d are not left out: elastic.max_skipped_steps=%d steps were since %g s; lower "
            "optimizer.lr in a new run, or raise that number",
            bad.step,
            elastic.max_skipped_steps,
            elastic.failure_window_s,
        )
        return None
    try:
        step, plan_id = _branch(run, bad)
    except (UserError, RunError, OSError) as error:
        _log.warning("the rows of step %d can't be left out: %s", bad.step, error)
        return None
    with closing(open_journal(run_dir, newest, writer=_WRITER)) as journal:
        journal.append({"event": "rows_skipped", "step": step, "rows": bad.rows, "plan_id": plan_id})
    first, end = bad.rows
    return (
        f"rows {first} to {end - 1} are left out from now on, which were those of step {bad.step}: the run continues "
        f"from step {step} with plan {plan_id} (skipped step {number} of elastic.max_skipped_steps="
        f"{elastic.max_skipped_steps})"
    )


def _branch(run: ResolvedRun, bad: BadStep) -> tuple[int, str]:
    """Write the segment without the rows, and return the step it starts from and the plan's id."""
    config = run.config
    folder = config.run_dir / PLAN_FOLDER
    step = committed_step(run)
    stored = load_plan(folder)
    kept = stored.at_step(step)
    if kept.plan_id != bad.plan_id:
        raise RunError(f"they are of plan {bad.plan_id}, and the run's is {kept.plan_id}")
    if step == 0 and config.model.resume_from is not None:
        raise RunError("the run has no checkpoint of its own yet; save more often (checkpoint.every_steps)")
    stages = stage_plans(config, run.shape, stored.settings)
    plan, new = plan_stages(stages, kept, step, range(*bad.rows))
    store_plan(config, new, stored)
    return step, plan.segments[len(kept.segments)].plan_id
