"""Decides from a run's evaluations whether the validation loss has stopped improving."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_ulysses.data.plan.segment import HELD_OUT
from ray_ulysses.tracking.events import Evaluated

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ray_ulysses.config.learning import EarlyStoppingSection

FINISHED_EARLY = "finished: "
"""Beginning of the end reason of an attempt that ended the run early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStop:
    """The evaluation at which a run ends early."""

    step: int
    """Number of completed steps."""
    best_step: int
    """Step of the evaluation with the lowest loss."""
    best_loss: float
    """Lowest loss, in nats."""
    patience: int
    min_delta: float

    def __str__(self) -> str:
        evaluations = "evaluation" if self.patience == 1 else f"{self.patience} evaluations"
        best = f"{self.best_loss:.4f} at step {self.best_step:,}"
        by = f" by {self.min_delta:g}" if self.min_delta else ""
        return f"the validation loss was {best} and not lower{by} in the next {evaluations}"


class EarlyStopping:
    """Compares validation losses with `run.early_stopping`; without this setting, a run never ends early."""

    def __init__(self, section: EarlyStoppingSection | None, recorded: Iterable[object] = (), step: int | None = None):
        """Start with the evaluations among the journal's entries in ``recorded``, up to ``step`` if it is not None."""
        self._section = section
        self._losses: dict[int, float] = {}
        for one in recorded:
            if isinstance(one, Evaluated) and (step is None or one.step <= step):
                by_corpus = {corpus.name: corpus.loss for corpus in one.corpora} or {HELD_OUT: one.loss}
                self.add(one.step, one.loss, by_corpus)

    def add(self, step: int, loss: float, by_corpus: dict[str, float]) -> None:
        """Add an evaluation, which replaces an earlier one of the same step."""
        if self._section is not None:
            corpus = self._section.corpus
            self._losses[step] = loss if corpus is None else by_corpus.get(corpus, math.nan)

    def stop(self) -> EarlyStop | None:
        """Return where the run ends, or None if it continues."""
        if self._section is None:
            return None
        best_step, best, num_worse = 0, math.inf, 0
        for step, loss in sorted(self._losses.items()):
            if loss < best - self._section.min_delta:
                best_step, best, num_worse = step, loss, 0
            else:
                num_worse += 1
            if num_worse == self._section.patience:
                return EarlyStop(
                    step=step,
                    best_step=best_step,
                    best_loss=best,
                    patience=num_worse,
                    min_delta=self._section.min_delta,
                )
        return None
