"""Leaves the rows of a bad step out of a run: a branch of its plan, and a record in its journal."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.data.plan.stages import plan_stages
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.logging import get_logger
from ray_ulysses.planner.stages import stage_plans
from ray_ulysses.run.planning import committed_step, store_plan
from ray_ulysses.run_names import PLAN_FOLDER
from ray_ulysses.tracking.events import BadStep, RowsSkipped
from ray_ulysses.tracking.journal import open_journal
from ray_ulysses.tracking.journal_files import attempt_numbers
from ray_ulysses.tracking.journal_reader import read_entries

if TYPE_CHECKING:
    from ray_ulysses.clock import Clock
    from ray_ulysses.run.settings import ResolvedRun

_WRITER = "command"
_log = get_logger(__name__)


def skip_bad_step(run: ResolvedRun, clock: Clock) -> str | None:
    """Leave out the rows of the step for which the newest attempt has ended, if it was one.

    The caller holds the run's lock, and no worker is alive. The rows between the newest checkpoint and the bad step are
    planned anew with all that follow; what is left out of an epoch is trained in no later segment of that epoch.

    Args:
        run: The run.
        clock: Time.

    Returns:
        What was done, for a person; None if nothing was, and the run is to end.
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
    """Write the segment that leaves the rows out, and return the step it starts from and the id of the plan."""
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
    store_plan(config, new)
    return step, plan.segments[len(kept.segments)].plan_id
