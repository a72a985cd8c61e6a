"""Pairs of answers: the forms of rows, what is learned of them, and the rows that a run reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet, open_sources, plan_input
from ray_ulysses.data.plan.plan_files import load_plan, write_segment
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.read.reader import IGNORE_INDEX, RowReader
from ray_ulysses.data.read.row_source import DirectSource
from ray_ulysses.data.read.streamed_source import StreamedSource
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.errors import ConfigError
from tests.local_preparation import prepare_local
from tests.unit.data.read.test_streamed_source import LocalStreams, assert_all_same, rows_of
from tests.unit.data.tokenize.test_chat import chat_tokenizer

USER, SYSTEM = {"role": "user", "content": "the fox?"}, {"role": "system", "content": "jumps"}
FIRST, SECOND = {"role": "assistant", "content": "over the dog"}, {"role": "assistant", "content": "lazy"}


def prepared(folder: Path, rows: list[dict[str, Any]], tokenizer: str = "bytes", **names: str | None) -> Corpus:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = RowFields(**{"chosen": "chosen", "rejected": "rejected", **names})
    request = PrepareRequest(
        sources=SourceSpec(paths=(str(path),), fields=fields), out=folder / "corpus", tokenizer=tokenizer
    )
    return prepare_local(request)


def reasons_of(corpus: Corpus) -> list[str]:
    return [json.loads(line)["reason"] for line in (corpus.path / "quarantine.jsonl").read_text().splitlines()]


def answers_of(corpus: Corpus, document: int) -> list[tuple[str, str]]:
    """Return the prompt and the learned text of both answers of bytes, without end tokens."""
    found, border, spans = [], int(corpus.borders[document]), corpus.spans
    assert spans is not None
    size = int(corpus.lengths[document])
    for number, (first, last) in enumerate(((0, border), (border, size))):
        at = int(spans.offsets[document]) + number
        start, stop = int(spans.starts[at]), int(spans.stops[at])
        assert first < start < stop == last, "an answer ends its document"
        texts = [
            bytes(token for token in corpus.read(document, begin, end - begin).tolist() if token < 256).decode()
            for begin, end in ((first, start), (start, stop))
        ]
        found.append((texts[0], texts[1]))
    return found


def test_a_text_pair_has_its_prompt_twice_and_both_answers_are_learned(tmp_path: Path) -> None:
    rows = [{"q": "2 + 2 =", "a": " 4", "b": " five"}, {"q": "x", "a": "same", "b": "same"}]
    rows.append({"q": "", "a": "y", "b": "z"})
    corpus = prepared(tmp_path, rows, prompt="q", chosen="a", rejected="b")
    assert corpus.info.are_pairs and corpus.num_documents == 1
    assert answers_of(corpus, 0) == [("2 + 2 =", " 4"), ("2 + 2 =", " five")]
    assert reasons_of(corpus) == ["both answers are the same", "the answers are text, but the prompt is not"]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [USER, FIRST], "rejected": [USER, SECOND]},
        {"prompt": [USER], "chosen": [FIRST], "rejected": [SECOND]},
        {"prompt": [USER], "chosen": [USER, FIRST], "rejected": [USER, SECOND]},
        # UltraFeedback: the prompt as text as well.
        {"prompt": "the fox?", "chosen": [USER, FIRST], "rejected": [USER, SECOND]},
    ],
    ids=["implicit", "explicit", "repeated", "text"],
)
def test_messages_that_both_answers_share_are_their_prompt(tmp_path: Path, row: dict[str, Any]) -> None:
    tokenizer = str(chat_tokenizer(tmp_path / "tokenizer"))
    names = {"prompt": "prompt"} if "prompt" in row else {}
    corpus = prepared(tmp_path / "pairs", [row], tokenizer, **names)
    plain = prepared(tmp_path / "plain", [{"chosen": [USER, FIRST], "rejected": [USER, SECOND]}], tokenizer)
    assert corpus.num_documents == 1 and corpus.info.encoding.num_chats == 1
    assert corpus.read(0, 0, int(corpus.lengths[0])).tolist() == plain.read(0, 0, int(plain.lengths[0])).tolist()
    assert corpus.spans is not None and plain.spans is not None
    assert corpus.spans.stops.tolist() == plain.spans.stops.tolist()
    assert corpus.info.encoding.chat_template is not None


def test_an_earlier_answer_is_not_learned_and_what_is_no_pair_is_left_out(tmp_path: Path) -> None:
    tokenizer = str(chat_tokenizer(tmp_path / "tokenizer"))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"chosen": [USER, FIRST, USER, FIRST], "rejected": [USER, SECOND]}, "the messages before the last are not"),
        ({"chosen": [SYSTEM, USER, FIRST], "rejected": [SYSTEM, SYSTEM, SECOND]}, "the messages before the last are"),
        ({"chosen": [USER, FIRST], "rejected": [USER, USER]}, "the last message of an answer is not the assistant's"),
        ({"chosen": [FIRST], "rejected": [SECOND]}, "the answers have no prompt"),
        ({"chosen": "text", "rejected": "other"}, "the answers are text, but the prompt is not"),
        ({"chosen": None, "rejected": None}, "an answer is missing, not text"),
        ({"chosen": [USER, FIRST], "rejected": [USER, SECOND], "prompt": "else"}, "the prompt is not among"),
    ]
    right = {"chosen": [USER, FIRST, USER, FIRST], "rejected": [USER, FIRST, USER, SECOND]}
    rows = [{"prompt": None, **row} for row in (right, *(row for row, _ in wrong))]
    corpus = prepared(tmp_path / "pairs", rows, tokenizer, prompt="prompt")
    assert corpus.num_documents == 1 and corpus.spans is not None and corpus.spans.starts.size == 2
    for found, (_, reason) in zip(reasons_of(corpus), wrong, strict=True):
        assert found.startswith(reason), found


def test_messages_without_a_chat_template_are_left_out_and_integers_are_named(tmp_path: Path) -> None:
    good = {"q": "x", "a": "y", "b": "z"}
    rows = [good, {"q": None, "a": [USER, FIRST], "b": [USER, SECOND]}, {"q": "x", "a": [1, 2], "b": [1, 3]}]
    tokenizer = str(chat_tokenizer(tmp_path / "tokenizer", None))
    corpus = prepared(tmp_path / "pairs", rows, tokenizer, prompt="q", chosen="a", rejected="b")
    assert corpus.num_documents == 1
    first, second = reasons_of(corpus)
    assert first == "the answers are messages, but the tokenizer has no chat template" and second.startswith(
        "message 0 is"
    )


def test_fields_that_contradict_pairs_are_refused() -> None:
    for names, option in (
        ({"rejected": "b"}, "--rejected-field"),
        ({"chosen": "a"}, "--chosen-field"),
        ({"chosen": "a", "rejected": "b", "completion": "c"}, "--completion-field"),
        ({"chosen": "a", "rejected": "b", "weight": "c"}, "--weight-field"),
        ({"chosen": "a", "rejected": "b", "text": "c"}, "--chosen-field"),
    ):
        with pytest.raises(ConfigError) as caught:
            RowFields(**names).check("jsonl")
        assert [problem.path for problem in caught.value.problems] == [option]


@pytest.mark.parametrize(("sp_size", "ring_size"), [(1, 1), (2, 1), (4, 2)])
def test_a_row_has_both_answers_as_documents_without_a_label_across_their_border(
    tmp_path: Path, sp_size: int, ring_size: int
) -> None:
    rows = [{"q": f"question {n} ", "a": "good " * (n % 4 + 1), "b": "bad " * (n % 3 + 1)} for n in range(12)]
    corpus = prepared(tmp_path / "pairs", rows, prompt="q", chosen="a", rejected="b")
    corpora = open_sources([(str(corpus.path), None)])
    settings = PlanSettings(
        context_tokens=120, rows_per_step=2, pad_multiple=8, epochs=1, seed=3, packing="best_fit", overlong="drop",
        eval_fraction=0.0, eval_rows=1, balance_steps=1,
    )  # fmt: skip
    write_segment(tmp_path / "plan", 0, plan_input(corpora), settings)
    plan = load_plan(tmp_path / "plan")
    reader = RowReader(CorpusSet(plan.newest.sources), plan)
    supervised = 0
    for row in range(plan.num_rows):
        slices = [reader.read("train", row, rank, sp_size, ring_size) for rank in range(sp_size)]
        (lengths,) = {one.document_lengths for one in slices}
        assert len(lengths) == 2 * len(plan.pieces(row))
        labels = np.full(slices[0].row_tokens, IGNORE_INDEX)
        positions = np.zeros_like(labels)
        for one in slices:
            places = np.concatenate([np.arange(*each) for each in one.ranges])
            labels[places], positions[places] = one.labels, one.position_ids
        ends = np.cumsum(lengths)
        assert (labels[ends - 1] == IGNORE_INDEX).all() and (labels[ends - 2] != IGNORE_INDEX).all()
        assert (positions[ends - np.array(lengths)] == 0).all()
        supervised += int((labels != IGNORE_INDEX).sum())
    assert supervised == plan.newest.totals.supervised
    if ring_size == 1:
        place: dict[str, Any] = {"dp_rank": 0, "dp_size": 1, "sp_rank": 0, "sp_size": sp_size, "timeout_s": 60.0}
        streamed = StreamedSource(reader, plan, streams=LocalStreams(), waits_for_first_step=False, **place)
        steps = range(1, plan.num_steps + 1)
        assert_all_same(rows_of(streamed, steps), rows_of(DirectSource(reader, plan, **place), steps))
    assert reader.sum_squares(range(plan.num_rows)) == sum(
        length**2 for row in range(plan.num_rows) for length in reader.read("train", row, 0, 1).document_lengths
    )


def test_a_query_and_its_positive_are_two_whole_texts(tmp_path: Path) -> None:
    rows = [{"q": "ab", "p": "cde"}, {"q": "", "p": "x"}, {"q": "ab", "p": None}]
    corpus = prepared(tmp_path, rows, chosen=None, rejected=None, query="q", positive="p")
    assert (corpus.info.are_pairs, corpus.info.are_queries, corpus.borders.tolist()) == (True, True, [3])
    assert corpus.lengths.tolist() == [7] and corpus.spans is not None
    # The first token of a text is never a label.
    assert (corpus.spans.starts.tolist(), corpus.spans.stops.tolist()) == ([0, 4], [3, 7])
    assert reasons_of(corpus) == ["the query is empty", "the positive is missing, not a string"]
    refused = ({"query": "q"}, "--query-field"), ({"query": "q", "positive": "p", "label": "l"}, "--label-field")
    for wrong, at in refused:
        with pytest.raises(ConfigError) as error:
            RowFields(**wrong).check("auto")
        assert [one.path for one in error.value.problems] == [at]
