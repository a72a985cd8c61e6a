"""Rows of every kind, from the source file to the corpus's label spans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ulysses.data.corpus import row_groups
from ray_ulysses.data.corpus.corpus import Corpus, table_crc32
from ray_ulysses.data.corpus.format import SPANS_SCHEMA
from ray_ulysses.data.corpus.row_groups import RowGroupWriter
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.data.tokenize.tokenizers import load_tokenizer
from ray_ulysses.errors import UserError
from tests.local_preparation import prepare_local
from tests.unit.data.corpora import check_content, mask_of
from tests.unit.data.tokenize.test_chat import CHATML, CONVERSATION, MARKED, TOOL_BLOCK, TOOLS, chat_tokenizer

END = 256
LABELS = {"tokens_field": "ids", "labels_field": "labels"}


def prepare_rows(
    directory: Path,
    rows: Sequence[dict[str, Any]],
    tokenizer: str = "bytes",
    form: str = "jsonl",
    *,
    encoding: EncodingOptions | None = None,
    **fields: str,
) -> Corpus:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rows.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    spec, options = SourceSpec(paths=(str(path),), fields=RowFields.from_options(fields)), encoding or EncodingOptions()
    return prepare_local(PrepareRequest(sources=spec, out=directory / "corpus", tokenizer=tokenizer, encoding=options))


def tokens_of(corpus: Corpus, document: int) -> list[int]:
    return corpus.read(document, 0, int(corpus.lengths[document])).tolist()


def supervised_of(corpus: Corpus, document: int) -> list[int]:
    weights = corpus.label_weights(document, 0, int(corpus.lengths[document]))
    assert weights is not None and corpus.spans is not None
    mask = weights > 0
    assert mask.tolist() == mask_of(corpus.spans, document, 0, int(corpus.lengths[document])).tolist()
    return np.array(tokens_of(corpus, document))[mask].tolist()


def each_supervised(corpus: Corpus) -> list[list[int]]:
    return [supervised_of(corpus, document) for document in range(corpus.num_documents)]


def texts_of(corpus: Corpus, tokenizer: str, tokens: Sequence[list[int]]) -> list[str]:
    decode = load_tokenizer(tokenizer).decode
    return [decode(np.array(ids)) for ids in tokens]


def reasons_of(corpus: Corpus) -> list[tuple[int, str]]:
    lines = (corpus.path / "quarantine.jsonl").read_text().splitlines()
    return [(row["offset"], row["reason"]) for row in map(json.loads, lines)]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_tokens_are_stored_unchanged_and_labels_become_spans(tmp_path: Path, form: str) -> None:
    rows = [
        {"ids": [5, 6, 7, 8], "labels": [-100, -100, 7, -100]},
        {"ids": [5, 6, 7], "labels": [-100, 6, 7]},
        {"ids": [1, 2, END], "labels": [-100, 2, -100]},
        {"ids": [3, 4, 3, 4], "labels": [3, -100, 3, 4]},
    ]
    corpus = prepare_rows(tmp_path, rows, form=form, **LABELS)
    assert [tokens_of(corpus, document) for document in range(4)] == [
        [5, 6, 7, 8, END],
        [5, 6, 7, END],
        [1, 2, END],
        [3, 4, 3, 4, END],
    ]
    assert each_supervised(corpus) == [[7], [6, 7, END], [2], [3, 3, 4, END]]
    assert corpus.info.spans is not None
    assert (corpus.info.spans.num_spans, corpus.info.spans.num_supervised) == (5, 9)
    check_content(corpus)


def test_tokens_and_labels_that_do_not_fit_are_left_out_with_the_reason(tmp_path: Path) -> None:
    rows = [
        {"ids": [1, 2], "labels": [1, 2]},
        {"ids": [1, 257], "labels": [1, 257]},
        {"ids": [1, -1], "labels": [1, -1]},
        {"ids": [1, 2], "labels": [1, 3]},
        {"ids": [1, 2, 3], "labels": [1, -100, -100]},
        {"ids": [1, 2], "labels": [-100]},
        {"ids": [1, 2]},
        {"ids": [END], "labels": [END]},
    ]
    assert reasons_of(prepare_rows(tmp_path, rows, **LABELS)) == [
        (2, "token 257 at index 1 is outside the vocabulary of 257 tokens"),
        (3, "token -1 at index 1 is outside the vocabulary of 257 tokens"),
        (4, "label 3 at index 1 is neither -100 nor the token 2"),
        (5, "none of its tokens is supervised"),
        (6, "there are 1 labels for 2 tokens"),
        (7, "no field 'labels': the fields are 'ids'"),
        (8, "none of its tokens is supervised"),
    ]


def test_other_labels_make_another_document_and_another_fingerprint(tmp_path: Path) -> None:
    one, other = ({"ids": [1, 2, 3], "labels": labels} for labels in ([-100, 2, 3], [-100, -100, 3]))
    corpus = prepare_rows(tmp_path / "both", [one, other, one], **LABELS)
    assert each_supervised(corpus) == [[2, 3, END], [3, END]]
    assert reasons_of(corpus) == [(3, f"the same content as {tmp_path / 'both' / 'rows.jsonl'} at 1")]
    made = [prepare_rows(tmp_path / str(n), [row], **LABELS).fingerprint for n, row in enumerate((one, other, one))]
    plain = prepare_rows(tmp_path / "plain", [{"ids": [1, 2, 3]}], tokens_field="ids")
    assert made[0] == made[2] and len({*made, plain.fingerprint}) == 3
    assert plain.spans is None and plain.label_weights(0, 0, 3) is None and plain.info.spans is None
    assert not (plain.path / "spans.parquet").exists()


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_only_assistant_turns_of_chats_are_supervised(tmp_path: Path, form: str) -> None:
    rows = [
        {"chat": CONVERSATION},
        {"chat": [*CONVERSATION[1:3], {"role": "user", "content": "<|im_end|>"}]},
        {"chat": CONVERSATION[:2]},
        {"chat": CONVERSATION[1:3]},
    ]
    directory = str(chat_tokenizer(tmp_path / "tokenizer"))
    corpus = prepare_rows(tmp_path, rows, directory, form, messages_field="chat")
    assert reasons_of(corpus) == [
        (2, "message 2 (user) contains the text of the special token '<|im_end|>'"),
        (3, "none of its tokens is supervised"),
    ]
    learned = each_supervised(corpus)
    assert texts_of(corpus, directory, learned)[0] == " jumps\n<|im_end|>zürich<|im_end|>"
    end = corpus.info.tokenizer.eos_token_id
    # The template's line feed is followed by the document's end token, which is not supervised.
    assert texts_of(corpus, directory, [tokens_of(corpus, 1)[-3:]]) == ["<|im_end|>\n<|im_end|>"]
    assert tokens_of(corpus, 1)[-1] == end and learned[1].count(end) == 1


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_chats_in_parts_and_with_tools(tmp_path: Path, form: str) -> None:
    def row(kind: str, **tools: object) -> dict[str, Any]:
        parts = [{"type": "text", "text": "the fox?"}, {"type": kind, "text": "jump"}]
        answer = [{"type": "text", "text": "yes"}]
        return {"chat": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}], **tools}

    rows = [row("text", tools=TOOLS), row("image", tools=TOOLS), row("text")]
    directory = str(chat_tokenizer(tmp_path / "tokenizer", TOOL_BLOCK + CHATML))
    corpus = prepare_rows(tmp_path, rows, directory, form, messages_field="chat", tools_field="tools")
    assert reasons_of(corpus) == [(2, 'message 0 (user): part 1 of the content is "image", not text')]
    texts = texts_of(corpus, directory, [tokens_of(corpus, document)[:-1] for document in range(2)])
    talk = "<|im_start|>user\nthe fox? jump<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    assert texts[1] == talk and texts[0].endswith("]<|im_end|>\n" + talk) and '"name": "jump"' in texts[0]
    assert texts_of(corpus, directory, each_supervised(corpus)) == ["yes<|im_end|>"] * 2


def test_a_system_column_comes_before_the_conversation(tmp_path: Path) -> None:
    question = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    own = [{"from": "system", "value": "own"}, *question]
    rows = [
        {"conversations": question, "system": "be brief"},
        {"conversations": question, "system": ""},
        {"conversations": question},
        {"conversations": own, "system": None},
        {"conversations": own, "system": "twice"},
        {"conversations": question, "system": 7},
    ]
    corpus = prepare_rows(tmp_path, rows, messages_field="conversations", system_field="system")
    texts = [bytes(t for t in tokens_of(corpus, n) if t < END).decode() for n in range(corpus.num_documents)]
    said = "user\nhiassistant\nho"
    assert texts == [f"system\nbe brief{said}", said, f"system\nown{said}"]
    # The third row is a duplicate of the second.
    assert sorted(offset for offset, _ in reasons_of(corpus)) == [3, 5, 6]


def test_only_the_completion_and_the_end_are_supervised_and_rows_keep_their_ids(tmp_path: Path) -> None:
    rows = [{"q": "ab", "a": "cd", "key": "doc-1"}, {"q": "", "a": "x", "key": 7}, {"q": "ab", "a": ""}]
    rows += [{"q": "a", "a": "b"}, {"q": "b", "a": "c", "key": [1]}]
    corpus = prepare_rows(tmp_path, rows, prompt_field="q", completion_field="a", id_field="key")
    assert each_supervised(corpus) == [[*b"cd", END], [*b"x", END], [*b"b", END]]
    assert tokens_of(corpus, 0) == [*b"abcd", END]
    path = str(tmp_path / "rows.jsonl")
    assert [corpus.source(document) for document in range(3)] == [(path, 1, "doc-1"), (path, 2, "7"), (path, 4, "")]
    reasons = [(3, "the completion is empty"), (5, "the id is of type list, not a string or an integer")]
    assert reasons_of(corpus) == reasons


def test_spans_across_row_groups_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_groups, "GROUP_ROWS", 3)
    rng = np.random.default_rng(0)
    rows = []
    for number in range(12):
        ids = [number, *rng.integers(0, 200, 30).tolist()]
        rows.append({"ids": ids, "labels": [t if rng.random() < 0.5 else -100 for t in ids[:-1]] + [ids[-1]]})
    corpus = prepare_rows(tmp_path, rows, **LABELS)
    assert pq.read_metadata(corpus.path / "spans.parquet").num_row_groups > 12
    assert each_supervised(corpus) == [[label for label in row["labels"] if label != -100] + [END] for row in rows]


def test_damaged_missing_or_replaced_spans_are_refused(tmp_path: Path) -> None:
    rows = [{"ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"ids": [4, 5, 6], "labels": [-100, -100, 6]}]
    corpus = prepare_rows(tmp_path, rows, **LABELS)
    path, spans = corpus.path / "spans.parquet", corpus.info.spans
    assert spans is not None
    data = path.read_bytes()

    def refuse(reason: str = "") -> None:
        with pytest.raises(UserError, match=rf"spans\.parquet can't be used.*{reason}"):
            _ = Corpus.open(corpus.path).spans

    path.write_bytes(data[:-1])
    refuse("bytes, expected")
    damaged = bytearray(data)
    damaged[len(data) // 4] ^= 0x10
    path.write_bytes(damaged)
    refuse()
    path.unlink()
    with pytest.raises(UserError, match=r"spans\.parquet can't be used \(No such file"):
        corpus.check_files()
    table = pa.table({"document": [0, 1], "start": [1, 1], "stop": [4, 4]})

    def refuse_other(reason: str) -> None:
        info = replace(corpus.info, spans=replace(spans, num_bytes=path.stat().st_size))
        (corpus.path / "corpus.json").write_text(json.dumps(info.to_json()))
        refuse(reason)

    pq.write_table(table, path)
    refuse_other("replaced by another file")
    writer = RowGroupWriter(path, SPANS_SCHEMA, checksum=table_crc32, statistics=["document"])
    writer.add(table)
    writer.close(spans.content_crc32)
    refuse_other("do not match")


@pytest.mark.parametrize(
    ("template", "form"), [(None, "jsonl"), (CHATML, "parquet"), (MARKED, "jsonl")], ids=["bytes", "prefixes", "marks"]
)
def test_an_answer_of_weight_0_is_stored_but_not_supervised(tmp_path: Path, form: str, template: str | None) -> None:
    def row(*weights: object, more: str = "") -> dict[str, Any]:
        chat = []
        for number, weight in enumerate(weights):
            chat.append({"role": "user", "content": f"the fox{more}?", "weight": None})
            chat.append({"role": "assistant", "content": f"dog {number}", "weight": weight})
        return {"chat": chat}

    rows = [row(0, 1), row(1, 0, None), row(0, 0), row(None, 1, more=" jumps"), row(1, 2)]
    tokenizer = "bytes" if template is None else str(chat_tokenizer(tmp_path / "tokenizer", template))
    corpus = prepare_rows(tmp_path, rows, tokenizer, form, messages_field="chat")
    found = [text.replace("<|im_end|>", "") for text in texts_of(corpus, tokenizer, each_supervised(corpus))]
    assert found == ["dog 1", "dog 0dog 2", "dog 0dog 1"]
    read = texts_of(corpus, tokenizer, [tokens_of(corpus, document) for document in range(3)])
    assert all("dog 0" in text for text in read)
    assert [offset for offset, _ in reasons_of(corpus)] == [3, 5]
