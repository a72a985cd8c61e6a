"""A run's data plan: the rows of each training step, for any number of ranks and across data changes.

A plan is a list of segments. The first segment is planned when the run starts. Each change of the data adds a segment,
which continues from the run's current step. Steps are numbered from 1 and rows from 0, consecutively over all segments.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.plan.drawing import evaluation_split, mark_held_out
from ray_ulysses.data.plan.rows import Piece, Rows, RowStats
from ray_ulysses.data.plan.segment import EvaluationSet, PlanSettings, Segment
from ray_ulysses.data.plan.steps import MicroBatches, assign_rows
from ray_ulysses.errors import UserError
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, ContentError, Whole, adapter, checked


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """A run's position in its data, from which the run can resume at any world size."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    segment: Whole
    """Index of the segment in the plan."""
    plan_id: str
    epoch: Whole
    """Epoch of the next row, or the last epoch if no rows are left."""
    next_row: Whole
    """Global number of the first untrained row."""
    step: Whole
    """Number of completed optimizer steps."""

    def to_json(self) -> dict[str, Any]:
        """Return the cursor as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Cursor:
        """Parse the output of ``to_json``.

        Raises:
            UserError: A field is missing, unknown or invalid.
        """
        try:
            return checked(adapter(cls), fields)
        except ContentError as error:
            raise UserError(f"data cursor {fields!r}: {error}; resume from another step") from error


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """All training and evaluation rows of a run.

    Each step trains on the next ``rows_per_step`` rows of its segment. Rows are numbered consecutively across epochs,
    so a step may contain the end of one epoch and the start of the next. The last step may have fewer rows.
    """

    segments: tuple[Segment, ...]
    """Consecutive segments, each of which ends where the next one begins."""
    earlier_ends: tuple[tuple[int, int], ...] = ()
    """For each branch, in order: the step at which the branch begins, and the run's previously planned last step."""

    @property
    def newest(self) -> Segment:
        """Newest segment, with which the run continues."""
        return self.segments[-1]

    @property
    def plan_id(self) -> str:
        """Id of the newest segment."""
        return self.newest.plan_id

    @property
    def settings(self) -> PlanSettings:
        """Settings of the newest segment."""
        return self.newest.settings

    @property
    def num_rows(self) -> int:
        """Number of training rows in the run."""
        return self.newest.base_row + self.newest.num_rows

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps in the run."""
        return self.newest.end_step

    @property
    def evaluation(self) -> Rows:
        """Evaluation rows of the newest segment."""
        return self.newest.evaluation

    @property
    def evaluation_sets(self) -> tuple[EvaluationSet, ...]:
        """Evaluation sets of the newest segment, whose rows are consecutive."""
        return self.newest.evaluation_sets

    def held_out(self) -> NDArray[np.bool_]:
        """Return a mask of documents held out in every segment whose sources include the document; bool [documents]."""
        marks = np.empty(0, dtype=np.bool_)
        for segment in self.segments:
            added = sum(source.num_documents for source in segment.sources) - marks.size
            marks = np.concatenate([marks, np.ones(added, dtype=np.bool_)])
            mark_held_out(marks, *evaluation_split(segment.settings.seed, segment.settings.eval_fraction))
        return marks

    @property
    def leaves_out_rows(self) -> bool:
        """Whether the rows of bad steps are left out, in which case the run has fewer steps than originally planned."""
        return any(segment.branch is not None and segment.branch.skipped is not None for segment in self.segments)

    def stage_of_step(self, step: int) -> int:
        """Return the number of the stage that contains ``step``, or of the last stage if ``step`` is beyond the end."""
        return self.segments[self.segment_of_step(min(step, self.num_steps))].stage_number

    def through_stage(self, number: int) -> Plan:
        """Return the plan up to the end of a stage, without later segments."""
        return Plan(segments=tuple(one for one in self.segments if one.stage_number <= number))

    def stage_start(self, number: int) -> int:
        """Return the number of optimizer steps completed before a stage."""
        return next(segment.base_step for segment in self.segments if segment.stage_number == number)

    def at_step(self, step: int) -> Plan:
        """Return the plan up to the stage that a run has reached after ``step`` completed steps."""
        return self.through_stage(max(one.stage_number for one in self.segments if one.base_step <= step))

    def sources_after(self, step: int) -> frozenset[str]:
        """Return the fingerprints of the corpora used by the newest segment or by any step after ``step``."""
        ends = [*(segment.base_step for segment in self.segments[1:]), None]
        return frozenset(
            source.fingerprint
            for segment, end in zip(self.segments, ends, strict=True)
            if end is None or end > step
            for source in segment.sources
            if source.is_used
        )

    def segment_of_step(self, step: int) -> int:
        """Return the index of the segment that contains ``step``."""
        if not 1 <= step <= self.num_steps:
            raise ValueError(f"step {step} is not in [1, {self.num_steps}] of plan {self.plan_id}")
        return max(number for number, segment in enumerate(self.segments) if segment.base_step < step)

    def segment_of_row(self, row: int) -> int:
        """Return the index of the segment that contains a row."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} is not in [0, {self.num_rows}) of plan {self.plan_id}")
        return max(number for number, segment in enumerate(self.segments) if segment.base_row <= row)

    def step_rows(self, step: int) -> range:
        """Return the global numbers of the rows that ``step`` trains on."""
        number = self.segment_of_step(step)
        segment = self.segments[number]
        size = segment.settings.rows_per_step
        first = segment.base_row + (step - 1 - segment.base_step) * size
        return range(first, min(first + size, segment.base_row + segment.train.num_rows))

    def stats(self, rows: range) -> RowStats:
        """Return the token counts of the given rows, which must belong to one step."""
        segment = self.segments[self.segment_of_row(rows.start)]
        return segment.train.stats(rows.start - segment.base_row, rows.stop - segment.base_row)

    def pieces(self, row: int) -> tuple[Piece, ...]:
        """Return the document pieces in a row."""
        segment = self.segments[self.segment_of_row(row)]
        return segment.train.pieces(row - segment.base_row)

    def epoch_of(self, row: int) -> int:
        """Return the epoch of a row, from 0."""
        segment = self.segments[self.segment_of_row(row)]
        return segment.epoch_of(row - segment.base_row)

    def row_tokens(self, row: int) -> int:
        """Return the length of a row in tokens, including padding."""
        return int(self.stats(range(row, row + 1)).padded_tokens(self.settings.pad_multiple)[0])

    def step_tokens(self, step: int) -> int:
        """Return the number of supervised tokens in a step, which is the denominator of the step's loss."""
        return int(self.stats(self.step_rows(step)).supervised.sum(dtype=np.int64))

    def step_schedule(self, step: int, dp_size: int) -> MicroBatches:
        """Return the row of each micro-batch and data-parallel rank. None stands for a zero-weight filler row."""
        rows = self.step_rows(step)
        token_cost = self.segments[self.segment_of_step(step)].settings.token_cost
        return assign_rows(rows, self.stats(rows).cost(token_cost), dp_size)

    def evaluation_schedule(self, dp_size: int) -> MicroBatches:
        """Return the evaluation row of each micro-batch and data-parallel rank. None stands for a filler row."""
        num_rows = self.evaluation.num_rows
        costs = self.evaluation.stats(0, num_rows).cost(self.settings.token_cost)
        return assign_rows(range(num_rows), costs, dp_size)

    def most_rows_per_step(self, first_step: int) -> int:
        """Return the largest number of rows in any step from ``first_step`` on."""
        first = self.segment_of_step(first_step) if first_step <= self.num_steps else len(self.segments) - 1
        return max(segment.settings.rows_per_step for segment in self.segments[first:])

    def stage_end(self, step: int) -> int:
        """Return the last step of the stage or, without stages, of the run, as planned when ``step`` was trained."""
        return self.segments[self.segment_of_step(step)].end_step

    def run_end(self, step: int) -> int:
        """Return the last step of the run, as planned when ``step`` was trained."""
        return next((end for last, end in self.earlier_ends if step <= last), self.num_steps)

    def cursor(self, step: int) -> Cursor:
        """Return the data position after ``step`` completed steps; 0 is the start of the run."""
        number = self.segment_of_step(max(step, 1)) if self.num_steps else 0
        return self._cursor_in(number, step)

    def check_cursor(self, cursor: Cursor) -> None:
        """Refuse a cursor that is not a position in this plan.

        Raises:
            UserError: The cursor belongs to another plan, or its fields are inconsistent.
        """
        known = {segment.plan_id for segment in self.segments}
        if cursor.plan_id not in known:
            raise UserError(
                f"the checkpoint's data cursor belongs to plan {cursor.plan_id}, but the run's plan is "
                f"{self.plan_id}; data, seed and context can't change on resume: start a new run under another "
                "run.name, or branch this run with `ray-ulysses train --branch`"
            )
        # In this plan, the step and the segment determine all other fields of a cursor.
        ends = [*(segment.base_step for segment in self.segments[1:]), self.num_steps]
        is_known = cursor.segment < len(ends) and (
            self.segments[cursor.segment].base_step <= cursor.step <= ends[cursor.segment]
        )
        if not is_known or self._cursor_in(cursor.segment, cursor.step) != cursor:
            raise UserError(
                f"the data cursor {cursor.to_json()} is not a position in plan {self.plan_id}; resume from another step"
            )

    def check_corpus(self, fingerprint: str) -> None:
        """Raise UserError if the corpus has been replaced since planning."""
        known = [source.fingerprint for source in self.newest.sources]
        planned = known[0] if len(known) == 1 else stable_hash(known)
        if fingerprint != planned:
            raise UserError(
                f"data.path: the corpus has been replaced since the plan was made: plan {self.plan_id} uses corpus "
                f"{planned}, but found {fingerprint}; restore the corpus, or start a new run under another run.name"
            )

    def _cursor_in(self, number: int, step: int) -> Cursor:
        segment = self.segments[number]
        local = min((step - segment.base_step) * segment.settings.rows_per_step, segment.train.num_rows)
        epoch = segment.epoch_of(min(local, segment.train.num_rows - 1))
        return Cursor(
            segment=number, plan_id=segment.plan_id, epoch=epoch, next_row=segment.base_row + local, step=step
        )
