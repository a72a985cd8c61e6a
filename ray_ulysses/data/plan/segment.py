"""A segment of a plan: consecutive rows planned with one set of settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.plan.corpus_set import PlannedSource, first_documents
from ray_ulysses.data.plan.rows import Fragments, Int64Array, Rows
from ray_ulysses.data.plan.steps import StepTimes, step_times
from ray_ulysses.validation import KNOWN_FIELDS_ONLY, Number, Whole

PLANNER_VERSION = 5
HELD_OUT = "held_out"
"""Name of the evaluation set of held-out documents."""
Packing = Literal["best_fit", "wide_fit", "concat", "none"]
Overlong = Literal["split", "truncate", "drop", "error", "drop_whole"]
"""Values of ``data.overlong``, and ``drop_whole`` for an objective that reads every token of a document: like ``drop``,
but a document that is longer than a row by one token, which would only be a label, is left out as well."""
RowOrder = Literal["shuffled", "costliest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """All inputs of a plan except the corpora."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    seed: Whole
    """Seed of the document order, the row order, and the evaluation split."""
    context_tokens: Whole
    """Maximum sequence length."""
    pad_multiple: Whole
    """Divisor of every row's length, chosen so that every allowed layout can slice the row."""
    rows_per_step: Whole
    """Rows per optimizer step, at any world size."""
    epochs: Whole = 1
    """Passes over the training documents, each in a different order."""
    packing: Packing = "best_fit"
    overlong: Overlong = "split"
    """Treatment of documents that have more targets than fit into a row."""
    balance_steps: Whole = 1
    """Number of consecutive steps that exchange rows to balance their costs; 1 disables the exchange."""
    token_cost: Whole = 0
    """Cost of a token outside attention, in squared tokens. A row costs ``sum(length * (length + token_cost))``."""
    eval_fraction: Number = 0.0
    """Fraction of the documents held out for evaluation."""
    eval_rows: Whole = 8
    """Maximum number of rows per evaluation."""
    row_order: RowOrder = "shuffled"
    """Row order in an epoch. ``costliest`` puts the most expensive rows into the first step and shuffles the others."""

    @property
    def capacity(self) -> int:
        """Maximum tokens per row: ``context_tokens`` rounded down to ``pad_multiple``."""
        return self.context_tokens // self.pad_multiple * self.pad_multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """Position at which a segment replaces the previous segment."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    plan_id: str
    """Plan id of the replaced segment."""
    step: Whole
    """Number of optimizer steps completed before the branch."""
    row: Whole
    """Number of rows trained before the branch."""
    epoch: Whole
    """Epoch of the next row."""
    skipped: tuple[Whole, Whole] | None = None
    """Rows ``[first, end)`` of the replaced segment that the branch leaves out of the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLength:
    """Length of a stage."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    number: Whole
    """Index of the stage, from 0."""
    steps: Whole | None = None
    """Length in optimizer steps, if set."""
    tokens: Whole | None = None
    """Length in document tokens, if set. The stage ends with the step that reaches this number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStage:
    """The stage to which a segment belongs."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    length: StageLength
    end_step: Whole
    """Number of optimizer steps that the run has completed at the end of the stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochInfo:
    """Rows of one epoch in a segment."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    epoch: Whole
    """Index of the epoch in the run, from 0."""
    first_row: Whole
    """Index of the epoch's first row in the segment."""
    num_rows: Whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Totals of a segment over the training rows of all epochs.

    Documents that were split, truncated or dropped because of their length are counted once per epoch.
    """

    __pydantic_config__ = KNOWN_FIELDS_ONLY

    num_documents: Whole
    held_out_documents: Whole
    skipped_documents: Whole
    """Number of documents with fewer than two tokens, which have no target."""
    split_documents: Whole
    truncated_documents: Whole
    dropped_documents: Whole
    lost_tokens: Whole
    """Number of tokens of truncated and dropped documents that are used neither as input nor as label."""
    unlabelled_rows: Whole
    """Number of rows left out because none of their tokens has a label."""
    tokens: Whole
    """Number of tokens in training rows, without padding."""
    supervised: Whole
    """Number of tokens with a label."""
    padding_tokens: Whole
    """Number of padding tokens in training rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checksums:
    """Checksums of a segment's files: eight hexadecimal digits per group of entries."""

    rows: str
    """Checksums of the training rows' token counts."""
    pieces: str
    """Checksums of the training rows' pieces."""
    evaluation_rows: str
    evaluation_pieces: str
    fragments: str
    """Checksums of all fragments, including waiting ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSet:
    """Evaluation rows with a loss of their own."""

    name: str
    """Name in metrics: `HELD_OUT`, or the last part of the corpus's path, with more parts where it is not unique."""
    path: str | None
    """Path of the validation corpus at planning time; None for held-out documents."""
    rows: range
    """Evaluation rows of the segment."""


def distinct_names(paths: Sequence[str]) -> list[str]:
    """Return a distinct name for each path, of its last parts, in characters that all trackers accept."""
    parts = [re.sub(r"[^\w./-]", "_", path.strip("/")).split("/") for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len({*names, HELD_OUT}) > len(names):
            return names
    return [f"corpus-{number}" for number in range(len(paths))]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """A part of a plan, planned with one set of settings."""

    plan_id: str = field(init=False)
    """Hash of the planner version, settings, source contents, branch, stage, epochs, totals, and all checksums."""
    settings: PlanSettings
    sources: tuple[PlannedSource, ...]
    """Corpora of the segment. The corpora of earlier segments come first, in the same order."""
    branch: Branch | None
    """Position at which the segment replaces the previous one; None for the first segment."""
    stage: PlannedStage | None = None
    """Stage of the segment; None in a run without stages."""
    epochs: tuple[EpochInfo, ...]
    fragments: Fragments
    """Document parts that earlier segments left untrained and that this segment trains on."""
    waiting: Fragments
    """Untrained parts that this segment skips: the source is unused, or the complete document is drawn instead."""
    totals: Totals
    checksums: Checksums
    train: Rows
    """Training rows, numbered from 0 within the segment."""
    evaluation: Rows
    """Evaluation rows: of held-out documents, then of each validation corpus. They never occur in ``train``."""
    validation: tuple[PlannedSource, ...] = ()
    """Validation corpora, whose documents are numbered after those of ``sources``."""
    source_tokens: tuple[tuple[int, ...], ...] = ()
    """Number of tokens from each source, per epoch. Empty without weights, or if the segment was read from disk."""

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
        # Rarely used fields are hashed only if they are set, so that adding them did not change existing plan ids.
        if self.settings.row_order == "shuffled":
            del content["settings"]["row_order"]
        if self.branch is not None and self.branch.skipped is None:
            del content["branch"]["skipped"]
        if self.stage is not None:
            content["stage"] = asdict(self.stage)
        if self.validation:
            content["validation"] = [source.identity for source in self.validation]
        object.__setattr__(self, "plan_id", stable_hash(content)[:16])

    @property
    def base_step(self) -> int:
        """Number of steps completed before the segment."""
        return self.branch.step if self.branch else 0

    @property
    def base_row(self) -> int:
        """Number of rows trained before the segment."""
        return self.branch.row if self.branch else 0

    @property
    def end_step(self) -> int:
        """Number of steps completed at the end of the segment's stage or, without stages, after the segment's rows."""
        if self.stage is not None:
            return self.stage.end_step
        return self.base_step - (-self.train.num_rows // self.settings.rows_per_step)

    @property
    def measured(self) -> str:
        """Hash of the data on which losses are measured: the evaluation rows or, without evaluation, the corpora.

        Adding epochs or skipping rows does not change the hash.
        """
        of_rows = (self.checksums.evaluation_rows, self.checksums.evaluation_pieces)
        used = [source for source in (*self.sources, *self.validation) if source.is_used]
        shares = [source.fingerprint if self.evaluation.num_rows else source.identity for source in used]
        parts = [self.settings.capacity, shares, of_rows if self.evaluation.num_rows else None]
        return stable_hash(parts)

    @property
    def evaluation_sets(self) -> tuple[EvaluationSet, ...]:
        """Held-out documents, if any, and the validation corpora, with their evaluation rows."""
        first_pieces = self.evaluation.stats(0, self.evaluation.num_rows).first_piece
        documents = self.evaluation.closed_pieces().document[first_pieces]
        places = first_documents((*self.sources, *self.validation))[len(self.sources) :]
        held_out, *ends = (documents < places[:, None]).sum(axis=1).tolist()
        sets = [EvaluationSet(name=HELD_OUT, path=None, rows=range(held_out))] if held_out else []
        names = distinct_names([source.path for source in self.validation])
        for name, source, first, end in zip(names, self.validation, [held_out, *ends], ends, strict=False):
            sets.append(EvaluationSet(name=name, path=source.path, rows=range(first, end)))
        return tuple(sets)

    @property
    def num_rows(self) -> int:
        """Number of rows trained by the segment's steps. Rows after the end of the stage are excluded."""
        return min(self.train.num_rows, (self.end_step - self.base_step) * self.settings.rows_per_step)

    @property
    def stage_number(self) -> int:
        """Index of the segment's stage; 0 in a run without stages."""
        return self.stage.length.number if self.stage else 0

    @property
    def fill(self) -> float:
        """Fraction of the training rows' capacity that is filled with document tokens."""
        return self.totals.tokens / (self.train.num_rows * self.settings.capacity)

    def is_made_of(
        self,
        settings: PlanSettings,
        sources: Sequence[PlannedSource],
        branch: Branch | None,
        length: StageLength | None = None,
        validation: Sequence[PlannedSource] = (),
    ) -> bool:
        """Return whether the segment was planned from the given inputs. The sources' paths may differ."""
        groups = (self.sources, sources, self.validation, validation)
        ours, theirs, own_validation, other_validation = ([source.identity for source in one] for one in groups)
        own = self.stage.length if self.stage else None
        made_of = (self.settings, ours, self.branch, own, own_validation)
        return made_of == (settings, theirs, branch, length, other_validation)

    def epoch_of(self, row: int) -> int:
        """Return the epoch of a row in the segment, or the last epoch if the row is beyond the end."""
        return next(info.epoch for info in reversed(self.epochs) if row >= info.first_row)

    def costs(self) -> Int64Array:
        """Return the cost of each training row in squared tokens; int64 [rows]."""
        return self.train.stats(0, self.num_rows).cost(self.settings.token_cost)

    def step_times(self, dp_size: int) -> StepTimes:
        """Predict how well the steps are balanced over ``dp_size`` data-parallel ranks."""
        return step_times(self.costs(), self.settings.rows_per_step, dp_size)
