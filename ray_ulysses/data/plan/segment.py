"""A segment of a plan: the rows that were planned with one set of settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.plan.corpus_set import PlannedSource
from ray_ulysses.data.plan.rows import Fragments, Int64Array, Rows
from ray_ulysses.data.plan.steps import StepTimes, step_times
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, Number, Whole

PLANNER_VERSION = 4
Packing = Literal["best_fit", "wide_fit", "concat", "none"]
Overlong = Literal["split", "truncate", "drop", "error"]
RowOrder = Literal["shuffled", "costliest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """Everything but the corpus that a plan depends on."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    seed: Whole
    """Determines orders and the evaluation split."""
    context_tokens: Whole
    """Longest sequence."""
    pad_multiple: Whole
    """Every row's length is a multiple of it, so that every allowed layout can slice it."""
    rows_per_step: Whole
    """Rows per global batch, regardless of the world size."""
    epochs: Whole = 1
    """Passes over the training documents, each in its own order."""
    packing: Packing = "best_fit"
    overlong: Overlong = "split"
    """What to do with documents that have more targets than a row holds."""
    balance_steps: Whole = 1
    """Steps among which rows are exchanged so that rows of similar cost share a step; 1 for none."""
    token_cost: Whole = 0
    """Cost of a token outside attention, in squared tokens: a row's: the sum of ``length * (length + token_cost)``."""
    eval_fraction: Number = 0.0
    """Share of the documents that is kept out of training."""
    eval_rows: Whole = 8
    """Most rows per evaluation."""
    row_order: RowOrder = "shuffled"
    """Order of the rows of an epoch: shuffled, or a step of the costliest first and the others shuffled."""

    @property
    def capacity(self) -> int:
        """Return the most tokens per row: the context rounded down to the pad multiple."""
        return self.context_tokens // self.pad_multiple * self.pad_multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """The position at which a segment replaces the previous one."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    plan_id: str
    """The segment that is replaced."""
    step: Whole
    """Optimizer steps completed."""
    row: Whole
    """Rows trained on."""
    epoch: Whole
    """Epoch of the next row."""
    skipped: tuple[Whole, Whole] | None = None
    """Rows ``(first, end)`` of the replaced segment that are left out of its epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLength:
    """How long a stage of a run is."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    number: Whole
    """Its number, from 0."""
    steps: Whole | None = None
    """Its optimizer steps, if they are given."""
    tokens: Whole | None = None
    """Tokens of documents after which it ends, with the step that reaches them, if they are given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStage:
    """The stage that a segment belongs to."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    length: StageLength
    end_step: Whole
    """Optimizer steps of the run when it ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochInfo:
    """One epoch of a segment."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    epoch: Whole
    """Its number in the run, from 0."""
    first_row: Whole
    """Its first row in the segment."""
    num_rows: Whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Totals of a segment; rows are those of training, over all its epochs.

    Documents that were split, truncated or dropped as too long are counted once per epoch.
    """

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    num_documents: Whole
    held_out_documents: Whole
    skipped_documents: Whole
    """Documents of fewer than two tokens, which have nothing to predict."""
    split_documents: Whole
    truncated_documents: Whole
    dropped_documents: Whole
    lost_tokens: Whole
    """Tokens of truncated and dropped documents that are neither input nor label."""
    unlabelled_rows: Whole
    """Rows that were left out since none of their tokens has a label."""
    tokens: Whole
    """Tokens of the rows, without padding."""
    supervised: Whole
    """Tokens with a label."""
    padding_tokens: Whole
    """Tokens that only fill rows up to the pad multiple."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checksums:
    """Checksums of a segment's files, eight hexadecimal digits per group of entries."""

    rows: str
    """Of the training rows' token counts."""
    pieces: str
    """Of their pieces."""
    evaluation_rows: str
    evaluation_pieces: str
    fragments: str
    """Of the fragments, including those that wait."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """A part of a plan that was made with one set of settings."""

    plan_id: str = field(init=False)
    """Hash of planner version, settings, the sources' content, branch, stage, epochs, totals, and all checksums."""
    settings: PlanSettings
    sources: tuple[PlannedSource, ...]
    """Its corpora; those of earlier segments keep their order."""
    branch: Branch | None
    """Where it replaces the previous segment; None for the first."""
    stage: PlannedStage | None = None
    """The stage that it belongs to; None in a run without stages."""
    epochs: tuple[EpochInfo, ...]
    fragments: Fragments
    """Parts of documents that earlier segments left untrained and this one takes up."""
    waiting: Fragments
    """Those that this one does not take up: the source is not in use, or the document is taken whole."""
    totals: Totals
    checksums: Checksums
    train: Rows
    """Rows of training, from 0 in this segment."""
    evaluation: Rows
    """Rows of evaluation, none of whose documents is in ``train``."""
    source_tokens: tuple[tuple[int, ...], ...] = ()
    """The tokens that each epoch takes of each source; empty if no source has a weight, or if the segment was read
    back."""

    def __post_init__(self) -> None:
        content: dict[str, Any] = {
            "planner": PLANNER_VERSION,
            "settings": asdict(self.settings),
            "sources": [source.identity for source in self.sources],
            "branch": self.branch and asdict(self.branch),
            "epochs": [asdict(info) for info in self.epochs],
            "totals": asdict(self.totals),
            "checksums": asdict(self.checksums),
        }
        # Fields that most plans have no use for are named only where they are used.
        if self.settings.row_order == "shuffled":
            del content["settings"]["row_order"]
        if self.branch is not None and self.branch.skipped is None:
            del content["branch"]["skipped"]
        if self.stage is not None:
            content["stage"] = asdict(self.stage)
        object.__setattr__(self, "plan_id", stable_hash(content)[:16])

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
