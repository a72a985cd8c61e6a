"""Reads the content of a run's report; parts that can't be read are reported as missing."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.inspect.checkpoint_listing import CheckpointListing, list_checkpoints
from ray_ulysses.inspect.run_data import open_plan, read_run
from ray_ulysses.run.run_files import describing_files, read_plan_facts
from ray_ulysses.run_names import EVALUATION_FOLDER, PLAN_FACTS_FILE
from ray_ulysses.storage.place import Place, open_store
from ray_ulysses.tracking.history import RunHistory
from ray_ulysses.tracking.journal_reader import Journal, read_journal
from ray_ulysses.tracking.run_time import Timeline, run_timeline
from ray_ulysses.tracking.steps import Rows, inherited_steps, steps_that_count
from ray_ulysses.validation import parse_json

_EVALUATION_FILE = "evaluation.json"
_Kind = TypeVar("_Kind")
_Found = TypeVar("_Found")
Floats = np.ndarray[Any, np.dtype[np.float64]]


class NothingToDrawError(ValueError):
    """A run has no data for a plot. The error message is shown instead of the plot."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of a run's report."""

    history: RunHistory
    journal: Journal
    kept: Rows
    """Steps that count, ascending and without duplicates."""
    lost: Rows
    """Steps that were discarded because an attempt resumed from an earlier step."""
    inherited_tokens: int
    """Number of supervised tokens in the steps inherited from another run."""
    timeline: Timeline
    plan: Plan | None
    listing: CheckpointListing | None
    evaluation: Mapping[str, Any] | None
    """Newest result of ``ray-ulysses evaluate``."""
    planned_gib: float | None
    """Planned memory per rank, in GiB."""
    num_parameters: int | None
    """Number of the model's parameters, according to the plan."""
    texts: Mapping[str, str]
    """Texts that describe the run, by file name."""
    missing: Sequence[str]
    """Descriptions of the parts that can't be shown, with reasons."""

    @cached_property
    def tokens(self) -> Floats:
        """Cumulative number of supervised tokens at the end of each step that counts."""
        found: Floats = self.inherited_tokens + np.cumsum(self.kept["tokens"], dtype=np.float64)
        return found

    def tokens_at(self, steps: Any) -> Floats:
        """Return the cumulative number of supervised tokens at the end of the given steps, interpolated if needed."""
        known = np.append(0.0, self.kept["step"].astype(np.float64))
        found: Floats = np.interp(steps, known, np.append(float(self.inherited_tokens), self.tokens))
        return found

    def events(self, kind: type[_Kind]) -> list[_Kind]:
        """Return the run's events of a kind, in order."""
        return [entry for entry in self.journal.entries if isinstance(entry, kind)]


def read_record(run_dir: Place, *, trust_run: bool = False) -> RunRecord:
    """Read the record of a run, which may be running, damaged or without steps.

    Raises:
        UserError: The checkpoints are on a server that is specified only by an untrusted run.
        OSError: The journal can't be read.
    """
    missing: list[str] = []
    journal = read_journal(run_dir)
    counted = steps_that_count(journal.entries)
    history = read_run(run_dir, journal, trust_run=trust_run)
    missing += [f"damaged line in the journal: {text}" for text in history.damaged_records]
    missing += [f"steps {first:,} to {last:,} have no record in the journal" for first, last in history.missing_steps]
    gib, num_parameters = _try(missing, "the planned memory", lambda: _planned(run_dir)) or (None, None)
    return RunRecord(
        history=history,
        journal=journal,
        kept=counted.kept.rows,
        lost=counted.lost.rows,
        inherited_tokens=inherited_steps(journal.entries).tokens,
        timeline=run_timeline(journal.entries),
        plan=_try(missing, "the data plan", lambda: open_plan(run_dir)),
        listing=_try(
            missing, "the checkpoints", lambda: list_checkpoints(run_dir, journal.entries, trust_run=trust_run)
        ),
        evaluation=_try(missing, "the evaluation", lambda: _newest_evaluation(run_dir)),
        planned_gib=gib,
        num_parameters=num_parameters,
        texts=describing_files(run_dir),
        missing=tuple(missing),
    )


def _try(missing: list[str], what: str, read: Callable[[], _Found]) -> _Found | None:
    """Return the result of ``read``. If it fails, add the reason to ``missing`` and return None."""
    try:
        return read()
    except FileNotFoundError as error:
        missing.append(f"{what}: {error.filename or error} does not exist")
    except (UserError, RunError, OSError, ValueError, KeyError, TypeError) as error:
        missing.append(f"{what}: {error}")
    return None


def _planned(run_dir: Place) -> tuple[float, int]:
    """Return the planned memory per rank in GiB, and the number of the model's parameters."""
    facts = read_plan_facts(run_dir)
    try:
        return float(facts["memory"]["device_bytes"]) / 2**30, int(facts["shape"]["num_parameters"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{PLAN_FACTS_FILE} has no memory.device_bytes or shape.num_parameters") from error


def _newest_evaluation(run_dir: Place) -> Mapping[str, Any]:
    store = open_store(run_dir)
    keys = fnmatch.filter(store.list(EVALUATION_FOLDER), f"{EVALUATION_FOLDER}/step-*/{_EVALUATION_FILE}")
    if not keys:
        raise UserError("`ray-ulysses evaluate RUN` has not been run")
    found = parse_json(store.read_whole(keys[-1]))
    if not isinstance(found, dict) or found.get("format_version") != 1:
        raise ValueError(f"{run_dir / keys[-1]}: is not an evaluation written by this version of ray-ulysses")
    return found
