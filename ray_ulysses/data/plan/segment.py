"""A segment of a plan: the rows planned with one set of settings."""

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
    """Everything that a plan depends on, except the corpora."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    seed: Whole
    """Determines the order of documents and rows, and the evaluation split."""
    context_tokens: Whole
    """Longest sequence."""
    pad_multiple: Whole
    """Every row's length is a multiple of this, so that every allowed layout can slice it."""
    rows_per_step: Whole
    """Rows per global batch, regardless of the world size."""
    epochs: Whole = 1
    """Passes over the training documents, each in its own order."""
    packing: Packing = "best_fit"
    overlong: Overlong = "split"
    """What to do with documents that have more targets than a row holds."""
    balance_steps: Whole = 1
    """Number of steps that exchange rows, so that rows of similar cost share a step; 1 for no exchange."""
    token_cost: Whole = 0
    """Cost of a token outside attention in squared tokens; a row costs ``sum(length * (length + token_cost))``."""
    eval_fraction: Number = 0.0
    """Fraction of the documents that is held out of training."""
    eval_rows: Whole = 8
    """Maximum rows per evaluation."""
    row_order: RowOrder = "shuffled"
    """Order of an epoch's rows: shuffled, or shuffled after a first step of the most expensive rows."""

    @property
    def capacity(self) -> int:
        """Return the maximum tokens per row: the context rounded down to the pad multiple."""
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
    """The length of a stage of a run."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    number: Whole
    """Number of the stage, from 0."""
    steps: Whole | None = None
    """Optimizer steps, if given."""
    tokens: Whole | None = None
    """Document tokens, if given; the stage ends with the step that reaches them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStage:
    """The stage that a segment belongs to."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    length: StageLength
    end_step: Whole
    """Optimizer steps of the run completed when the stage ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochInfo:
    """One epoch of a segment."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    epoch: Whole
    """Number in the run, from 0."""
    first_row: Whole
    """First row in the segment."""
    num_rows: Whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Totals of a segment over the training rows of all its epochs.

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
    """Rows that were left out because none of their tokens has a label."""
    tokens: Whole
    """Tokens of the rows, without padding."""
    supervised: Whole
    """Tokens with a label."""
    padding_tokens: Whole
    """Tokens that pad rows to the pad multiple."""


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
    """Of all fragments, including waiting ones."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """A part of a plan, made with one set of settings."""

    plan_id: str = field(init=False)
    """Hash of planner version, settings, the sources' content, branch, stage, epochs, totals, and all checksums."""
    settings: PlanSettings
    sources: tuple[PlannedSource, ...]
    """Its corpora; those of earlier segments come first, in their order."""
    branch: Branch | None
    """Where it replaces the previous segment; None for the first."""
    stage: PlannedStage | None = None
    """None in a run without stages."""
    epochs: tuple[EpochInfo, ...]
    fragments: Fragments
    """Parts of documents that earlier segments left untrained and this one takes up."""
    waiting: Fragments
    """Parts that this one does not take up: the source is not used, or the document is taken whole."""
    totals: Totals
    checksums: Checksums
    train: Rows
    """Training rows, numbered from 0 in this segment."""
    evaluation: Rows
    """Evaluation rows, none of whose documents is in ``train``."""
    source_tokens: tuple[tuple[int, ...], ...] = ()
    """Tokens that each epoch takes from each source; empty without weights, or if the segment was read from disk."""

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
        # Rarely used fields are hashed only if they are used, so that they do not change the ids of other plans.
        if self.settings.row_order == "shuffled":
            del content["settings"]["row_order"]
        if self.branch is not None and self.branch.skipped is None:
            del content["branch"]["skipped"]
        if self.stage is not None:
            content["stage"] = asdict(self.stage)
        object.__setattr__(self, "plan_id", stable_hash(content)[:16])

    @property
    def base_step(self) -> int:
        """Return the number of steps completed before its first."""
        return self.branch.step if self.branch else 0

    @property
    def base_row(self) -> int:
        """Return the number of rows trained on before its first."""
        return self.branch.row if self.branch else 0

    @property
    def end_step(self) -> int:
        """Return the number of steps completed at the end of its stage or, without stages, after all its rows."""
        if self.stage is not None:
            return self.stage.end_step
        return self.base_step - (-self.train.num_rows // self.settings.rows_per_step)

    @property
    def measured(self) -> str:
        """Return the identity of the data of loss measurements: its evaluation rows, or its corpora if it has none.

        More epochs and skipped rows do not change it.
        """
        of_rows = (self.checksums.evaluation_rows, self.checksums.evaluation_pieces)
        used = [source for source in self.sources if source.is_used]
        shares = [source.fingerprint if self.evaluation.num_rows else source.identity for source in used]
        parts = [self.settings.capacity, shares, of_rows if self.evaluation.num_rows else None]
        return stable_hash(parts)

    @property
    def num_rows(self) -> int:
        """Return the number of rows that its steps train: all, unless its stage ends earlier."""
        return min(self.train.num_rows, (self.end_step - self.base_step) * self.settings.rows_per_step)

    @property
    def stage_number(self) -> int:
        """Return the number of its stage, 0 in a run without stages."""
        return self.stage.length.number if self.stage else 0

    @property
    def fill(self) -> float:
        """Return the fraction of the training rows' capacity that document tokens fill."""
        return self.totals.tokens / (self.train.num_rows * self.settings.capacity)

    def is_made_of(
        self,
        settings: PlanSettings,
        sources: Sequence[PlannedSource],
        branch: Branch | None,
        length: StageLength | None = None,
    ) -> bool:
        """Return whether the segment was made from these inputs, regardless of the sources' paths."""
        ours, theirs = ([source.identity for source in one] for one in (self.sources, sources))
        own = self.stage.length if self.stage else None
        return (self.settings, ours, self.branch, own) == (settings, theirs, branch, length)

    def epoch_of(self, row: int) -> int:
        """Return the epoch of a row of the segment; the last epoch for a row beyond the end."""
        return next(info.epoch for info in reversed(self.epochs) if row >= info.first_row)

    def costs(self) -> Int64Array:
        """Return the cost of every training row in squared tokens; int64 [rows]."""
        return self.train.stats(0, self.num_rows).cost(self.settings.token_cost)

    def step_times(self, dp_size: int) -> StepTimes:
        """Predict the balance of the steps on ``dp_size`` data-parallel ranks."""
        return step_times(self.costs(), self.settings.rows_per_step, dp_size)
