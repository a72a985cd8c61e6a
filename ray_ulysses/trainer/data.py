"""Opens the corpora of a run in a worker."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet
from ray_ulysses.data.read.reader import RowReader

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan.corpus_set import PlannedSource
    from ray_ulysses.data.plan.plan import Plan


def open_rows(config: Config, plan: Plan) -> RowReader:
    """Return a reader of the rows of a stage's plan.

    Raises:
        UserError: A corpus can't be read, or is not the one planned with.
    """
    return RowReader(CorpusSet(_moved_sources(config, plan)), plan)


def _moved_sources(config: Config, plan: Plan) -> tuple[PlannedSource, ...]:
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
