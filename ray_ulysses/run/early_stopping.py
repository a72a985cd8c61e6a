"""Decides from a run's evaluations whether the validation loss has stopped improving."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ray_ulysses.config import Config
from ray_ulysses.config.learning import EarlyStoppingSection
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.segment import HELD_OUT
from ray_ulysses.tracking.events import AttemptStarted, Evaluated
from ray_ulysses.tracking.journal_reader import read_entries


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStop:
    """The evaluation at which a run ends early."""

    step: int
    """Number of completed steps."""
    best_step: int | None
    """Step of the last evaluation whose loss counted as lower; None if there was none."""
    best_loss: float
    """Loss of that evaluation, in nats."""
    patience: int
    min_delta: float

    def __str__(self) -> str:
        evaluations = "evaluation" if self.patience == 1 else f"{self.patience} evaluations"
        if self.best_step is None:
            return f"the validation loss was not finite in {evaluations}"
        best = f"{self.best_loss:.4f} at step {self.best_step:,}"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return f"the validation loss was {best} and not lower{by} in the next {evaluations}"


class EarlyStopping:
    """Compares validation losses with `run.early_stopping`; without this setting, a run never ends early."""

    def __init__(self, section: EarlyStoppingSection | None) -> None:
        self._section = section
        self._losses: dict[int, float] = {}

    def add(self, step: int, loss: float, by_corpus: Mapping[str, float]) -> None:
        """Add an evaluation, which replaces an earlier one of the same step."""
        corpus = None if self._section is None else self._section.corpus
        if corpus is None or corpus in by_corpus:
            self._losses[step] = loss if corpus is None else by_corpus[corpus]

    def recall(self, recorded: Iterable[object], plan: Plan, step: int | None = None) -> EarlyStopping:
        """Add the evaluations among a journal's entries, and return `self`.

        Args:
            recorded: The journal's entries, in order. Evaluations of states that an attempt has discarded don't count.
            plan: The run's plan. Evaluations before the data last changed don't count: they may be of other rows.
            step: Number of completed steps; later evaluations don't count. None counts them all.
        """
        branches = [one.branch for one in plan.segments if one.branch is not None and one.branch.skipped is None]
        begin = branches[-1].step if branches else 0
        for one in recorded:
            if isinstance(one, AttemptStarted):
                self._losses = {at: loss for at, loss in self._losses.items() if at <= one.resumed_step}
            # A run is evaluated before its first step, also after a branch at step 0.
            elif isinstance(one, Evaluated) and (one.step > begin or begin == 0) and (step is None or one.step <= step):
                by_corpus = {corpus.name: corpus.loss for corpus in one.corpora} or {HELD_OUT: one.loss}
                self.add(one.step, one.loss, by_corpus)
        return self

    def stop(self) -> EarlyStop | None:
        """Return where the run ends, or None if it continues."""
        if self._section is None:
            return None
        best_step, best, num_worse = None, math.inf, 0
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


def early_stop(config: Config, plan: Plan) -> EarlyStop | None:
    """Return where a run ends early according to its journal, or None."""
    section = config.run.early_stopping
    return None if section is None else EarlyStopping(section).recall(read_entries(config.run_dir), plan).stop()
