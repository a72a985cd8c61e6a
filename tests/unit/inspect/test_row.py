"""Reports on a row: its documents, their files, and the steps that trained the row."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.errors import UserError
from ray_ulysses.inspect.row import report_row, shortened
from tests.local_preparation import prepare_local
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.data.tokenize.test_supervision import prepare_rows
from tests.unit.inspect.runs import SETTINGS, Run, make_run

ALL = replace(SETTINGS, context_tokens=512, rows_per_step=3)


@pytest.fixture
def long_run(tmp_path: Path, corpus: Path) -> Run:
    return make_run(tmp_path / "long", [corpus], ALL)


def test_each_piece_has_its_source_file_and_text(long_run: Run) -> None:
    texts = {f"text-{number:04d}.txt": text for number, text in enumerate(varied_texts(60))}
    for row in range(long_run.plan.num_rows):
        report = report_row(long_run.folder, row, text="full")
        assert [(p.document, p.start, p.length, p.goes_on) for p in report.pieces] == [
            (p.document, p.start, p.length, p.has_next_label) for p in long_run.plan.pieces(row)
        ]
        for piece in report.pieces:
            assert piece.source is not None and piece.text is not None
            whole = texts[Path(piece.source).name]
            assert piece.text.head == whole[piece.start : piece.start + piece.length]
            assert (piece.offset, piece.id, piece.text_problem) == (0, None, None)


def test_the_numbers_of_a_row_add_up(run: Run) -> None:
    run.attempt([run.started(), *run.steps(1, 3)])
    reports = [report_row(run.folder, row, text="none") for row in range(run.plan.num_rows)]
    for report in reports:
        assert report.tokens == sum(piece.length for piece in report.pieces)
        assert report.row_tokens == report.tokens + report.padding == run.plan.row_tokens(report.row)
        assert report.supervised == sum(piece.length - (not piece.goes_on) for piece in report.pieces)
        assert report.supervised == sum(stop - start for piece in report.pieces for start, stop in piece.labels or ())
        assert report.cost == sum(piece.length * (piece.length + SETTINGS.token_cost) for piece in report.pieces)
        assert report.row in run.plan.step_rows(report.planned_step)
        assert (report.segment, report.epoch, report.plan_id) == (0, 0, run.plan.plan_id)
        assert all(piece.text is None and piece.text_problem is None for piece in report.pieces)
        steps = [(one.step, one.attempt) for one in report.trained]
        assert steps == ([(report.planned_step, 1)] if report.row < 12 else [])
    assert sum(report.supervised for report in reports) == run.plan.newest.totals.supervised


def test_a_discarded_step_is_distinguished_from_the_step_that_counts(run: Run) -> None:
    run.attempt([run.started(), *run.steps(1, 4)])
    run.attempt([run.started(2), *run.steps(3, 3)])
    third, fourth = report_row(run.folder, 8), report_row(run.folder, 12)
    assert [(one.step, one.attempt) for one in third.trained] == [(3, 2)]
    assert [(one.step, one.attempt) for one in third.thrown_away] == [(3, 1)]
    assert fourth.trained == ()
    assert [(one.step, one.attempt) for one in fourth.thrown_away] == [(4, 1)]


def test_a_row_of_a_branch_has_its_segment_and_the_added_corpus(run: Run, corpus: Path, more: Path) -> None:
    run.attempt([run.started(), *run.steps(1, 5)])
    run.branch(5, replace(SETTINGS, context_tokens=256, rows_per_step=3), [corpus, more])
    run.attempt([run.started(5), *run.steps(6, run.plan.num_steps)])
    reports = [report_row(run.folder, row, text="none") for row in range(run.plan.num_rows)]
    assert [report.segment for report in reports] == [0] * 20 + [1] * (run.plan.num_rows - 20)
    for report in reports:
        assert report.row in run.plan.step_rows(report.planned_step)
        assert [(one.step, one.attempt) for one in report.trained] == [(report.planned_step, 1 + report.segment)]
    added = [piece for report in reports for piece in report.pieces if piece.corpus == str(more)]
    assert {piece.corpus_document for piece in added} == set(range(20))
    assert all(piece.document == piece.corpus_document + 60 for piece in added)
    assert all(piece.source is not None and "/more/" in piece.source for piece in added)


def test_a_row_trained_before_a_branch_does_not_count_for_the_branch(run: Run, corpus: Path) -> None:
    run.attempt([run.started(), *run.steps(1, 7)])
    run.branch(5, replace(SETTINGS, rows_per_step=3), [corpus])
    report = report_row(run.folder, 20)
    assert report.segment == 1
    assert report.trained == ()
    assert [(one.step, one.attempt) for one in report.thrown_away] == [(6, 1)]


def test_a_missing_corpus_omits_only_its_own_fields(corpus: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(corpus, old)
    run = make_run(tmp_path / "demo", [old])
    old.rename(new)
    gone = report_row(run.folder, 0)
    assert gone.tokens == sum(piece.length for piece in gone.pieces) > 0
    (missing,) = gone.corpora
    assert missing.path == str(old) and missing.problem is not None and "does not exist" in missing.problem
    assert {(piece.source, piece.text, piece.text_problem) for piece in gone.pieces} == {(None, None, None)}
    there = report_row(run.folder, 0, corpora=[new])
    assert there.corpora[0].problem is None
    assert all(piece.text is not None and piece.corpus == str(new) for piece in there.pieces)


def test_a_missing_or_changed_tokenizer_omits_only_the_text(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    make_tokenizer(tokenizer)
    sources = tmp_path / "texts"
    sources.mkdir()
    (sources / "a.txt").write_text("one two one three")
    out = tmp_path / "corpus"
    prepare_local(PrepareRequest(sources=SourceSpec(paths=(str(sources),)), out=out, tokenizer=str(tokenizer)))
    assert Corpus.open(out).info.tokenizer.kind == "huggingface"
    run = make_run(tmp_path / "demo", [out])
    (piece,) = report_row(run.folder, 0).pieces
    assert piece.text is not None and piece.text.head.split() == ["one", "two", "one", "three", "<end>"]
    config = tokenizer / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "<end>", "changed": 1}))
    (piece,) = report_row(run.folder, 0).pieces
    assert piece.text is None and "but the corpus was prepared with" in str(piece.text_problem)
    shutil.rmtree(tokenizer)
    (piece,) = report_row(run.folder, 0).pieces
    assert piece.text is None and "no such directory" in str(piece.text_problem)
    assert piece.source == str(sources / "a.txt")


def make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(("<unk>", "one", "two", "three", "<end>"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def test_an_unplanned_row_is_refused_with_the_valid_range(run: Run) -> None:
    run.attempt([run.started(), *run.steps(1, 3)])
    last, steps = run.plan.num_rows - 1, run.plan.num_steps
    for row in (-1, last + 1):
        with pytest.raises(UserError) as refused:
            report_row(run.folder, row)
        said = str(refused.value)
        assert said.startswith(f"--row={row}: the plan {run.plan.plan_id} has rows 0 to {last} in {steps} steps")
        assert "rows 0 to 11 are trained so far" in said


@pytest.mark.parametrize("size", [0, 1, 480, 640, 641, 5000])
def test_a_shortened_text_reports_the_omitted_characters(size: int) -> None:
    text = "".join(chr(97 + place % 26) for place in range(size))
    cut = shortened(text)
    assert len(cut.head) + len(cut.tail) + cut.left_out == size
    assert text.startswith(cut.head) and text.endswith(cut.tail)
    assert (cut.left_out > 0) == (size > 640)


@pytest.mark.parametrize("context_tokens", [512, 16], ids=["whole documents", "documents in pieces"])
def test_supervised_tokens_are_marked(tmp_path: Path, context_tokens: int) -> None:
    """Byte-tokenized chats: exactly the assistants' words are labels, and appear between the markers."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": f"yes {number}"},
            ]
        }
        for number in range(12)
    ]
    chats = prepare_rows(tmp_path / "chats", rows, messages_field="messages")
    plain = text_corpus(tmp_path / "plain", varied_texts(5))
    run = make_run(tmp_path / "run", [chats.path, plain.path], replace(ALL, context_tokens=context_tokens))
    marked: dict[int, str] = {}
    for row in range(run.plan.num_rows):
        report = report_row(run.folder, row, text="full")
        assert report.supervised == sum(stop - start for piece in report.pieces for start, stop in piece.labels or ())
        for piece in report.pieces:
            assert piece.text is not None and piece.labels is not None
            for start, stop in piece.labels:
                assert piece.start < start < stop <= piece.start + piece.length + piece.goes_on
            if piece.corpus == str(chats.path):
                said = "".join(part.partition("⟧")[0] for part in piece.text.head.split("⟦")[1:])
                marked[piece.corpus_document] = marked.get(piece.corpus_document, "") + said
            else:
                assert "⟦" not in piece.text.head
    if context_tokens == 512:
        assert marked == {number: f"yes {number}" for number in range(12)}
    else:
        assert all(set(said) <= set(f"yes {number}") for number, said in marked.items())
