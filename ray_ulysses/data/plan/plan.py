"""A run's data plan: the rows that each step trains, for any number of ranks and through every change of the data.

A plan is a list of segments. The first is made when the run begins; a change of its data adds another, which continues
from the step that the run had reached. Steps count from 1 and rows from 0 over all segments.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.plan.drawing import evaluation_split, mark_held_out
from ray_ulysses.data.plan.rows import Piece, Rows, RowStats
from ray_ulysses.data.plan.segment import PlanSettings, Segment
from ray_ulysses.data.plan.steps import MicroBatches, assign_rows
from ray_ulysses.errors import UserError
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, ContentError, Whole, adapter, checked


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """A run's position in its data, from which a run of any world size can resume."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    segment: Whole
    """Number of the plan's segment."""
    plan_id: str
    epoch: Whole
    """Epoch of the next row (of the last one when none is left)."""
    next_row: Whole
    """First global row that has not been trained on."""
    step: Whole
    """Optimizer steps completed."""

    def to_json(self) -> dict[str, Any]:
        """Return the cursor as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Cursor:
        """Return the cursor that ``to_json`` described.

        Raises:
            UserError: A field is missing, unknown or wrong.
        """
        try:
            return checked(adapter(cls), fields)
        except ContentError as error:
            raise UserError(f"data cursor {fields!r}: {error}; resume from another step") from error


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Every row of a run, and the rows of its evaluation.

    Step ``s`` trains the next ``rows_per_step`` rows of its segment. Epochs are consecutive in the row numbers, so a
    step may hold the end of one epoch and the start of the next. The last step may be short.
    """

    segments: tuple[Segment, ...]
    """Each ends where the next one begins."""
    earlier_ends: tuple[tuple[int, int], ...] = ()
    """In the order of steps, the step after which a branch replaced what was planned until then, and the step at which
    the run was to end before."""

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
        return self.newest.base_row + self.newest.num_rows

    @property
    def num_steps(self) -> int:
        """Return the steps that train every row once."""
        return self.newest.end_step

    @property
    def evaluation(self) -> Rows:
        """Return the newest segment's rows of evaluation."""
        return self.newest.evaluation

    def held_out(self) -> NDArray[np.bool_]:
        """Return for each document whether every segment that knows it keeps it out of training."""
        marks = np.empty(0, dtype=np.bool_)
        for segment in self.segments:
            added = sum(source.num_documents for source in segment.sources) - marks.size
            marks = np.concatenate([marks, np.ones(added, dtype=np.bool_)])
            mark_held_out(marks, *evaluation_split(segment.settings.seed, segment.settings.eval_fraction))
        return marks

    @property
    def leaves_out_rows(self) -> bool:
        """Return whether it has fewer steps than were planned at first, since rows of bad steps are left out."""
        return any(segment.branch is not None and segment.branch.skipped is not None for segment in self.segments)

    def stage_of_step(self, step: int) -> int:
        """Return the number of the stage that trains step ``step``, or of the last one beyond the end."""
        return self.segments[self.segment_of_step(min(step, self.num_steps))].stage_number

    def through_stage(self, number: int) -> Plan:
        """Return the plan up to the end of a stage, which is all that the stage itself needs to know."""
        return Plan(segments=tuple(one for one in self.segments if one.stage_number <= number))

    def stage_start(self, number: int) -> int:
        """Return the optimizer steps before the first of a stage."""
        return next(segment.base_step for segment in self.segments if segment.stage_number == number)

    def at_step(self, step: int) -> Plan:
        """Return the plan up to the stage that a run is in after ``step`` completed steps."""
        return self.through_stage(max(one.stage_number for one in self.segments if one.base_step <= step))

    def sources_after(self, step: int) -> frozenset[str]:
        """Return the fingerprints of the corpora that steps after ``step`` are planned from, or the newest segment."""
        ends = [*(segment.base_step for segment in self.segments[1:]), None]
        return frozenset(
            source.fingerprint
            for segment, end in zip(self.segments, ends, strict=True)
            if end is None or end > step
            for source in segment.sources
            if source.is_used
        )

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

    def stage_end(self, step: int) -> int:
        """Return the end of its stage that was planned when step ``step`` was trained; without stages, of the run."""
        return self.segments[self.segment_of_step(step)].end_step

    def run_end(self, step: int) -> int:
        """Return the end of the run that was planned when step ``step`` was trained."""
        return next((end for last, end in self.earlier_ends if step <= last), self.num_steps)

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
        # The position follows from the step and the number of the segment, if these are of the plan.
        ends = [*(segment.base_step for segment in self.segments[1:]), self.num_steps]
        is_known = cursor.segment < len(ends) and (
            self.segments[cursor.segment].base_step <= cursor.step <= ends[cursor.segment]
        )
        if not is_known or self._cursor_in(cursor.segment, cursor.step) != cursor:
            raise UserError(
                f"the data cursor {cursor.to_json()} is no position of plan {self.plan_id}; resume elsewhere"
            )

    def check_corpus(self, fingerprint: str) -> None:
        """Refuse a corpus that is not the one planned with.

        Raises:
            UserError: The corpus was replaced since planning.
        """
        known = [source.fingerprint for source in self.newest.sources]
        planned = known[0] if len(known) == 1 else stable_hash(known)
        if fingerprint != planned:
            raise UserError(
                f"data.path: the corpus was replaced since planning: plan {self.plan_id} was made for corpus "
                f"{planned}, found {fingerprint}; restore the corpus, or start a new run under another run.name"
            )

    def _cursor_in(self, number: int, step: int) -> Cursor:
        segment = self.segments[number]
        local = min((step - segment.base_step) * segment.settings.rows_per_step, segment.train.num_rows)
        epoch = segment.epoch_of(min(local, segment.train.num_rows - 1))
        return Cursor(
            segment=number, plan_id=segment.plan_id, epoch=epoch, next_row=segment.base_row + local, step=step
        )
