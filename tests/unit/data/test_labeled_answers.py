"""Labeled answers for KTO: each is followed by its prompt with the next answer, and its class is its label."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.errors import UserError
from tests.local_preparation import prepare_local
from tests.unit.data.test_pairs import answers_of, reasons_of

ROWS: list[dict[str, Any]] = [
    {"p": "one:", "c": "first", "y": True},
    {"p": "two:", "c": "second", "y": False},
    {"p": "three:", "c": "third", "y": 1},
]


def answer_corpus(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Corpus:
    folder.mkdir(parents=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepared(folder, path, **options)


def prepared(folder: Path, path: Path, **options: Any) -> Corpus:
    spec = SourceSpec(paths=(str(path),), fields=RowFields(prompt="p", completion="c", label="y"))
    return prepare_local(PrepareRequest(sources=spec, out=folder / "corpus", **options))


def labels_of(corpus: Corpus) -> list[str]:
    return [corpus.info.classes[one] for one in corpus.labels]


def test_an_answer_is_followed_by_its_prompt_with_the_next_answer(tmp_path: Path) -> None:
    corpus = answer_corpus(tmp_path / "rows", ROWS)
    assert [answers_of(corpus, document) for document in range(3)] == [
        [("one:", "first"), ("one:", "second")],
        [("two:", "second"), ("two:", "third")],
        [("three:", "third"), ("three:", "first")],
    ]
    assert labels_of(corpus) == ["true", "false", "true"]
    assert corpus.info.are_pairs and corpus.info.has_labeled_answers
    pq.write_table(pa.Table.from_pylist([{**row, "y": bool(row["y"])} for row in ROWS]), tmp_path / "rows.parquet")
    again = prepared(tmp_path / "parquet", tmp_path / "rows.parquet")
    assert again.fingerprint == corpus.fingerprint
    other = answer_corpus(tmp_path / "other", [{**row, "y": not row["y"]} for row in ROWS])
    assert other.fingerprint != corpus.fingerprint and labels_of(other) == ["false", "true", "false"]


def test_rows_without_an_answer_or_a_label_are_left_out(tmp_path: Path) -> None:
    bad = [{"p": "a", "c": "b", "y": label} for label in (2, "good", None)]
    corpus = answer_corpus(tmp_path / "rows", [ROWS[0], *bad, {"p": "four:", "c": "", "y": True}, *ROWS[1:]])
    assert labels_of(corpus) == ["true", "false", "true"]
    assert answers_of(corpus, 0)[1] == ("one:", "second"), "rows that are left out lend no answer"
    assert sorted(reasons_of(corpus)) == [
        "the completion is empty",
        *(
            f"the label is {label}, not true, false, 1 or 0 (other classes need --text-field)"
            for label in ("'good'", "2", "None")
        ),
    ]


def test_an_answer_without_a_prompt_has_no_label_on_the_first_token_of_a_text(tmp_path: Path) -> None:
    rows = [{"p": "", "c": "alone", "y": 1.0}, *ROWS]
    corpus = answer_corpus(tmp_path / "rows", rows)
    spans, border = corpus.spans, int(corpus.borders[0])
    assert spans is not None and labels_of(corpus)[0] == "true"
    # Otherwise the plan would count a label that no row has.
    assert spans.starts[:2].tolist() == [0, border + 1]


def test_a_single_answer_has_no_other_to_be_compared_with(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the only labeled answer"):
        answer_corpus(tmp_path / "rows", ROWS[:1])


def test_each_part_of_the_sources_takes_answers_from_itself(tmp_path: Path) -> None:
    rows = [{"p": f"p{number:02}:", "c": f"c{number:02}", "y": number % 2} for number in range(12)]
    corpus = answer_corpus(tmp_path / "rows", rows, unit_bytes=140)
    assert len(corpus.info.shards) > 1, "the rows are in several units"
    order = [answers_of(corpus, document) for document in range(12)]
    assert [one[0] for one in order] == [(row["p"], row["c"]) for row in rows]
    assert all(own[0] == foreign[0] and own[1] != foreign[1] for own, foreign in order)
    first = [int(other[1][1:]) - int(own[1][1:]) for own, other in order]
    assert np.sum(np.array(first) != 1) == len(corpus.info.shards), "the last answer of a unit takes the first"
