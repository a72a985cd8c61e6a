"""Opens the data that a run was trained on, if they still exist; the export of weights does not need them."""

from __future__ import annotations

from dataclasses import dataclass

from ray_ulysses.config import Config
from ray_ulysses.data.plan.corpus_set import PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import has_plan, load_plan
from ray_ulysses.errors import UlyssesError, UserError
from ray_ulysses.forensics.run_data import find_sources
from ray_ulysses.run_names import PLAN_FOLDER
from ray_ulysses.storage.place import Place, UnnamedServerError

DATA_ERRORS = (UlyssesError, OSError)
"""Raised for a plan or a corpus that is missing, damaged or away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedData:
    """A run's plan, and its corpora at their current paths."""

    plan: Plan
    sources: tuple[PlannedSource, ...]


def planned_data(run_dir: Place, *, trust_run: bool = False) -> PlannedData | None:
    """Return the data of a run; None if it has no plan.

    Raises:
        UserError: The plan can't be read; the text is only the reason.
        UnnamedServerError: As of `find_sources`.
    """
    try:
        if not has_plan(run_dir / PLAN_FOLDER):
            return None
        plan = load_plan(run_dir / PLAN_FOLDER)
        return PlannedData(plan=plan, sources=find_sources(run_dir, plan, trust_run=trust_run))
    except UnnamedServerError:
        raise
    except DATA_ERRORS as error:
        raise unreadable_plan(error) from error


def with_planned_context(config: Config, run_dir: Place, step: int) -> Config:
    """Return a configuration with the context that a step was planned with, which a branch may have changed since.

    Args:
        config: The configuration that holds now, which is returned as it is if there is no plan that can be read.
        run_dir: The run's directory.
        step: A step that was trained.
    """
    try:
        plan = load_plan(run_dir / PLAN_FOLDER) if has_plan(run_dir / PLAN_FOLDER) else None
    except DATA_ERRORS:
        plan = None
    if plan is None or not 1 <= step <= plan.num_steps:
        return config
    context = plan.segments[plan.segment_of_step(step)].settings.context_tokens
    return config.model_copy(update={"data": config.data.model_copy(update={"context_tokens": context})})


def unreadable_plan(error: Exception) -> UserError:
    """Return the error for a plan that can't be read, without the hint, which is for training."""
    if isinstance(error, OSError):
        reason = f"{error.filename or PLAN_FOLDER}: {error.strerror or error}"
    else:
        text = " ".join(str(error).split())
        reason = text.rpartition("; ")[0] or text
    return UserError(f"the run's data plan can't be read ({reason})")
