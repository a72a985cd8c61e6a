"""The data that a run was trained on, as far as they are there: an export's weights do not need them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ray_ulysses.data.plan.mixture import PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import has_plan, load_plan
from ray_ulysses.errors import UserError
from ray_ulysses.forensics.run_data import find_sources
from ray_ulysses.run_names import PLAN_FOLDER
from ray_ulysses.storage.patience import StorageAwayError

DATA_ERRORS = (UserError, OSError, StorageAwayError)
"""What reading a plan or a corpus raises where it is not there, or is not what was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedData:
    """A run's data.

    Attributes:
        plan: Its plan.
        sources: Its corpora, where they lie now.
    """

    plan: Plan
    sources: tuple[PlannedSource, ...]


def planned_data(run_dir: Path) -> PlannedData | None:
    """Return what a run was trained on; None where it has no plan.

    Raises:
        UserError: The plan can't be read; the text is the reason alone.
    """
    try:
        if not has_plan(run_dir / PLAN_FOLDER):
            return None
        plan = load_plan(run_dir / PLAN_FOLDER)
        return PlannedData(plan=plan, sources=find_sources(run_dir, plan))
    except DATA_ERRORS as error:
        raise unreadable_plan(error) from error


def unreadable_plan(error: Exception) -> UserError:
    """Return the error for a plan that can't be read, without a way out that is meant for a run that goes on."""
    if isinstance(error, OSError):
        reason = f"{error.filename or PLAN_FOLDER}: {error.strerror or error}"
    else:
        text = " ".join(str(error).split())
        reason = text.rpartition("; ")[0] or text
    return UserError(f"the run's data plan can't be read ({reason})")
