"""A segment of a plan: the rows that were planned with one set of settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.plan.drawing import Fragments, Overlong
from ray_ulysses.data.plan.mixture import PlannedSource
from ray_ulysses.data.plan.packing import Packing
from ray_ulysses.data.plan.row_checksums import Checksums
from ray_ulysses.data.plan.rows import Int64Array, Rows
from ray_ulysses.data.plan.steps import StepTimes, step_times
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, Number, Whole

PLANNER_VERSION = 4
RowOrder = Literal["shuffled", "costliest"]


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
        row_order: Order of the rows of an epoch: shuffled, or a step of the costliest first and the others shuffled.
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
    row_order: RowOrder = "shuffled"

    def content(self) -> dict[str, Any]:
        """Return what is stored; the order of rows came later than the others."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("row_order", "shuffled")}

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

    def nothing_beside(self) -> str:
        """Return what is wrong where the run has no rows left but those that are to be left out."""
        assert self.skipped is not None, "it leaves rows out"
        way = f"finish it there (run.stop_step={self.step}), or " if self.step else ""
        return (
            f"rows {self.skipped[0]} to {self.skipped[1] - 1} can't be left out: the run has no others to train after "
            f"step {self.step}; {way}give it more data.epochs with a branch (train --branch)"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLength:
    """How long a stage of a run is.

    Attributes:
        number: Its number, from 0.
        steps: Its optimizer steps; None where they are not given.
        tokens: Tokens of documents after which it ends, with the step that reaches them; None where they are not given.
    """

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    number: Whole
    steps: Whole | None = None
    tokens: Whole | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStage:
    """The stage that a segment belongs to.

    Attributes:
        length: How long it is.
        end_step: Optimizer steps of the run when it ends.
    """

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    length: StageLength
    end_step: Whole


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
        unlabelled_rows: Rows that were left out since none of their tokens has a label.
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
    unlabelled_rows: Whole
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
        stage: The stage that it belongs to; None in a run without stages.
        epochs: Its epochs.
        fragments: Parts of documents that earlier segments left untrained and this one takes up.
        waiting: Those that this one does not take up: the source is not in use, or the document is taken whole.
        totals: Its totals.
        checksums: Of its rows, pieces and fragments.
        train: Rows of training, from 0 in this segment.
        evaluation: Rows of evaluation, none of whose documents is in ``train``.
        source_tokens: The tokens that each epoch takes of each source; empty if no source has a weight, or if the
            segment was read back.
    """

    plan_id: str
    settings: PlanSettings
    sources: tuple[PlannedSource, ...]
    branch: Branch | None
    stage: PlannedStage | None = None
    epochs: tuple[EpochInfo, ...]
    fragments: Fragments
    waiting: Fragments
    totals: Totals
    checksums: Checksums
    train: Rows
    evaluation: Rows
    source_tokens: tuple[tuple[int, ...], ...] = ()

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
        """Return the steps completed at the end of its stage, or else when all its rows are trained."""
        if self.stage is not None:
            return self.stage.end_step
        return self.base_step - (-self.train.num_rows // self.settings.rows_per_step)

    @property
    def measured(self) -> str:
        """Return the identity of what losses are measured on: its rows of evaluation, or its corpora if it has none.

        It is the same after more epochs, and without skipped rows.
        """
        of_rows = (self.checksums.evaluation_rows, self.checksums.evaluation_pieces)
        used = [source for source in self.sources if source.is_used]
        shares = [source.fingerprint if self.evaluation.num_rows else source.identity for source in used]
        parts = [self.settings.capacity, shares, of_rows if self.evaluation.num_rows else None]
        return stable_hash(parts)

    @property
    def num_rows(self) -> int:
        """Return the rows that its steps train: all, unless its stage ends before."""
        return min(self.train.num_rows, (self.end_step - self.base_step) * self.settings.rows_per_step)

    @property
    def stage_number(self) -> int:
        """Return the number of its stage, 0 in a run without stages."""
        return self.stage.length.number if self.stage else 0

    @property
    def fill(self) -> float:
        """Return the share of the training rows' capacity that holds tokens of documents."""
        return self.totals.tokens / (self.train.num_rows * self.settings.capacity)

    def is_made_of(
        self,
        settings: PlanSettings,
        sources: Sequence[PlannedSource],
        branch: Branch | None,
        length: StageLength | None = None,
    ) -> bool:
        """Return whether these give this segment, regardless of the sources' paths."""
        ours, theirs = ([source.identity for source in one] for one in (self.sources, sources))
        own = self.stage.length if self.stage else None
        return (self.settings, ours, self.branch, own) == (settings, theirs, branch, length)

    def epoch_of(self, row: int) -> int:
        """Return the epoch of a row of the segment (of the last one when none is left)."""
        return next(info.epoch for info in reversed(self.epochs) if row >= info.first_row)

    def costs(self) -> Int64Array:
        """Return the cost of every training row."""
        return self.train.stats(0, self.num_rows).cost(self.settings.token_cost)

    def step_times(self, dp_size: int) -> StepTimes:
        """Predict how balanced the steps are on ``dp_size`` data-parallel groups."""
        return step_times(self.costs(), self.settings.rows_per_step, dp_size)


def segment_id(
    settings: PlanSettings,
    sources: Sequence[PlannedSource],
    branch: Branch | None,
    stage: PlannedStage | None,
    epochs: Sequence[EpochInfo],
    totals: Totals,
    checksums: Checksums,
) -> str:
    """Return the id of a segment with this content."""
    content: dict[str, Any] = {
        "planner": PLANNER_VERSION,
        "settings": settings.content(),
        "sources": [source.identity for source in sources],
        "branch": None if branch is None else branch.content(),
        "epochs": [asdict(info) for info in epochs],
        "totals": asdict(totals),
        "checksums": asdict(checksums),
        # Plans without stages came earlier.
        **({} if stage is None else {"stage": asdict(stage)}),
    }
    return stable_hash(content)[:16]
