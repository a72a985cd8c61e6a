"""The packing plan: from document lengths and a seed alone, every row of a run before its first step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.cursor import Cursor
from ray_ulysses.data.format import stable_hash
from ray_ulysses.data.mixing import mix, mix_int
from ray_ulysses.data.packing import best_fit, split_documents
from ray_ulysses.data.rows import RowTable, empty_rows
from ray_ulysses.data.steps import MicroSteps, assign_rows, imbalance
from ray_ulysses.errors import UserError

PLANNER_VERSION = 1
_TRAIN_DOCUMENTS, _TRAIN_ROWS, _EVALUATION_DOCUMENTS, _EVALUATION_ROWS = range(4)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """What a plan depends on beside the corpus.

    Attributes:
        seed: Decides orders and the evaluation split.
        context_tokens: Longest sequence.
        pad_multiple: Every row's length is a multiple of it, so that every allowed layout can slice it.
        rows_per_step: Rows of a global batch, whatever the world size.
        epochs: Passes over the training documents, each in an order of its own.
        eval_fraction: Share of the documents that is kept out of training.
        eval_rows: Most rows of an evaluation.
    """

    seed: int
    context_tokens: int
    pad_multiple: int
    rows_per_step: int
    epochs: int = 1
    eval_fraction: float = 0.0
    eval_rows: int = 8

    @property
    def capacity(self) -> int:
        """Return the tokens a row holds at most: the context floored to the pad multiple."""
        return self.context_tokens // self.pad_multiple * self.pad_multiple


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Every row of a run, and the evaluation's rows.

    Steps count from 1: step ``s`` trains the global rows ``[(s - 1) * G, s * G)``; epochs follow one another
    in the row numbers, so a step may hold the end of one epoch and the start of the next. The last step may
    be short.

    Attributes:
        plan_id: Hash of planner version, settings, corpus and the rows themselves.
        settings: What it was made with.
        fingerprint: The corpus it was made for.
        train: Rows of training.
        evaluation: Rows of evaluation, none of whose documents is in ``train``.
        num_documents: Documents of the corpus.
        held_out_documents: Documents kept out of training.
        skipped_documents: Documents of a single token, which have nothing to predict.
    """

    plan_id: str
    settings: PlanSettings
    fingerprint: str
    train: RowTable
    evaluation: RowTable
    num_documents: int
    held_out_documents: int
    skipped_documents: int

    @property
    def num_rows(self) -> int:
        """Return the training rows of all epochs."""
        return self.train.num_rows

    @property
    def num_steps(self) -> int:
        """Return the steps that train every row once."""
        return -(-self.num_rows // self.settings.rows_per_step)

    @property
    def padding_tokens(self) -> int:
        """Return the training tokens that are padding."""
        return self.train.padding_tokens

    @property
    def split_documents(self) -> int:
        """Return how many training documents of the first epoch take more than one piece."""
        first_epoch = np.repeat(self.train.epoch == 0, np.diff(self.train.offsets))
        return int(np.unique(self.train.document[(self.train.start > 0) & first_epoch]).size)

    @property
    def fill(self) -> float:
        """Return the share of the rows' capacity that documents take, in training."""
        return self.train.num_tokens / (self.num_rows * self.settings.capacity)

    def imbalance(self, dp_size: int) -> float:
        """Return the time of training over that with level data-parallel ranks, by attention cost."""
        return imbalance(self.train.cost, self.settings.rows_per_step, dp_size)

    def step_rows(self, step: int) -> range:
        """Return the global rows that step ``step`` (from 1 on) trains."""
        if not 1 <= step <= self.num_steps:
            raise ValueError(f"step {step} is not in [1, {self.num_steps}] of plan {self.plan_id}")
        size = self.settings.rows_per_step
        return range((step - 1) * size, min(step * size, self.num_rows))

    def step_tokens(self, step: int) -> int:
        """Return the supervised tokens of a step: the denominator of its loss."""
        rows = self.step_rows(step)
        return int(self.train.supervised[rows.start : rows.stop].sum())

    def step_schedule(self, step: int, dp_size: int) -> MicroSteps:
        """Return the row of each micro-step and data-parallel rank; None is a zero-weight filler."""
        rows = self.step_rows(step)
        return assign_rows(rows, self.train.cost[rows.start : rows.stop], dp_size)

    def evaluation_schedule(self, dp_size: int) -> MicroSteps:
        """Return the evaluation row of each micro-step and data-parallel rank; None is a filler."""
        return assign_rows(range(self.evaluation.num_rows), self.evaluation.cost, dp_size)

    def cursor(self, step: int) -> Cursor:
        """Return the position after ``step`` completed steps (0: nothing trained yet)."""
        next_row = self.step_rows(step).stop if step else 0
        epoch = int(self.train.epoch[min(next_row, self.num_rows - 1)])
        return Cursor(segment=0, plan_id=self.plan_id, epoch=epoch, next_row=next_row, step=step)

    def check_cursor(self, cursor: Cursor) -> None:
        """Refuse a cursor that is not a position of this plan.

        Raises:
            UserError: It is of another plan, or its numbers do not belong together.
        """
        if cursor.plan_id != self.plan_id:
            raise UserError(
                f"the checkpoint's data cursor is of plan {cursor.plan_id}, the run's plan is "
                f"{self.plan_id}; "
                "data, seed and context may not change on resume: start a new run under another run.name"
            )
        if not 0 <= cursor.step <= self.num_steps or self.cursor(cursor.step) != cursor:
            raise UserError(
                f"the data cursor {cursor.to_json()} is no position of plan {self.plan_id}; resume elsewhere"
            )

    def check_corpus(self, fingerprint: str) -> None:
        """Refuse a corpus that is not the one planned with.

        Raises:
            UserError: The corpus was replaced since planning.
        """
        if fingerprint != self.fingerprint:
            raise UserError(
                f"data.path: the corpus was replaced since planning: plan {self.plan_id} was made for corpus "
                f"{self.fingerprint}, found {fingerprint}; restore the corpus, or start a new run under "
                "another run.name"
            )


def build_plan(lengths: NDArray[np.int64], fingerprint: str, settings: PlanSettings) -> Plan:
    """Plan every row from the documents' lengths.

    Args:
        lengths: int64 [documents], tokens of each document.
        fingerprint: Identity of the corpus.
        settings: Seed, context and the rest.

    Returns:
        The plan; the same arguments give the same plan on every machine and under every NumPy version.

    Raises:
        UserError: The context is shorter than ``pad_multiple``, or a split is left without documents.
    """
    _check(settings)
    documents = np.arange(lengths.size, dtype=np.int64)
    held_out = _held_out(documents, settings)
    usable = lengths >= 2
    train_documents = documents[~held_out & usable]
    held_documents = documents[held_out & usable]
    _refuse_empty_split(train_documents.size, held_documents.size, lengths.size, settings)
    epochs = [
        _pack(train_documents, lengths, settings, epoch, _TRAIN_DOCUMENTS, _TRAIN_ROWS)
        for epoch in range(settings.epochs)
    ]
    train = epochs[0] if len(epochs) == 1 else RowTable.concatenate(epochs, settings.pad_multiple)
    evaluation = empty_rows(settings.pad_multiple)
    if held_documents.size and settings.eval_rows:
        packed = _pack(held_documents, lengths, settings, 0, _EVALUATION_DOCUMENTS, _EVALUATION_ROWS)
        evaluation = _first_rows(packed, settings.eval_rows, settings.pad_multiple)
    return Plan(
        plan_id=plan_id_of(settings, fingerprint, train, evaluation),
        settings=settings,
        fingerprint=fingerprint,
        train=train,
        evaluation=evaluation,
        num_documents=lengths.size,
        held_out_documents=int(held_out.sum()),
        skipped_documents=int((~usable).sum()),
    )


def plan_id_of(settings: PlanSettings, fingerprint: str, train: RowTable, evaluation: RowTable) -> str:
    """Return the id that planner version, settings, corpus and rows give."""
    content: dict[str, Any] = {
        "planner": PLANNER_VERSION,
        "settings": asdict(settings),
        "corpus": fingerprint,
        "train": train.content_digest(),
        "evaluation": evaluation.content_digest(),
    }
    return stable_hash(content)[:16]


def _check(settings: PlanSettings) -> None:
    if settings.capacity < 1:
        raise UserError(
            f"data.context_tokens={settings.context_tokens}: is shorter than "
            f"pad_multiple={settings.pad_multiple}, "
            f"which a row's length must be a multiple of; use at least {settings.pad_multiple}"
        )
    lowest_values = {"data.rows_per_step": 1, "data.epochs": 1, "data.eval_rows": 0, "run.seed": 0}
    for path, lowest in lowest_values.items():
        value = getattr(settings, path.split(".")[1])
        if value < lowest:
            raise UserError(f"{path}={value}: must be at least {lowest}")
    if not 0.0 <= settings.eval_fraction <= 0.5:
        raise UserError(f"data.eval_fraction={settings.eval_fraction}: must be in [0, 0.5]")


def _held_out(documents: NDArray[np.int64], settings: PlanSettings) -> NDArray[np.bool_]:
    """Choose by a hash of the document's number: documents added later move none between the splits."""
    if settings.eval_fraction == 0.0:
        return np.zeros(documents.size, dtype=bool)
    hashes = mix(documents.astype(np.uint64) ^ np.uint64(mix_int(settings.seed)))
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53 < settings.eval_fraction


def _refuse_empty_split(num_train: int, num_held: int, num_documents: int, settings: PlanSettings) -> None:
    if num_train == 0:
        raise UserError(
            f"data.eval_fraction={settings.eval_fraction}: of {num_documents} documents, {num_held} are held "
            "out for "
            "evaluation and none is left to train on; use a smaller share, or a corpus with more documents"
        )
    if settings.eval_fraction > 0 and settings.eval_rows > 0 and num_held == 0:
        raise UserError(
            f"data.eval_fraction={settings.eval_fraction}: holds out none of the {num_documents} documents; "
            "use a larger share, 0 for no evaluation, or a corpus with more documents"
        )


def _permutation(size: int, settings: PlanSettings, epoch: int, stream: int) -> NDArray[np.int64]:
    """Return a seeded order, from raw Philox words: NumPy may change what `permutation` draws."""
    bits = np.random.Philox(key=[settings.seed, epoch << 8 | stream])
    return np.argsort(bits.random_raw(size), kind="stable").astype(np.int64)


def _pack(
    documents: NDArray[np.int64],
    lengths: NDArray[np.int64],
    settings: PlanSettings,
    epoch: int,
    document_stream: int,
    row_stream: int,
) -> RowTable:
    shuffled = documents[_permutation(documents.size, settings, epoch, document_stream)]
    document, start, length, has_next = split_documents(shuffled, lengths[shuffled], settings.capacity)
    rows = best_fit(length, settings.capacity)
    # Rows close in an order that goes with their fill, and pieces of one document lie side by side: shuffle
    # them too.
    num_rows = int(rows.max()) + 1
    place = np.empty(num_rows, dtype=np.int64)
    place[_permutation(num_rows, settings, epoch, row_stream)] = np.arange(num_rows)
    rows = place[rows]
    order = np.argsort(rows, kind="stable")
    return RowTable.build(
        offsets=np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=num_rows))]).astype(np.int64),
        document=document[order],
        start=start[order],
        length=length[order],
        has_next_label=has_next[order],
        epoch=np.full(num_rows, epoch, dtype=np.int32),
        pad_multiple=settings.pad_multiple,
    )


def _first_rows(table: RowTable, num_rows: int, pad_multiple: int) -> RowTable:
    kept = min(num_rows, table.num_rows)
    end = int(table.offsets[kept])
    return RowTable.build(
        offsets=table.offsets[: kept + 1].copy(),
        document=table.document[:end].copy(),
        start=table.start[:end].copy(),
        length=table.length[:end].copy(),
        has_next_label=table.has_next_label[:end].copy(),
        epoch=table.epoch[:kept].copy(),
        pad_multiple=pad_multiple,
    )
