"""Plans a run's data: reuses the stored plan, creates a first plan, or branches the stored plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress

from ray_ulysses.clock import Clock
from ray_ulysses.config import Config
from ray_ulysses.config.resume import stage_conflicts
from ray_ulysses.config.stages import corpus_paths
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet, open_sources, open_validation, plan_input
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan, num_segments, write_segment
from ray_ulysses.data.plan.stages import NewSegment, StagePlan, num_made, plan_rest, plan_stages
from ray_ulysses.errors import ConfigError, RunError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.planner.stages import stage_plans
from ray_ulysses.run.checkpoint_store import named_by
from ray_ulysses.run.settings import ResolvedRun
from ray_ulysses.run.start_point import committed_step, known_step
from ray_ulysses.run.stored_run import StoredRun
from ray_ulysses.run_names import PLAN_FOLDER
from ray_ulysses.storage.place import UnnamedServerError, refuse_server
from ray_ulysses.tracking.events import BadStep, RowsSkipped
from ray_ulysses.tracking.journal import open_journal
from ray_ulysses.tracking.journal_files import attempt_numbers
from ray_ulysses.tracking.journal_reader import read_entries

_NAME_IT = "add the corpus to data.sources with weight 0"


def plan_run(
    run: ResolvedRun, stored: Plan | None, stored_run: StoredRun, *, branch: bool
) -> tuple[CorpusSet, CorpusSet, Plan, tuple[NewSegment, ...]]:
    """Return a run's training and validation corpora, its plan, and the segments not stored yet, without writing files.

    A stored plan that was created with the same settings is returned unchanged. Corpora that are used only by completed
    stages may be missing.

    Args:
        run: The run.
        stored: The run's stored plan, or None if there is none.
        stored_run: The rest of the run's stored state.
        branch: Whether a changed plan may continue the stored plan, as a branch.

    Raises:
        UserError: A corpus is unusable, a corpus server is specified only by the stored plan, or planning fails.
        ConfigError: The branch changes the data of a stage that has already started.
    """
    if stored is not None:
        _refuse_strange_corpora(run.config, stored)
    stages = stage_plans(run.config, run.shape, stored.settings if stored else None)
    # Only a plan with several segments can have corpora that are no longer needed.
    step = (known_step(run.store) or 0) if stored is not None and len(stored.segments) > 1 else 0
    began_with = stored_run.config or run.config
    plan, new = _planned(run, stages, stored, step, began_with if branch else None)
    corpora = open_sources(stages[-1].shares, plan.newest.sources).without_gone(plan.sources_after(step))
    validation = open_validation(stages[-1].validation, plan.newest.sources)
    for corpus in (*corpora.corpora, *validation.corpora):
        corpus.check_files()
    return corpora, validation, plan, new


def _refuse_strange_corpora(config: Config, stored: Plan) -> None:
    """Refuse a stored plan with a corpus on a server that the configuration does not specify."""
    for source in {source for segment in stored.segments for source in (*segment.sources, *segment.validation)}:
        try:
            refuse_server(source.path, f"a corpus of {config.run_dir / PLAN_FOLDER}", named_by(config), _NAME_IT)
        except UnnamedServerError:
            # Accept a moved corpus: the configuration then specifies the same corpus at its current location.
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
        # A stage starts with its first step, so a checkpoint at the end of a stage belongs to that stage.
        kept = stored.at_step(max(step - 1, 0))
        if branches_from.stages or run.config.stages:
            problems = stage_conflicts(branches_from, run.config, kept.newest.stage_number + 1)
            if problems:
                raise ConfigError(problems, source=f"branch of run {run.config.run.name!r}")
    made = num_made(stored, stages, stored.stage_of_step(step + 1))
    if made == len(stages):
        return stored, ()
    if made is not None:
        # An earlier command was killed before it had stored all segments.
        return plan_rest(stages, stored)
    # The new settings require another plan. Without --branch, the resume is refused later, along with other problems.
    if branches_from is None:
        return plan_stages(stages)
    if kept.newest.stage is not None and kept.num_steps == step and num_made(kept, stages) is not None:
        return plan_rest(stages, kept)
    return plan_stages(stages, kept, step)


def store_plan(config: Config, new: Sequence[NewSegment], stored: Plan | None) -> None:
    """Store a plan's new segments in the run's directory, skipping segments that are already stored.

    Args:
        config: The run's configuration.
        new: The new segments, in order.
        stored: The stored plan, or None if there is none.
    """
    folder = config.run_dir / PLAN_FOLDER
    known = {segment.plan_id for segment in stored.segments} if stored is not None else set()
    missing = [one for one in new if one.segment.plan_id not in known]
    # The numbers of segments that a branch has replaced are not reused.
    first = num_segments(folder) if missing and stored is not None else 0
    for number, one in enumerate(missing, start=first):
        settings, documents = one.segment.settings, plan_input(one.corpora, one.validation)
        write_segment(folder, number, documents, settings, one.remainder, one.part)


_WRITER = "command"
_log = get_logger(__name__)


def skip_bad_step(run: ResolvedRun, clock: Clock) -> str | None:
    """Remove a bad step's rows from the plan, if a bad step ended the newest attempt and ``elastic.bad_steps=skip``.

    The caller must hold the run's claim, and all workers must have ended. All other rows after the newest checkpoint
    are planned again. The skipped rows are left out for the rest of the epoch.

    Args:
        run: The run.
        clock: The time source.

    Returns:
        A message about the skipped rows, or None if no rows were skipped and the run must end.
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
            "the rows of step %d are not skipped: elastic.max_skipped_steps=%d steps were skipped in the last %g s; "
            "decrease optimizer.lr (`ray-ulysses train --branch`), or increase elastic.max_skipped_steps",
            bad.step,
            elastic.max_skipped_steps,
            elastic.failure_window_s,
        )
        return None
    try:
        step, plan_id = _branch(run, bad)
    except (UserError, RunError, OSError) as error:
        _log.warning("can't skip the rows of step %d: %s", bad.step, error)
        return None
    with closing(open_journal(run_dir, newest, writer=_WRITER)) as journal:
        journal.append({"event": "rows_skipped", "step": step, "rows": bad.rows, "plan_id": plan_id})
    first, end = bad.rows
    return (
        f"skipping rows {first} to {end - 1} of bad step {bad.step}: the run continues from step {step} with plan "
        f"{plan_id} (skipped step {number} of elastic.max_skipped_steps={elastic.max_skipped_steps})"
    )


def _branch(run: ResolvedRun, bad: BadStep) -> tuple[int, str]:
    """Store a branch of the plan without the bad step's rows, and return its first step and plan id."""
    config = run.config
    folder = config.run_dir / PLAN_FOLDER
    step = committed_step(run)
    stored = load_plan(folder)
    kept = stored.at_step(step)
    if kept.plan_id != bad.plan_id:
        raise RunError(f"the rows belong to plan {bad.plan_id}, but the run's plan is {kept.plan_id}")
    if step == 0 and config.model.resume_from is not None:
        raise RunError("the run has not saved a checkpoint yet; decrease checkpoint.every_steps")
    stages = stage_plans(config, run.shape, stored.settings)
    plan, new = plan_stages(stages, kept, step, range(*bad.rows))
    store_plan(config, new, stored)
    return step, plan.segments[len(kept.segments)].plan_id
