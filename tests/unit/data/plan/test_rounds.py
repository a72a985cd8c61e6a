"""Random edits of a run with weighted sources: no target is trained again before every target of its source was.

The oracle uses rows and pieces only: it counts how often each token was a label in the trained steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.segment import EpochInfo, PlanSettings, Segment
from ray_ulysses.errors import UserError
from tests.breadth import examples, is_fast
from tests.unit.data.plan.test_branches import Corpora, begin, branch, corpus

SETTINGS = PlanSettings(seed=3, context_tokens=32, pad_multiple=8, rows_per_step=3)
Target = tuple[int, int]


@dataclass
class Oracle:
    """Counts how often each token was a label, in the run and in the current epoch."""

    lengths: list[int]
    first_documents: list[int]
    counts: list[np.ndarray] = field(default_factory=list)
    """For each document, how often each token was a label in the run."""
    epoch: int = -1
    in_epoch: list[np.ndarray] = field(default_factory=list)
    whole: set[int] = field(default_factory=set)
    """Documents that the epoch takes completely, whatever was trained of them before, and has not begun."""

    def check(self, segment: Segment, trained_rows: int) -> None:
        """Check each epoch of a segment against earlier uses, up to the rows that were trained."""
        for info in segment.epochs:
            if info.first_row < trained_rows:
                self.check_epoch(segment, info)
                self.train(segment, range(info.first_row, min(info.first_row + info.num_rows, trained_rows)))

    def check_epoch(self, segment: Segment, info: EpochInfo) -> None:
        if info.epoch != self.epoch:
            self.epoch = info.epoch
            self.in_epoch = [np.zeros(length, dtype=int) for length in self.lengths]
        self.whole = set()
        planned = targets_of(segment, range(info.first_row, info.first_row + info.num_rows))
        assert len(set(planned)) == len(planned), "an epoch plans a label twice"
        assert not any(self.in_epoch[document][at] for document, at in planned), "an epoch trains a label twice"
        of_document: dict[int, list[int]] = {}
        for document, at in planned:
            of_document.setdefault(document, []).append(at)
        for number, source in enumerate(segment.sources):
            documents = range(self.first_documents[number], self.first_documents[number + 1])
            usable = [document for document in documents if self.lengths[document] > 1]
            if not source.is_used:
                assert not any(document in of_document for document in usable), "a source that is off is planned"
            elif source.weight is None:
                self.check_whole(usable, of_document)
            else:
                self.check_least_used(usable, of_document)

    def check_whole(self, usable: list[int], of_document: dict[int, list[int]]) -> None:
        """Without weights, an epoch takes every document completely, or the rest of a document that it has begun."""
        for document in usable:
            if self.in_epoch[document].any():
                assert sorted(of_document.get(document, [])) == self.rest_of(document)
            else:
                assert sorted(of_document[document]) == list(range(1, self.lengths[document]))
                self.whole.add(document)

    def rest_of(self, document: int) -> list[int]:
        """Return the labels that were used less often than others in the document."""
        counts = self.counts[document][1:]
        return [int(at) + 1 for at in np.flatnonzero(counts < counts.max())]

    def check_least_used(self, usable: list[int], of_document: dict[int, list[int]]) -> None:
        """With weights, an epoch takes the least used documents, and the rest of documents that were begun."""
        most = -1
        for document in usable:
            counts = self.counts[document][1:]
            labels = of_document.get(document, [])
            if rest := self.rest_of(document):
                assert sorted(labels) == rest, "what is left of a document is planned, and that alone"
            elif labels:
                assert len(labels) == counts.size, "a document is taken whole"
                most = max(most, int(counts.max()))
        for document in usable:
            if document not in of_document and not self.in_epoch[document].any():
                assert self.counts[document][1:].min() >= most, "one is used again before this one"

    def train(self, segment: Segment, rows: range) -> None:
        for document, at in targets_of(segment, rows):
            if document in self.whole:
                # The rest of the document from an earlier epoch is trained with it.
                self.counts[document][1:] = self.counts[document].max()
                self.whole.remove(document)
            self.counts[document][at] += 1
            self.in_epoch[document][at] += 1

    def grow(self, corpora: Corpora) -> None:
        self.lengths = [length for one in corpora.lengths for length in one]
        self.first_documents = np.cumsum([0, *(len(one) for one in corpora.lengths)]).tolist()
        for length in self.lengths[len(self.counts) :]:
            self.counts.append(np.zeros(length, dtype=int))
        for length in self.lengths[len(self.in_epoch) :]:
            self.in_epoch.append(np.zeros(length, dtype=int))


def targets_of(segment: Segment, rows: range) -> list[Target]:
    pieces = [piece for row in rows for piece in segment.train.pieces(row)]
    return [(piece.document, piece.start + at + 1) for piece in pieces for at in range(piece.num_labels)]


def random_weights(rng: np.random.Generator, count: int) -> tuple[float | None, ...]:
    """Return weights of several sources, of which some are 0, or all None or 0."""
    is_off = rng.random(count) < 0.3
    is_off[rng.integers(count)] = False
    if rng.random() < 0.25:
        return tuple(0.0 if off else None for off in is_off)
    return tuple(0.0 if off else float(rng.choice([0.3, 1.0, 1.0, 3.0])) for off in is_off)


def run_of_edits(seed: int) -> tuple[Plan, Oracle]:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 4))
    corpora = Corpora(tuple(corpus(rng, int(rng.integers(3, 25))) for _ in range(count)), random_weights(rng, count))
    change = replace(SETTINGS, seed=seed, epochs=int(rng.integers(1, 4)))
    oracle = Oracle([], [])
    oracle.grow(corpora)
    plan = begin(corpora, change)
    for _ in range(int(rng.integers(1, 6))):
        base, last = plan.newest.base_step, plan.num_steps
        step = int(rng.integers(base, last + 1))
        epoch = plan.cursor(step).epoch
        if plan.newest.branch is not None and step == base:
            epoch = plan.newest.branch.epoch
        lengths = corpora.lengths
        if rng.random() < 0.3:
            lengths = (*lengths, (7, *corpus(rng, int(rng.integers(1, 8)))))
        weights = (*corpora.weights, *[0.0] * (len(lengths) - len(corpora.lengths)))
        grown = Corpora(lengths, random_weights(rng, len(lengths)) if rng.random() < 0.7 else weights)
        settings = replace(
            change,
            context_tokens=int(rng.choice([16, 32, 64, 128])),
            rows_per_step=int(rng.integers(1, 6)),
            packing=str(rng.choice(["best_fit", "wide_fit", "concat", "none"])),  # type: ignore[arg-type]
            epochs=epoch + int(rng.integers(1, 4)),
        )
        try:
            longer = branch(plan, step, grown, settings)
        except UserError as error:
            if "left for training" not in str(error) and "no tokens left for epoch" not in str(error):
                raise
            continue
        oracle.check(plan.newest, longer.newest.base_row - plan.newest.base_row)
        plan, corpora, change = longer, grown, settings
        oracle.grow(corpora)
    oracle.check(plan.newest, plan.newest.train.num_rows)
    return plan, oracle


@settings(max_examples=examples(100) if is_fast() else 600, derandomize=is_fast())
@given(seed=st.integers(0, 2**32))
def test_nothing_is_trained_again_before_all_of_its_source_was_used(seed: int) -> None:
    """Weights, contexts, packings and epochs change, and sources are disabled, enabled and added, at any step."""
    run_of_edits(seed)
