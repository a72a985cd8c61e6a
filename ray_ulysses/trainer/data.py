"""The data of a run as a worker opens it: the stored plan and its corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray_ulysses.data.corpus import Corpus
from ray_ulysses.data.plan_files import load_plan
from ray_ulysses.data.reader import RowReader
from ray_ulysses.trainer.settings import PLAN_FOLDER

if TYPE_CHECKING:
    from ray_ulysses.config import Config
    from ray_ulysses.data.plan import Plan


def open_data(config: Config) -> tuple[Plan, RowReader]:
    """Return the run's plan and a reader of its rows.

    Raises:
        UserError: The plan or the corpus can't be read, or the corpus is not the one planned with.
    """
    plan = load_plan(config.run_dir / PLAN_FOLDER)
    return plan, RowReader(Corpus.open(config.data.path), plan)
