"""Changes of a run's data: no target is trained twice in an epoch, and none is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan, write_segment
from ray_ulysses.data.plan.segment import EpochInfo, PlanSettings, Segment
from ray_ulysses.data.plan.stages import remainder_after
from ray_ulysses.data.tokenize.spans import LabelSpans
from ray_ulysses.errors import UserError
from tests.breadth import examples, is_fast
from tests.unit.data.plans import segment_in_memory

Target = tuple[int, int]
SETTINGS = PlanSettings(seed=3, context_tokens=32, pad_multiple=8, rows_per_step=3)


@dataclass(frozen=True)
class Corpora:
    lengths: tuple[tuple[int, ...], ...]
    weights: tuple[float | None, ...]

    @property
    def documents(self) -> PlanInput:
        sources = tuple(
            PlannedSource(path=f"c{number}", fingerprint=f"f{number}", num_documents=len(lengths), weight=weight)
            for number, (lengths, weight) in enumerate(zip(self.lengths, self.weights, strict=True))
        )
        return PlanInput(sources=sources, lengths=np.concatenate([np.asarray(one) for one in self.lengths]))


def begin(corpora: Corpora, change: PlanSettings = SETTINGS) -> Plan:
    return Plan(segments=(segment_in_memory(corpora.documents, change),))


def branch(plan: Plan, step: int, corpora: Corpora, change: PlanSettings, skipped: range | None = None) -> Plan:
    documents = corpora.documents
    remainder = remainder_after(plan, step, documents.sources, change, skipped)
    return Plan(segments=(*plan.segments, segment_in_memory(documents, change, remainder)))


def labels_of(plan: Plan, rows: range) -> Counter[Target]:
    pieces = [piece for row in rows for piece in plan.pieces(row)]
    return Counter((piece.document, piece.start + at + 1) for piece in pieces for at in range(piece.num_labels))


def targets_trained(plan: Plan) -> Counter[Target]:
    """Count how often each (document, token) is a label in the steps of a plan."""
    return sum((labels_of(plan, plan.step_rows(step)) for step in range(1, plan.num_steps + 1)), Counter())


def all_targets(corpora: Corpora, times: int = 1) -> Counter[Target]:
    lengths = [length for one in corpora.lengths for length in one]
    return Counter({(document, at): times for document, size in enumerate(lengths) for at in range(1, size)})


def corpus(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(int(length) for length in rng.integers(1, 150, count))


def changes_of(change: PlanSettings) -> st.SearchStrategy[PlanSettings]:

    return st.builds(
        partial(replace, change),
        context_tokens=st.sampled_from([16, 32, 64, 128]),
        rows_per_step=st.integers(1, 5),
        packing=st.sampled_from(["best_fit", "wide_fit", "concat", "none"]),
    )


@settings(max_examples=examples(60))
@given(data=st.data(), seed=st.integers(0, 2**32), epochs=st.integers(1, 2), num_branches=st.integers(1, 3))
def test_every_target_is_trained_once_an_epoch_through_any_branches(
    data: st.DataObject, seed: int, epochs: int, num_branches: int
) -> None:
    """Settings change and corpora are added at any committed step."""
    rng = np.random.default_rng(seed)
    corpora = Corpora((corpus(rng, 12),), (None,))
    change = replace(SETTINGS, seed=seed, epochs=epochs)
    plan = begin(corpora, change)
    joined_in: dict[int, int] = {}
    for number in range(num_branches):
        step = data.draw(st.integers(plan.newest.base_step, plan.num_steps))
        change = data.draw(changes_of(change))
        if plan.cursor(step).next_row == plan.num_rows or data.draw(st.booleans()):
            corpora = Corpora((*corpora.lengths, (7, *corpus(rng, 4))), (*corpora.weights, None))
            joined_in[number] = plan.cursor(step).epoch
        plan = branch(plan, step, corpora, change)
    trained = targets_trained(plan)
    assert set(trained) == set(all_targets(corpora))
    first = len(corpora.lengths) - len(joined_in)
    bases = np.cumsum([0, *(len(one) for one in corpora.lengths)])
    for target, count in trained.items():
        source = int(np.searchsorted(bases, target[0], side="right")) - 1
        since = 0 if source < first else list(joined_in.values())[source - first]
        assert count == epochs - since, "once in each epoch from the one in which its source joined"


@settings(max_examples=examples(60))
@given(data=st.data(), seed=st.integers(0, 2**32), epochs=st.integers(1, 2), num_branches=st.integers(1, 3))
def test_every_label_is_trained_once_an_epoch_through_any_branches_that_leave_out_rows_without_one(
    data: st.DataObject, seed: int, epochs: int, num_branches: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.asarray(corpus(rng, 20))
    # Nothing predicts the first token, so a span of it alone is a document without a label.
    starts = np.where(rng.random(20) < 0.6, 0, rng.integers(0, 150, 20) % lengths)
    stops = np.where(starts > 0, np.minimum(lengths, starts + rng.integers(1, 60, 20)), 1)
    labels = Counter({(n, at): epochs for n in range(20) for at in range(max(1, starts[n]), stops[n])})
    assume(labels)
    spans = LabelSpans(offsets=np.arange(21), starts=starts, stops=stops)
    documents = replace(Corpora((tuple(lengths.tolist()),), (None,)).documents, spans=spans)
    change = replace(SETTINGS, seed=seed, epochs=epochs)
    plan = Plan(segments=(segment_in_memory(documents, change),))
    for _ in range(num_branches):
        change = data.draw(changes_of(change))
        step = data.draw(st.integers(plan.newest.base_step, max(plan.newest.base_step, plan.num_steps - 1)))
        remainder = remainder_after(plan, step, documents.sources, change)
        plan = Plan(segments=(*plan.segments, segment_in_memory(documents, change, remainder)))
    assert all(plan.step_tokens(step) > 0 for step in range(1, plan.num_steps + 1))
    trained = targets_trained(plan)
    assert Counter({target: count for target, count in trained.items() if target in labels}) == labels


def test_a_step_with_rows_of_two_epochs_can_not_be_left_out() -> None:
    corpora, change = Corpora((corpus(np.random.default_rng(0), 20),), (None,)), replace(SETTINGS, epochs=2)
    plan = begin(corpora, change)
    last, is_inside = divmod(plan.newest.epochs[1].first_row, 3)
    rows = plan.step_rows(last + 1)
    assert is_inside
    said = rf"rows {rows[0]} to {rows[-1]} can't be left out: they span two epochs, .* data\.rows_per_step"
    with pytest.raises(UserError, match=said):
        branch(plan, last, corpora, change, rows)


def test_the_last_step_of_a_run_can_not_be_left_out_and_the_run_may_end_before_it() -> None:
    corpora = Corpora((corpus(np.random.default_rng(0), 20),), (None,))
    plan = begin(corpora)
    rows, step = plan.step_rows(plan.num_steps), plan.num_steps - 1
    with pytest.raises(UserError, match=rf"rows {rows[0]} to {rows[-1]} can't be left out.*run\.stop_step={step}"):
        branch(plan, step, corpora, SETTINGS, rows)
    whole = replace(SETTINGS, rows_per_step=1000)
    with pytest.raises(UserError, match=r"no other rows are left to train on after step 0; branch the run"):
        branch(begin(corpora, whole), 0, corpora, whole, range(begin(corpora, whole).num_rows))


@settings(max_examples=examples(60))
@given(data=st.data(), seed=st.integers(0, 2**32), epochs=st.integers(1, 2), num_skips=st.integers(1, 3))
def test_rows_that_are_left_out_are_trained_in_no_later_segment_of_their_epoch_and_nothing_else_is_lost(
    data: st.DataObject, seed: int, epochs: int, num_skips: int
) -> None:
    rng = np.random.default_rng(seed)
    corpora = Corpora((corpus(rng, 20),), (None,))
    change = replace(SETTINGS, seed=seed, epochs=epochs, context_tokens=data.draw(st.sampled_from([32, 64])))
    plan = begin(corpora, change)
    left_out: Counter[Target] = Counter()
    for _ in range(num_skips):
        if plan.newest.base_step >= plan.num_steps - 1:
            break
        bad = data.draw(st.integers(plan.newest.base_step + 1, plan.num_steps))
        saved = data.draw(st.integers(plan.newest.base_step, bad - 1))
        rows = plan.step_rows(bad)
        epoch = max(plan.cursor(saved).epoch, plan.newest.branch.epoch if plan.newest.branch else 0)
        if plan.newest.epoch_of(rows[-1] - plan.newest.base_row) != epoch:
            straddles = plan.newest.epoch_of(rows[0] - plan.newest.base_row) != 1
            words = "they span two epochs" if straddles else "they belong to epoch 2"
            with pytest.raises(UserError, match=f"can't be left out: {words}"):
                branch(plan, saved, corpora, change, rows)
            break
        dropped = labels_of(plan, rows)
        if epoch == epochs - 1 and saved == bad - 1 and rows.stop == plan.num_rows:
            with pytest.raises(UserError, match=f"no other rows are left to train on after step {saved}"):
                branch(plan, saved, corpora, change, rows)
            break
        plan = branch(plan, saved, corpora, change, rows)
        left_out += dropped
        # Another change of the data does not bring the rows back either.
        if data.draw(st.booleans()):
            change = replace(change, context_tokens=data.draw(st.sampled_from([16, 128])))
            plan = branch(plan, data.draw(st.integers(plan.newest.base_step, plan.num_steps - 1)), corpora, change)
    assert targets_trained(plan) + left_out == all_targets(corpora, epochs)


def test_rows_are_left_out_before_a_first_checkpoint_and_on_disk(tmp_path: Path) -> None:
    corpora = Corpora((corpus(np.random.default_rng(0), 40),), (None,))
    documents = corpora.documents
    write_segment(tmp_path, 0, documents, SETTINGS)
    stored = load_plan(tmp_path)
    for step, bad in ((0, 2), (3, 4)):
        remainder = remainder_after(stored, step, documents.sources, SETTINGS, stored.step_rows(bad))
        write_segment(tmp_path, len(stored.segments), documents, SETTINGS, remainder)
        before, stored = stored, load_plan(tmp_path)
        assert stored.newest.branch is not None and stored.leaves_out_rows and not begin(corpora).leaves_out_rows
        assert stored.newest.branch.skipped == (before.step_rows(bad).start, before.step_rows(bad).stop)
        stored.check_cursor(before.cursor(step))
        with pytest.raises(UserError, match="is not a position"):
            stored.check_cursor(before.cursor(step + 1))

    assert stored.num_steps == begin(corpora).num_steps - 2


def test_the_ids_of_branches_never_change() -> None:
    corpora = Corpora(((9, 120, 33, 70, 2),), (None,))
    plan = branch(begin(corpora), 1, corpora, replace(SETTINGS, context_tokens=64))
    assert [segment.plan_id for segment in plan.segments] == ["01fdf99c319d947e", "8c16e9c141c376cc"]


def test_a_branch_continues_steps_and_rows_and_keeps_earlier_ones() -> None:
    corpora = Corpora((corpus(np.random.default_rng(0), 40),), (None,))
    before = begin(corpora)
    after = branch(before, 4, corpora, replace(SETTINGS, context_tokens=64, rows_per_step=2))
    for step in range(1, 5):
        assert after.step_rows(step) == before.step_rows(step)
        assert [after.pieces(row) for row in after.step_rows(step)] == [
            before.pieces(r) for r in before.step_rows(step)
        ]
    assert after.step_rows(5) == range(12, 14)
    assert [after.segment_of_step(step) for step in (4, 5)] == [0, 1]
    assert after.cursor(4).segment == 0
    assert after.cursor(5) == replace(after.cursor(5), segment=1, plan_id=after.plan_id, next_row=14, step=5)
    for step in range(after.num_steps + 1):
        after.check_cursor(after.cursor(step))
    after.check_cursor(replace(after.cursor(4), segment=1, plan_id=after.plan_id))
    for refused in (before.cursor(5), replace(after.cursor(5), segment=0), replace(after.cursor(5), next_row=15)):
        with pytest.raises(UserError, match="is not a position in plan"):
            after.check_cursor(refused)


def test_losses_stay_comparable_after_more_epochs_and_skipped_rows_but_not_with_other_documents() -> None:
    rng = np.random.default_rng(4)
    lengths = (corpus(rng, 60), corpus(rng, 60))
    for held in (0.2, 0.0):
        change = replace(SETTINGS, eval_fraction=held, eval_rows=4)
        first = begin(Corpora(lengths, (None, 0.0)), change)
        known = first.newest.measured
        more = branch(first, 2, Corpora(lengths, (None, 0.0)), replace(change, epochs=2))
        less = branch(first, 2, Corpora(lengths, (None, 0.0)), change, first.step_rows(3))
        assert more.newest.measured == less.newest.measured == known
        longer = branch(first, 2, Corpora(lengths, (None, 0.0)), replace(change, context_tokens=64))
        other = branch(first, 2, Corpora(lengths, (0.0, None)), change)
        both = branch(first, 2, Corpora(lengths, (None, None)), change)
        assert len({known, *(one.newest.measured for one in (longer, other, both))}) == 4
    weighted = [begin(Corpora(lengths, (1.0, more)), change).newest.measured for more in (1.0, 2.0)]
    assert weighted[0] != weighted[1], "the training loss is on another mixture"


def shares_of(plan: Plan, bases: list[int]) -> list[float]:
    """Return each source's share of the tokens in the newest segment."""
    tokens = np.zeros(len(bases) - 1)
    for row in range(plan.newest.base_row, plan.num_rows):
        for piece in plan.pieces(row):
            tokens[np.searchsorted(bases, piece.document, side="right") - 1] += piece.length
    return (tokens / tokens.sum()).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("weights", [(9.0, 1.0), (1.0, 1.0), (1.0, 0.1)])
def test_what_is_left_of_documents_counts_in_the_share_of_their_source(weights: tuple[float, float]) -> None:
    """Every document of the first source is begun; those of the second are shorter than a row."""
    lengths = ((320,) * 20, (10,) * 640)
    plan = begin(Corpora(lengths, (1.0, 1.0)))
    step = plan.num_steps // 2
    begun = {piece.document for n in range(1, step + 1) for row in plan.step_rows(n) for piece in plan.pieces(row)}
    assert begun >= set(range(20))
    plan = branch(plan, step, Corpora(lengths, weights), SETTINGS)
    asked = weights[0] / sum(weights)
    assert shares_of(plan, [0, 20, 660]) == pytest.approx([asked, 1 - asked], abs=0.02)
    trained = targets_trained(plan)
    assert set(trained.values()) == {1} and {target for target in trained if target[0] < 20} == {
        target for target in all_targets(Corpora(lengths, weights)) if target[0] < 20
    }


@pytest.mark.parametrize("seed", range(2))
def test_an_epoch_of_weighted_sources_loses_nothing_but_the_rows_that_are_left_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    corpora = Corpora((corpus(rng, 30), (20,) * 300), (1.0, 1.0))
    plan = begin(corpora)
    planned = targets_trained(plan)
    step = int(rng.integers(2, plan.num_steps - 1))
    rows = plan.step_rows(step + 1)
    assert targets_trained(branch(plan, step, corpora, SETTINGS, rows)) + labels_of(plan, rows) == planned


@pytest.mark.parametrize(
    "changes", [{"rows_per_step": 2}, {"context_tokens": 64}, {"epochs": 2}, {"packing": "concat"}], ids=str
)
@pytest.mark.parametrize("step", [2, 20, 35])
def test_a_branch_with_the_same_weights_keeps_what_the_epoch_had_planned(changes: dict[str, object], step: int) -> None:
    """Every document of the first source is begun, so the source has only remainders left."""
    corpora = Corpora(((1000,) * 2, (20,) * 200), (1.0, 1.0))
    plan = begin(corpora)
    planned = targets_trained(plan)
    assert len({document for document, _ in planned}) == 2 + 100 < 202
    # Adding a corpus that is not used changes nothing.
    for more in (corpora, Corpora((*corpora.lengths, (30,) * 5), (1.0, 1.0, 0.0))):
        changed = branch(plan, step, more, replace(SETTINGS, **changes))  # type: ignore[arg-type]
        rows = range(changed.newest.base_row + changed.newest.epochs[0].num_rows)
        assert planned == labels_of(changed, rows)


@pytest.mark.parametrize("changes", [{"context_tokens": 64}, {"overlong": "split"}], ids=str)
def test_documents_that_were_dropped_come_with_the_same_weights_where_rows_take_them(
    changes: dict[str, object],
) -> None:
    corpora = Corpora(((20,) * 20 + (60,) * 10, (20,) * 100), (1.0, 1.0))
    short = replace(SETTINGS, overlong="drop")
    plan = begin(corpora, short)
    assert not {document for document, _ in targets_trained(plan)} & set(range(20, 30))
    assert targets_trained(branch(plan, 4, corpora, replace(short, rows_per_step=2))) == targets_trained(plan)
    longer = branch(plan, 4, corpora, replace(short, **changes))  # type: ignore[arg-type]
    assert {document for document, _ in targets_trained(longer)} >= set(range(30))


@pytest.mark.parametrize("after", [{"context_tokens": 1024}, {"overlong": "split"}], ids=str)
def test_weights_hold_after_a_change_of_the_tokens_counted_per_document(after: dict[str, object]) -> None:
    lengths = ((20,) * 300, (1000,) * 400)
    corpora, truncated = Corpora(lengths, (1.0, 1.0)), replace(SETTINGS, overlong="truncate")
    plan = branch(begin(corpora, truncated), 4, corpora, replace(truncated, **after))  # type: ignore[arg-type]
    tokens = Counter[bool]()
    for (document, _), count in targets_trained(plan).items():
        tokens[document >= len(lengths[0])] += count
    assert 0.8 < tokens[True] / tokens[False] < 1.25


def test_a_branch_that_can_not_continue_the_run_is_refused() -> None:
    corpora = Corpora(((20,) * 9, (30,) * 9), (None, None))
    plan, longer = begin(corpora), replace(SETTINGS, context_tokens=64)
    with pytest.raises(UserError, match="is left for training"):
        branch(plan, plan.num_steps, corpora, longer)
    with pytest.raises(UserError, match=r"\(step 1\) is older than the last data change \(step 2\)"):
        branch(branch(plan, 2, corpora, longer), 1, corpora, SETTINGS)
    with pytest.raises(UserError, match=r"the corpora of a run must keep their order"):
        remainder_after(plan, 2, tuple(reversed(corpora.documents.sources)), SETTINGS)
    twice = begin(corpora, replace(SETTINGS, epochs=2))
    with pytest.raises(UserError, match=r"data.epochs=1: the run is already in epoch 2; use at least 2"):
        branch(twice, twice.num_steps - 1, corpora, SETTINGS)


def test_a_stored_branch_is_the_one_in_memory(tmp_path: Path) -> None:
    corpora = Corpora((corpus(np.random.default_rng(0), 60),), (None,))
    more = Corpora((*corpora.lengths, (40, 50)), (None, None))
    change = replace(SETTINGS, context_tokens=64, rows_per_step=2)
    made = branch(begin(corpora), 6, more, change)
    write_segment(tmp_path, 0, corpora.documents, SETTINGS)
    remainder = remainder_after(load_plan(tmp_path), 6, more.documents.sources, change)
    write_segment(tmp_path, 1, more.documents, change, remainder)
    loaded = load_plan(tmp_path)
    assert [segment.plan_id for segment in loaded.segments] == [segment.plan_id for segment in made.segments]
    assert targets_trained(loaded) == targets_trained(made) == all_targets(more)
    assert loaded.newest.fragments.size == made.newest.fragments.size > 0


def test_a_remainder_that_is_too_long_for_a_segment_waits_for_the_next() -> None:
    corpora = Corpora(((1000,), (30,)), (None, None))
    plan = begin(corpora, replace(SETTINGS, context_tokens=104, rows_per_step=1))
    plan = branch(plan, 1, corpora, replace(SETTINGS, context_tokens=48, rows_per_step=1, overlong="drop"))
    plan = branch(plan, 1, corpora, replace(SETTINGS, context_tokens=2000, rows_per_step=1))
    assert targets_trained(plan) == all_targets(corpora)


def test_a_finished_plan_is_branched_twice_at_one_step() -> None:
    corpora = Corpora(((20,) * 10,), (None,))
    change = replace(SETTINGS, packing="none", rows_per_step=1, epochs=2)
    plan = begin(corpora, replace(change, epochs=1))
    plan = branch(plan, 10, corpora, change)
    plan = branch(plan, 10, corpora, replace(change, rows_per_step=2))
    assert [info.epoch for info in plan.newest.epochs] == [1]
    assert targets_trained(plan) == all_targets(corpora, 2)


def test_what_a_plan_says_is_held_out_no_step_trains_and_every_evaluation_reads() -> None:
    first = Corpora(lengths=((20,) * 60,), weights=(None,))
    both = Corpora(lengths=((20,) * 60, (25,) * 40), weights=(None, None))
    settings = replace(SETTINGS, eval_fraction=0.2, eval_rows=1000)
    for fraction in (0.2, 0.4):
        plan = begin(first, settings)
        plan = branch(plan, 3, both, replace(settings, eval_fraction=fraction))
        held = set(np.flatnonzero(plan.held_out()).tolist())
        assert held and max(held) >= 60
        assert held.isdisjoint(document for document, _ in targets_trained(plan))
        rows = plan.evaluation
        read = {piece.document for row in range(rows.num_rows) for piece in rows.pieces(row)}
        assert held <= read and (held == read) == (fraction == 0.2)
    assert not begin(first).held_out().any()


def documents_by_epoch(plan: Plan) -> list[Counter[int]]:
    epochs = [range(info.first_row, info.first_row + info.num_rows) for info in plan.newest.epochs]
    return [Counter(one.document for row in rows for one in plan.pieces(row) if one.start == 0) for rows in epochs]


@pytest.mark.parametrize(("weights", "shares"), [([3, 1], 0.75), ([0.5, 0.5], 0.5), ([1, 9], 0.1)])
def test_an_epoch_takes_tokens_by_weight_and_the_scarcest_source_completely(
    weights: list[float], shares: float
) -> None:
    plan = begin(Corpora(((20,) * 1000, (20,) * 1000), tuple(weights)), SETTINGS)
    documents = documents_by_epoch(plan)[0]
    counts = [sum(document < 1000 for document in documents), sum(document >= 1000 for document in documents)]
    assert max(counts) == 1000, "the source that is smallest relative to its weight"
    assert counts[0] / sum(counts) == pytest.approx(shares, abs=0.002)
    assert set(documents.values()) == {1}


def test_a_source_goes_on_where_it_stopped() -> None:
    """An epoch takes a third of the second source, so three epochs take each of its documents once."""
    plan = begin(Corpora(((20,) * 100, (20,) * 300), (1.0, 1.0)), replace(SETTINGS, epochs=3))
    second = sum(documents_by_epoch(plan), Counter())
    assert {count for document, count in second.items() if document >= 100} == {1}
    assert sum(document >= 100 for document in second) == 300
    assert {count for document, count in second.items() if document < 100} == {3}


def test_a_weighted_source_without_a_document_to_train_on_is_refused() -> None:
    with pytest.raises(UserError, match=r"c1 has weight 1.0 but no tokens left for epoch 0"):
        begin(Corpora(((20,) * 5, (1,) * 5), (1.0, 1.0)), SETTINGS)


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
