"""Classes of documents: from a row's field to the corpus, the plan and the row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.commands.prepare import _result, corpus_facts
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.errors import ConfigError, UserError
from tests.local_preparation import prepare_local
from tests.unit.data.corpora import check_content
from tests.unit.data.test_pairs import reasons_of
from tests.unit.data.tokenize.test_supervision import prepare_rows
from tests.unit.data.tool_files import write_megatron

TEXTS = ("the fox", "jumps over", "the dog", "lazily", "and sleeps")


def labels_of(corpus: Corpus) -> list[str]:
    return [corpus.info.classes[label] for label in corpus.labels.tolist()]


def labeled(folder: Path, labels: list[Any], **options: Any) -> Corpus:
    rows = [{"text": text, "y": label} for text, label in zip(TEXTS, labels, strict=False)]
    return prepare_rows(folder, rows, label_field="y", **options)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["pos", "neg", "neu", "pos", "neg"], ["neg", "neu", "pos"]),
        ([10, 2, -1, 2, 10], ["-1", "2", "10"]),
        ([True, False, True, True, False], ["0", "1"]),
    ],
    ids=["names", "numbers", "booleans"],
)
def test_each_document_keeps_its_class(tmp_path: Path, form: str, labels: list[Any], classes: list[str]) -> None:
    corpus = labeled(tmp_path, labels, form=form)
    expected = [str(int(one)) if not isinstance(one, str) else one for one in labels]
    assert corpus.info.classes == tuple(classes) and labels_of(corpus) == expected
    check_content(corpus)
    assert Corpus.open(corpus.path).fingerprint == corpus.fingerprint


def test_classes_are_those_of_kept_documents_of_all_units(tmp_path: Path) -> None:
    rows = [{"text": f"text {n % 40} " * 3, "y": f"class {n // 10}"} for n in range(50)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = SourceSpec(paths=(str(path),), fields=RowFields(label="y"))
    corpus = prepare_local(PrepareRequest(sources=spec, out=tmp_path / "corpus", unit_bytes=300))
    assert len(corpus.info.shards) > 3
    # The last ten documents repeat the first ten.
    assert corpus.info.classes == ("class 0", "class 1", "class 2", "class 3")
    assert labels_of(corpus) == [f"class {n // 10}" for n in range(40)]


def test_a_row_without_a_class_is_left_out(tmp_path: Path) -> None:
    rows = [{"text": text, "y": label} for text, label in zip(TEXTS, ["a", None, 0.5, "", "b"], strict=True)]
    corpus = prepare_rows(tmp_path, [*rows, {"text": "without"}], label_field="y")
    assert labels_of(corpus) == ["a", "b"]
    missing, number, empty, without = reasons_of(corpus)
    assert missing == "the class is missing, not an integer or a string"
    assert number == "the class is of type float, not an integer or a string"
    assert empty == "the class is empty" and without.startswith("no field 'y'")


def test_rows_of_tokens_and_datasets_have_classes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    tokens = prepare_rows(tmp_path / "tokens", [{"i": [1, 2, 3], "y": 7}], tokens_field="i", label_field="y")
    assert tokens.info.classes == ("7",)
    features = datasets.Features({"text": datasets.Value("string"), "y": datasets.ClassLabel(names=["bad", "good"])})
    made = datasets.Dataset.from_dict({"text": list(TEXTS), "y": [1, 0, 1, 1, 0]}, features=features)
    made.save_to_disk(str(tmp_path / "saved"))
    spec = SourceSpec(paths=(str(tmp_path / "saved"),), fields=RowFields(label="y"))
    corpus = prepare_local(PrepareRequest(sources=spec, out=tmp_path / "corpus"))
    assert labels_of(corpus) == ["1", "0", "1", "1", "0"]


def test_a_class_belongs_to_the_content_of_a_corpus(tmp_path: Path) -> None:
    first, second = (labeled(tmp_path / name, ["a", "b", last]) for name, last in (("first", "a"), ("second", "b")))
    plain = prepare_rows(tmp_path / "plain", [{"text": text} for text in TEXTS[:3]], text_field="text")
    assert len({first.fingerprint, second.fingerprint, plain.fingerprint}) == 3
    assert plain.info.classes == ()
    with pytest.raises(UserError, match="columns do not match"):
        Corpus(plain.folder, replace(plain.info, classes=("a",)))._documents.num_rows  # noqa: B018
    damaged = Corpus(first.folder, replace(first.info, labels_crc32=1))
    with pytest.raises(UserError, match="the classes of the documents do not match"):
        _ = damaged.labels


def test_fields_and_files_that_have_no_class_are_refused(tmp_path: Path) -> None:
    for names in ({"chosen": "a", "rejected": "b", "label": "y"}, {"text": "y", "label": "y"}, {"label": ""}):
        with pytest.raises(ConfigError) as caught:
            RowFields(**names).check("jsonl")
        assert [problem.path for problem in caught.value.problems] == ["--label-field"]
    with pytest.raises(ConfigError) as caught:
        RowFields(prompt="p", completion="c", label="y", weight="w").check("jsonl")
    assert [problem.path for problem in caught.value.problems] == ["--weight-field"]
    write_megatron(tmp_path / "data", [[1, 2, 3]])
    spec = SourceSpec(paths=(str(tmp_path),), fields=RowFields(label="y"))
    with pytest.raises(UserError, match=r"--label-field=y: .* contains tokens without fields"):
        prepare_local(PrepareRequest(sources=spec, out=tmp_path / "corpus"))


def test_the_summary_names_the_classes(tmp_path: Path) -> None:
    corpus = labeled(tmp_path, ["pos", "neg", "pos"])
    assert "2 classes: neg (1), pos (2)" in _result(corpus.path)
    assert corpus_facts(str(corpus.path))["classes"] == ["neg", "pos"]
    many = prepare_rows(tmp_path / "many", [{"text": f"text {n}", "y": n} for n in range(20)], label_field="y")
    assert any(line.endswith("10 (1), 11 (1) and 8 more") for line in _result(many.path))
