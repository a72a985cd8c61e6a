"""Rows of validation corpora: the same whatever is trained on, stored with the plan, and never trained on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ray_ulysses.data.plan.corpus_set import PlanInput, PlannedSource, open_sources, open_validation
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.plan_files import load_plan, write_segment
from ray_ulysses.data.plan.segment import PlanSettings, Segment
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.read.reader import RowReader
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.data.tokenize.spans import LabelSpans
from ray_ulysses.errors import UserError
from tests.local_preparation import prepare_local
from tests.unit.data.corpora import MemoryStore
from tests.unit.data.plans import segment_in_memory

SETTINGS = PlanSettings(seed=3, context_tokens=50, pad_multiple=8, rows_per_step=6, eval_rows=4)


def documents(path: str, lengths: Sequence[int], *validation: PlanInput, spans: LabelSpans | None = None) -> PlanInput:
    source = PlannedSource(path=path, fingerprint=path, num_documents=len(lengths))
    return PlanInput(sources=(source,), lengths=np.array(lengths), spans=spans, validation=validation)


TRAINED = list(range(5, 45))
FIRST, SECOND = documents("/a/val", [30] * 9), documents("/b/val", [20, 1, 45])


def contents(segment: Segment) -> dict[str, list[list[tuple[int, int, int]]]]:
    """Return the pieces of each evaluation set's rows, with documents numbered within the set's corpus."""
    found: dict[str, list[list[tuple[int, int, int]]]] = {}
    bases = np.cumsum([0, *(one.num_documents for one in (*segment.sources, *segment.validation))])
    for one in segment.evaluation_sets:
        rows = [segment.evaluation.pieces(row) for row in one.rows]
        found[one.name] = [
            [(int(piece.document - bases[bases <= piece.document][-1]), piece.start, piece.length) for piece in row]
            for row in rows
        ]
    return found


def test_the_rows_of_a_validation_corpus_depend_on_no_other_corpus() -> None:
    both = segment_in_memory(documents("/t", TRAINED, FIRST, SECOND), SETTINGS)
    alone = segment_in_memory(documents("/u", [99] * 30, SECOND), replace(SETTINGS, eval_fraction=0.2))
    assert [*contents(both)] == ["a/val", "b/val"] and [*contents(alone)] == ["held_out", "val"]
    assert contents(both)["b/val"] == contents(alone)["val"]
    assert sorted(piece for row in contents(alone)["val"] for piece in row) == [(0, 0, 20), (2, 0, 45)]
    assert len(contents(both)["a/val"]) == SETTINGS.eval_rows, "the most rows of each"
    without = segment_in_memory(documents("/u", [99] * 30), alone.settings)
    assert contents(without) == {"held_out": contents(alone)["held_out"]}


def test_validation_changes_no_training_row_and_without_it_no_plan_id() -> None:
    plain, with_validation = (
        segment_in_memory(documents("/t", TRAINED, *extra), SETTINGS) for extra in ((), (FIRST, SECOND))
    )
    assert plain.checksums.pieces == with_validation.checksums.pieces and plain.totals == with_validation.totals
    assert plain.plan_id != with_validation.plan_id and plain.measured != with_validation.measured
    others = [
        segment_in_memory(documents("/t", TRAINED, *extra), SETTINGS).measured for extra in ((FIRST,), (SECOND, FIRST))
    ]
    assert len({with_validation.measured, *others}) == 3, "losses of other rows are not comparable"


def test_a_stored_plan_has_the_sets_and_refuses_others(tmp_path: Path) -> None:
    given = documents("/t", TRAINED, FIRST, SECOND)
    write_segment(tmp_path, 0, given, replace(SETTINGS, eval_fraction=0.2))
    stored, made = load_plan(tmp_path), segment_in_memory(given, replace(SETTINGS, eval_fraction=0.2))
    assert stored.evaluation_sets == made.evaluation_sets and stored.plan_id == made.plan_id
    assert [one.path for one in stored.evaluation_sets] == [None, "/a/val", "/b/val"]
    with pytest.raises(UserError, match="made from different data"):
        write_segment(tmp_path, 0, documents("/t", TRAINED, FIRST), replace(SETTINGS, eval_fraction=0.2))


def test_the_tokens_that_are_read_are_those_of_the_validation_corpus() -> None:
    plan_input = documents("/t", TRAINED, FIRST, SECOND)
    segment = segment_in_memory(plan_input, SETTINGS)
    store = MemoryStore([*TRAINED, *FIRST.lengths, *SECOND.lengths])
    reader = RowReader(store, Plan(segments=(segment,)))
    _, second = segment.evaluation_sets
    read = np.concatenate([reader.read("evaluation", row, 0, 1).input_ids for row in second.rows])
    first = len(TRAINED) + FIRST.lengths.size
    expected = [store.read(first, 0, 20), store.read(first + 2, 0, 45), np.zeros(1)]
    assert {*read.tolist()} == {*np.concatenate(expected).tolist()}


@pytest.mark.parametrize(
    ("settings", "bad", "words"),
    [
        (SETTINGS, documents("/v", [1, 1]), "/v: no document has two tokens"),
        (replace(SETTINGS, overlong="error"), documents("/v", [9, 99]), "/v: data.overlong=error: document 1"),
        (
            SETTINGS,
            documents(
                "/v",
                [9],
                spans=LabelSpans(offsets=np.zeros(2, dtype=np.int64), starts=np.empty(0), stops=np.empty(0)),
            ),
            "/v: no document has a label",
        ),
    ],
    ids=["short", "long", "unlabelled"],
)
def test_a_corpus_without_rows_is_refused(settings: PlanSettings, bad: PlanInput, words: str) -> None:
    with pytest.raises(UserError, match=f"data.validation={words}"):
        segment_in_memory(documents("/t", [9, 8], bad), settings)


def test_a_corpus_that_is_trained_on_or_has_another_tokenizer_is_refused(tmp_path: Path) -> None:
    def prepare(name: str, files: Sequence[str]) -> str:
        paths = tuple(str(Path(os.__file__).with_name(file)) for file in files)
        prepare_local(PrepareRequest(sources=SourceSpec(paths=paths), out=tmp_path / name))
        return str(tmp_path / name)

    trained, other = prepare("trained", ["bisect.py", "cmd.py"]), prepare("other", ["copy.py"])
    sources = open_sources([(trained, None)]).sources
    assert [one.path for one in open_validation([other], sources).sources] == [other]
    for paths, words in (
        ([other, trained], f"{trained} is the same corpus as {trained}, so its loss"),
        ([other, other], "list it once"),
    ):
        with pytest.raises(UserError, match=f"data.validation: .*{words}"):
            open_validation(paths, sources)
    foreign = [replace(one, tokenizer="another") for one in sources]
    with pytest.raises(UserError, match="was prepared with the tokenizer bytes, which is not that of"):
        open_validation([other], foreign)
