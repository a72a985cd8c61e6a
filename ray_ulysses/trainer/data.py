"""Opens the data of a run in a worker: the stored plan and its corpora."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.plan.plan_files import load_plan
from ray_ulysses.data.read.reader import RowReader
from ray_ulysses.run_names import PLAN_FOLDER

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.mixture import PlannedSource
    from ray_ulysses.data.plan.plan import Plan


def open_data(config: Config) -> tuple[Plan, RowReader]:
    """Return the run's plan and a reader of its rows.

    Raises:
        UserError: The plan or the corpus can't be read, or the corpus is not the one planned with.
    """
    plan = load_plan(config.run_dir / PLAN_FOLDER)
    return plan, RowReader(CorpusSet(moved_sources(config, plan)), plan)


def moved_sources(config: Config, plan: Plan) -> tuple[PlannedSource, ...]:
    """Return the plan's corpora at their configured paths, and at the planned ones where none is configured.

    Raises:
        UserError: A corpus of the configuration can't be opened, or is not one of the plan's.
    """
    known = {source.fingerprint: source for source in plan.newest.sources}
    for path, _ in config.data_sources:
        fingerprint = Corpus.open(path).fingerprint
        if fingerprint not in known:
            plan.check_corpus(fingerprint)
        known[fingerprint] = replace(known[fingerprint], path=path)
    return tuple(known[source.fingerprint] for source in plan.newest.sources)
