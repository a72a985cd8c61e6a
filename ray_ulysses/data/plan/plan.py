"""A run's data plan: the rows that each step trains, for any number of ranks and through every change of the data.

A plan is a list of segments. The first is made when the run begins; a change of its data adds another, which continues
from the step that the run had reached. Steps count from 1 and rows from 0 over all segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.plan.cursor import Cursor
from ray_ulysses.data.plan.drawing import Fragments, Overlong
from ray_ulysses.data.plan.mixture import PlannedSource
from ray_ulysses.data.plan.packing import Packing
from ray_ulysses.data.plan.row_checksums import Checksums
from ray_ulysses.data.plan.rows import Int64Array, Piece, Rows, RowStats
from ray_ulysses.data.plan.steps import MicroBatches, StepTimes, assign_rows, step_times
from ray_ulysses.errors import UserError
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, Number, Whole

PLANNER_VERSION = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """Everything but the corpus that a plan depends on.

    Attributes:
        seed: Determines orders and the evaluation split.
        context_tokens: Longest sequence.
        pad_multiple: Every row's length is a multiple of it, so that every allowed layout can slice it.
        rows_per_step: Rows per global batch, regardless of the world size.
        epochs: Passes over the training documents, each in its own order.
        packing: How rows are filled.
        overlong: What to do with documents that have more targets than a row holds.
        balance_steps: Steps among which rows are exchanged so that rows of similar cost share a step; 1 for none.
        token_cost: Cost of a token outside attention, in squared tokens: a row's cost is the sum of
            ``length * (length + token_cost)``.
        eval_fraction: Share of the documents that is kept out of training.
        eval_rows: Most rows per evaluation.
    """

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    seed: Whole
    context_tokens: Whole
    pad_multiple: Whole
    rows_per_step: Whole
    epochs: Whole = 1
    packing: Packing = "best_fit"
    overlong: Overlong = "split"
    balance_steps: Whole = 1
    token_cost: Whole = 0
    eval_fraction: Number = 0.0
    eval_rows: Whole = 8

    @property
    def capacity(self) -> int:
        """Return the most tokens per row: the context rounded down to the pad multiple."""
        return self.context_tokens // self.pad_multiple * self.pad_multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """The position at which a segment replaces the previous one.

    Attributes:
        plan_id: The segment that is replaced.
        step: Optimizer steps completed.
        row: Rows trained on.
        epoch: Epoch of the next row.
        skipped: Rows ``(first, end)`` of the replaced segment that are left out of its epoch; None for none.
    """

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    plan_id: str
    step: Whole
    row: Whole
    epoch: Whole
    skipped: tuple[Whole, Whole] | None = None

    def content(self) -> dict[str, Any]:
        """Return what the segment's id depends on; rows that are left out came later than other fields."""
        return {name: value for name, value in asdict(self).items() if name != "skipped" or value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochInfo:
    """One epoch of a segment.

    Attributes:
        epoch: Its number in the run, from 0.
        first_row: Its first row in the segment.
        num_rows: Its rows.
    """

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    epoch: Whole
    first_row: Whole
    num_rows: Whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Totals of a segment; rows are those of training, over all its epochs.

    Attributes:
        num_documents: Documents of all sources.
        held_out_documents: Documents kept out of training.
        skipped_documents: Documents of fewer than two tokens, which have nothing to predict.
        split_documents: Documents that were split, counted once per epoch.
        truncated_documents: Documents whose end was left out, counted once per epoch.
        dropped_documents: Documents left out as too long, counted once per epoch.
        lost_tokens: Tokens of truncated and dropped documents that are neither input nor label.
        tokens: Tokens of the rows, without padding.
        supervised: Tokens with a label.
        padding_tokens: Tokens that only fill rows up to the pad multiple.
    """

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    num_documents: Whole
    held_out_documents: Whole
    skipped_documents: Whole
    split_documents: Whole
    truncated_documents: Whole
    dropped_documents: Whole
    lost_tokens: Whole
    tokens: Whole
    supervised: Whole
    padding_tokens: Whole


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """A part of a plan that was made with one set of settings.

    Attributes:
        plan_id: Hash of everything else: planner version, settings, the sources' content, branch, epochs, totals, and
            the checksums of every row.
        settings: The settings that it was made with.
        sources: Its corpora; those of earlier segments keep their order.
        branch: Where it replaces the previous segment; None for the first.
        epochs: Its epochs.
        fragments: Parts of documents that earlier segments left untrained and this one takes up.
        waiting: Those that this one does not take up: the source is not in use, or the document is taken whole.
        totals: Its totals.
        checksums: Of its rows, pieces and fragments.
        train: Rows of training, from 0 in this segment.
        evaluation: Rows of evaluation, none of whose documents is in ``train``.
    """

    plan_id: str
    settings: PlanSettings
    sources: tuple[PlannedSource, ...]
    branch: Branch | None
    epochs: tuple[EpochInfo, ...]
    fragments: Fragments
    waiting: Fragments
    totals: Totals
    checksums: Checksums
    train: Rows
    evaluation: Rows

    @property
    def base_step(self) -> int:
        """Return the steps completed before its first."""
        return self.branch.step if self.branch else 0

    @property
    def base_row(self) -> int:
        """Return the rows trained on before its first."""
        return self.branch.row if self.branch else 0

    @property
    def end_step(self) -> int:
        """Return the steps completed when all its rows are trained."""
        return self.base_step - (-self.train.num_rows // self.settings.rows_per_step)

    @property
    def fill(self) -> float:
        """Return the share of the training rows' capacity that holds tokens of documents."""
        return self.totals.tokens / (self.train.num_rows * self.settings.capacity)

    def is_made_of(self, settings: PlanSettings, sources: Sequence[PlannedSource], branch: Branch | None) -> bool:
        """Return whether these give this segment, regardless of the sources' paths."""
        ours, theirs = ([source.identity for source in one] for one in (self.sources, sources))
        return (self.settings, ours, self.branch) == (settings, theirs, branch)

    def epoch_of(self, row: int) -> int:
        """Return the epoch of a row of the segment (of the last one when none is left)."""
        return next(info.epoch for info in reversed(self.epochs) if row >= info.first_row)

    def costs(self) -> Int64Array:
        """Return the cost of every training row."""
        return self.train.stats(0, self.train.num_rows).cost(self.settings.token_cost)

    def unsupervised_steps(self) -> int:
        """Return the number of steps without any token that has a label."""
        supervised = self.train.stats(0, self.train.num_rows).supervised
        firsts = np.arange(0, supervised.size, self.settings.rows_per_step)
        return int((np.add.reduceat(supervised, firsts, dtype=np.int64) == 0).sum())

    def step_times(self, dp_size: int) -> StepTimes:
        """Predict how balanced the steps are on ``dp_size`` data-parallel groups."""
        return step_times(self.costs(), self.settings.rows_per_step, dp_size)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Every row of a run, and the rows of its evaluation.

    Step ``s`` trains the next ``rows_per_step`` rows of its segment. Epochs are consecutive in the row numbers, so a
    step may hold the end of one epoch and the start of the next. The last step may be short.

    Attributes:
        segments: Its segments; each ends where the next one begins.
    """

    segments: tuple[Segment, ...]

    @property
    def newest(self) -> Segment:
        """Return the segment that the run continues with."""
        return self.segments[-1]

    @property
    def plan_id(self) -> str:
        """Return the newest segment's id."""
        return self.newest.plan_id

    @property
    def settings(self) -> PlanSettings:
        """Return the newest segment's settings."""
        return self.newest.settings

    @property
    def num_rows(self) -> int:
        """Return the training rows of the whole run."""
        return self.newest.base_row + self.newest.train.num_rows

    @property
    def num_steps(self) -> int:
        """Return the steps that train every row once."""
        return self.newest.end_step

    @property
    def evaluation(self) -> Rows:
        """Return the newest segment's rows of evaluation."""
        return self.newest.evaluation

    @property
    def leaves_out_rows(self) -> bool:
        """Return whether it has fewer steps than were planned at first, since rows of bad steps are left out."""
        return any(segment.branch is not None and segment.branch.skipped is not None for segment in self.segments)

    def segment_of_step(self, step: int) -> int:
        """Return the number of the segment that trains step ``step`` (from 1 on)."""
        if not 1 <= step <= self.num_steps:
            raise ValueError(f"step {step} is not in [1, {self.num_steps}] of plan {self.plan_id}")
        return max(number for number, segment in enumerate(self.segments) if segment.base_step < step)

    def segment_of_row(self, row: int) -> int:
        """Return the number of the segment that a row belongs to."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} is not in [0, {self.num_rows}) of plan {self.plan_id}")
        return max(number for number, segment in enumerate(self.segments) if segment.base_row <= row)

    def step_rows(self, step: int) -> range:
        """Return the global rows that step ``step`` (from 1 on) trains."""
        number = self.segment_of_step(step)
        segment = self.segments[number]
        size = segment.settings.rows_per_step
        first = segment.base_row + (step - 1 - segment.base_step) * size
        return range(first, min(first + size, segment.base_row + segment.train.num_rows))

    def stats(self, rows: range) -> RowStats:
        """Return the token counts of rows of one step."""
        segment = self.segments[self.segment_of_row(rows.start)]
        return segment.train.stats(rows.start - segment.base_row, rows.stop - segment.base_row)

    def pieces(self, row: int) -> tuple[Piece, ...]:
        """Return the pieces of a row."""
        segment = self.segments[self.segment_of_row(row)]
        return segment.train.pieces(row - segment.base_row)

    def row_tokens(self, row: int) -> int:
        """Return the padded length of a row."""
        return int(self.stats(range(row, row + 1)).padded_tokens(self.settings.pad_multiple)[0])

    def step_tokens(self, step: int) -> int:
        """Return the supervised tokens of a step: the denominator of its loss."""
        return int(self.stats(self.step_rows(step)).supervised.sum(dtype=np.int64))

    def step_schedule(self, step: int, dp_size: int) -> MicroBatches:
        """Return the row of each micro-batch and data-parallel rank; None is a zero-weight filler."""
        rows = self.step_rows(step)
        token_cost = self.segments[self.segment_of_step(step)].settings.token_cost
        return assign_rows(rows, self.stats(rows).cost(token_cost), dp_size)

    def evaluation_schedule(self, dp_size: int) -> MicroBatches:
        """Return the evaluation row of each micro-batch and data-parallel rank; None is a filler."""
        num_rows = self.evaluation.num_rows
        costs = self.evaluation.stats(0, num_rows).cost(self.settings.token_cost)
        return assign_rows(range(num_rows), costs, dp_size)

    def most_rows_per_step(self, first_step: int) -> int:
        """Return the largest number of rows of any step from ``first_step`` on."""
        first = self.segment_of_step(first_step) if first_step <= self.num_steps else len(self.segments) - 1
        return max(segment.settings.rows_per_step for segment in self.segments[first:])

    def planned_steps(self, step: int) -> int:
        """Return the number of steps that were planned when step ``step`` was trained, which schedules refer to."""
        return self.segments[self.segment_of_step(step)].end_step

    def cursor(self, step: int) -> Cursor:
        """Return the position after ``step`` completed steps, of which there may be none."""
        number = self.segment_of_step(max(step, 1)) if self.num_steps else 0
        return self._cursor_in(number, step)

    def check_cursor(self, cursor: Cursor) -> None:
        """Refuse a cursor that is not a position of this plan.

        Raises:
            UserError: It is of another plan, or its numbers are inconsistent.
        """
        known = {segment.plan_id for segment in self.segments}
        if cursor.plan_id not in known:
            raise UserError(
                f"the checkpoint's data cursor is of plan {cursor.plan_id}, the run's plan is {self.plan_id}; "
                "data, seed and context may not change on resume: start a new run under another run.name, or make "
                "the change a branch of this one with `ray-ulysses train --branch`"
            )
        if not self._is_position(cursor):
            raise UserError(
                f"the data cursor {cursor.to_json()} is no position of plan {self.plan_id}; resume elsewhere"
            )

    def check_corpus(self, fingerprint: str) -> None:
        """Refuse a corpus that is not the one planned with.

        Raises:
            UserError: The corpus was replaced since planning.
        """
        planned = corpus_fingerprint(self.newest.sources)
        if fingerprint != planned:
            raise UserError(
                f"data.path: the corpus was replaced since planning: plan {self.plan_id} was made for corpus "
                f"{planned}, found {fingerprint}; restore the corpus, or start a new run under another run.name"
            )

    def _is_position(self, cursor: Cursor) -> bool:
        if not 0 <= cursor.segment < len(self.segments) or cursor.step < 0:
            return False
        segment = self.segments[cursor.segment]
        last = self.segments[cursor.segment + 1].base_step if segment is not self.newest else self.num_steps
        return segment.base_step <= cursor.step <= last and self._cursor_in(cursor.segment, cursor.step) == cursor

    def _cursor_in(self, number: int, step: int) -> Cursor:
        segment = self.segments[number]
        local = min((step - segment.base_step) * segment.settings.rows_per_step, segment.train.num_rows)
        epoch = segment.epoch_of(min(local, segment.train.num_rows - 1))
        return Cursor(
            segment=number, plan_id=segment.plan_id, epoch=epoch, next_row=segment.base_row + local, step=step
        )


def segment_id(
    settings: PlanSettings,
    sources: Sequence[PlannedSource],
    branch: Branch | None,
    epochs: Sequence[EpochInfo],
    totals: Totals,
    checksums: Checksums,
) -> str:
    """Return the id of a segment with this content."""
    content: dict[str, Any] = {
        "planner": PLANNER_VERSION,
        "settings": asdict(settings),
        "sources": [source.identity for source in sources],
        "branch": None if branch is None else branch.content(),
        "epochs": [asdict(info) for info in epochs],
        "totals": asdict(totals),
        "checksums": asdict(checksums),
    }
    return stable_hash(content)[:16]


def corpus_fingerprint(sources: Sequence[PlannedSource]) -> str:
    """Return the identity of the content of all sources."""
    if len(sources) == 1:
        return sources[0].fingerprint
    return stable_hash([source.fingerprint for source in sources])
