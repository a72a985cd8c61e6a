"""Rows and their field options: each row becomes a document of its kind, or is rejected with a reason."""

from __future__ import annotations

import datetime
import gzip
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ulysses.cluster import prepare_job
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.preparation import PrepareRequest, listed
from ray_ulysses.data.sources.extraction import RawDocument, read_unit, row_id, row_weight
from ray_ulysses.data.sources.rows import (
    ChatRow,
    CompletionRow,
    RowError,
    RowFields,
    TokenRow,
    conversation,
    fitting_options,
    row_content,
)
from ray_ulysses.data.sources.units import SourceSpec, list_units
from ray_ulysses.errors import ConfigError, RunError, UserError
from tests.local_preparation import prepare_local, preparing
from tests.unit.data.corpora import begin
from tests.unit.data.tokenize.test_chat import CHATML, TOOL_BLOCK, chat_tokenizer
from tests.unit.data.tokenize.test_supervision import prepare_rows, reasons_of

HELLO = {"role": "user", "content": "hello"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
OPENAI = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "t"},
    {"role": "assistant", "content": "a"},
]
SHAREGPT = [
    {"from": "system", "value": "s"},
    {"from": "human", "value": "u"},
    {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
    {"from": "observation", "value": "t"},
    {"from": "gpt", "value": "a"},
]


@pytest.mark.parametrize(
    ("fields", "kind", "refused"),
    [
        (RowFields(text="t", messages="m"), "auto", ["messages"]),
        (RowFields(labels="l", prompt="p", text="t"), "auto", ["prompt", "labels", "prompt"]),
        (RowFields(tools="t"), "auto", ["tools"]),
        (RowFields(text="t", system="s"), "auto", ["system"]),
        (RowFields(completion="c"), "auto", ["completion"]),
        (RowFields(input="i"), "auto", ["input"]),
        (RowFields(messages="m", prompt="p", completion="c"), "auto", ["completion"]),
        (RowFields(tokens="x", labels="x"), "auto", ["labels"]),
        (RowFields(id=""), "auto", ["id"]),
        (RowFields(tokens="x"), "text", ["tokens"]),
        (RowFields(), "auto", []),
        (RowFields(tokens="t", labels="l"), "auto", []),
        (RowFields(messages="c", prompt="p", tools="t", system="s"), "auto", []),
        (RowFields(prompt="p", input="i", completion="c", id="p"), "auto", []),
    ],
)
def test_all_contradicting_options_are_refused_at_once(fields: RowFields, kind: str, refused: list[str]) -> None:
    try:
        fields.check(kind)
        found = []
    except ConfigError as error:
        found = [problem.path for problem in error.problems]
    assert found == [f"--{role}-field" for role in refused]


def test_rows_become_documents_of_their_kind() -> None:
    tokens = row_content({"tokens": [1, 2], "labels": [-100, 2]}, "tokens")
    assert isinstance(tokens, TokenRow) and tokens.labels is not None
    assert (tokens.tokens.tolist(), tokens.labels.tolist()) == ([1, 2], [-100, 2])
    array = row_content({"tokens": np.array([3, 4], dtype=np.uint16)}, "tokens")
    assert isinstance(array, TokenRow) and array.tokens.dtype == np.int64 and array.labels is None
    for mask in ([False, True], [0, 1]):
        assert np.array_equal(row_weight(mask, array), [0, 1])
    chat = row_content({"messages": [{**HELLO, "name": None}]}, "messages")
    assert chat == ChatRow(messages=(HELLO,))
    tools = [{"name": "f", "parameters": {"a": {"type": "int"}, "b": None, "required": ["a"]}, "strict": False}]
    for value, expected in ((tools, tools), (json.dumps(tools), tools), *((one, []) for one in (None, "", "[]"))):
        row = row_content({"messages": [HELLO], "tools": value}, "messages")
        assert isinstance(row, ChatRow) and list(row.tools) == expected
    assert row_content({"prompt": "", "completion": "c"}, "completion") == CompletionRow(prompt="", completion="c")
    assert [row_id(value) for value in ("a-1", 17, None)] == ["a-1", "17", ""]
    with pytest.raises(RowError, match="type list"):
        row_id([1])


def said(sender: str, value: object) -> dict[str, Any]:
    return {"messages": [{"from": sender, "value": value}]}


def parts(*content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, *content]}]}


NOT_TOKENS: list[tuple[Any, str]] = [
    ([], "empty"),
    (None, "missing"),
    ("abc", "type str"),
    ([1, 2.0], "item 1 .* float"),
    ([1, None], "item 1 is missing"),
    ([1 << 70], "64 bits"),
    (np.array([1 << 63], dtype=np.uint64), "64 bits"),
]
NOT_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"messages": "{"}, "messages are not JSON"),
    ({"messages": '"hi"'}, "type str"),
    ({"messages": []}, "empty"),
    ({"messages": ["hi"]}, "message 0 is of type str"),
    ({"messages": [{"content": "hi"}]}, "message 0 has no role"),
    ({"messages": [{"role": "user"}]}, "content is missing"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
    ({"messages": [HELLO], "prompt": 3}, "prompt are of type int"),
    ({"messages": [{"role": "assistant"}], "prompt": [HELLO]}, "message 1"),
    ({"messages": [HELLO], "tools": "{"}, "tools are not JSON"),
    ({"messages": [HELLO], "tools": {"name": "f"}}, "tools are of type dict"),
    ({"messages": [HELLO], "tools": '["f"]'}, "tool 0"),
    ({"messages": [HELLO], "tools": [{"name": "\ud800"}]}, "lone surrogate"),
    (said("bard", "x"), "'bard'"),
    (said("human", 3), "type int"),
    (said("function_call", "jump"), "calls of message 0 are not JSON"),
    (said("function_call", f'{{"name": "f", "arguments": {"[" * 600 + "]" * 600}}}'), "100 levels deep"),
    (said("function_call", '{"name": "f"}'), "lacks a name or arguments"),
    (parts("a"), "part 1 .* type str"),
    (parts({"type": "image", "url": "b"}), 'part 1 .* "image"'),
    (parts({"type": "text"}), "part 1 is missing"),
    (parts({"type": "text", "text": "\ud800"}), "lone surrogate"),
]
NOT_DOCUMENTS: list[tuple[Any, dict[str, Any], str]] = [
    *(("tokens", {"tokens": value}, reason) for value, reason in NOT_TOKENS),
    ("tokens", {"tokens": [1], "labels": [1, 2]}, "there are 2 labels for 1"),
    *(("messages", row, reason) for row, reason in NOT_MESSAGES),
    ("completion", {"prompt": "p", "completion": ""}, "completion is empty"),
    ("completion", {"prompt": "p", "input": 0, "completion": "c"}, "input is of type int"),
    ("completion", {"prompt": None, "completion": "c"}, "prompt is missing"),
    ("completion", {"prompt": OPENAI[:2], "completion": OPENAI[4:]}, "--messages-field"),
]


def test_a_row_that_is_not_a_document_is_rejected_with_the_reason() -> None:
    for kind, row, reason in NOT_DOCUMENTS:
        with pytest.raises(RowError, match=reason):
            row_content(row, kind)


def test_every_form_of_a_conversation_is_the_same_conversation() -> None:
    expected = conversation(OPENAI)
    assert conversation(SHAREGPT) == conversation(json.dumps(SHAREGPT)) == expected
    assert conversation(json.dumps(OPENAI[2:]), prompt=json.dumps(OPENAI[:2])) == expected
    assert conversation(OPENAI[1:], prompt=None, system="s") == expected
    found = conversation(OPENAI[4:], prompt=OPENAI[:4])
    assert [message.get("weight") for message in found.messages] == [None, None, 0, None, None]
    names = [("user", "u"), ("function_call", [{"name": "f", "arguments": "{}"}]), ("tool", "t")]
    shared = [{"from": sender, "value": value} for sender, value in names]
    assert conversation([*shared, {"from": "assistant", "value": "a", "weight": 0}]).messages == (
        {"role": "user", "content": "u"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "a", "weight": 0},
    )


def test_an_instruction_becomes_alpacas_prompt_with_or_without_its_input() -> None:
    row: dict[Any, Any] = {"prompt": "Add.", "input": "1 2", "completion": "3"}
    with_input = (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:"
    )
    without = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\n\n### Instruction:\nAdd.\n\n### Response:"
    )
    for given, prompt in (("1 2", with_input), ("", without), (None, without)):
        assert row_content({**row, "input": given}, "completion") == CompletionRow(prompt=prompt, completion="3")


def test_parts_of_text_are_joined_as_transformers_joins_them() -> None:
    texts = [{"type": "text", "text": text, "image_url": None} for text in ("see", " this ", "")]
    for content, expected in ((texts, "see  this  "), (texts[:1], "see"), ([], "")):
        row = row_content({"messages": [{"role": "user", "content": content}]}, "messages")
        assert row == ChatRow(messages=({"role": "user", "content": expected},))


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_every_form_of_one_conversation_gives_the_same_tokens_and_spans(tmp_path: Path, form: str) -> None:
    talk = [HELLO, {"role": "assistant", "content": " jumps"}]
    shared = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": " jumps"}]
    rows: list[dict[str, Any]] = [{"m": talk}, {"m": shared}, {"m": json.dumps(talk)}, {"m": talk[1:], "p": talk[:1]}]
    digests = []
    for number, row in enumerate(rows):
        fields = {"messages_field": "m"} | ({"prompt_field": "p"} if "p" in row else {})
        corpus = prepare_rows(tmp_path / str(number), [row], form=form, **fields)
        assert reasons_of(corpus) == []
        digests.append(corpus.digests().tolist())
    assert digests == [digests[0]] * len(rows)


def test_nulls_added_by_parquet_are_removed_and_nulls_in_json_are_kept(tmp_path: Path) -> None:
    # A column of structs gives each call the arguments of all calls, with null for those it lacks.

    def asking(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [call]}]

    def content_of(path: Path) -> list[Any]:
        units, _ = list_units(SourceSpec(paths=(str(path),), fields=RowFields(messages="m", tools="t")))
        return [one.content for unit in units for one in read_unit(unit) if isinstance(one, RawDocument)]

    tools = [[{"name": "f", "a": {"b": 1}}], [{"name": "g", "c": [2, None]}]]
    calls = [asking("weather", {"city": "Paris"}), asking("add", {"one": 1, "two": 2})]
    rows = [{"m": call, "t": tool} for call, tool in zip(calls, tools, strict=True)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert found[0]["m"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris", "one": None, "two": None}
    assert content_of(tmp_path / "rows.parquet") == [conversation(row["m"], row["t"]) for row in rows]
    row = {"m": asking("weather", {"city": "Paris", "unit": None}), "t": [{"name": "f", "a": None}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    as_text = {name: json.dumps(value) for name, value in row.items()}
    pq.write_table(pa.Table.from_pylist([as_text]), tmp_path / "text.parquet")
    for name in ("rows.jsonl", "text.parquet"):
        (kept,) = content_of(tmp_path / name)
        assert '"unit": null' in json.dumps(kept.messages[1]) and kept.tools == ({"name": "f", "a": None},)


@pytest.mark.parametrize(
    ("names", "options"),
    [
        ("id messages tools", "--messages-field messages --tools-field tools"),
        ("instruction input output", "--prompt-field instruction --input-field input --completion-field output"),
        ("question answer", "--prompt-field question --completion-field answer"),
        ("input_ids labels attention_mask", "--tokens-field input_ids --labels-field labels"),
        ("content path", "--text-field content"),
        ("prompt chosen rejected", "--prompt-field prompt --chosen-field chosen --rejected-field rejected"),
        ("chosen rejected score", "--chosen-field chosen --rejected-field rejected"),
        ("a b", ""),
    ],
)
def test_options_that_fit_the_fields_are_suggested(names: str, options: str) -> None:
    assert fitting_options(names.split()) == options


@pytest.mark.parametrize("name", ["chats.jsonl.gz", "list.json"])
def test_rows_without_the_field_are_refused_early_with_the_option_that_fits(tmp_path: Path, name: str) -> None:
    rows = [{"id": number, "messages": [HELLO]} for number in range(3)]
    text = json.dumps(rows) if name == "list.json" else "\n".join(map(json.dumps, rows))
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    request = PrepareRequest(sources=SourceSpec(paths=(str(tmp_path / name),)), out=tmp_path / "out")
    with pytest.raises(UserError, match=r"^--text-field=text: .*use --messages-field messages"):
        listed(request)
    # Among other documents the rows are rejected one by one.
    (tmp_path / "a.txt").write_text("a text")
    assert listed(replace(request, sources=SourceSpec(paths=(str(tmp_path),)))).units


ANSWER = {"role": "assistant", "content": "yes"}


def prepare_folder(folder: Path, tokenizer: str = "bytes", out: Path | None = None, **fields: str) -> Corpus:
    spec = SourceSpec(paths=(str(folder),), fields=RowFields.from_options(fields))
    return prepare_local(PrepareRequest(sources=spec, out=out or folder.parent / "corpus", tokenizer=tokenizer))


def nested(depth: int) -> str:
    # json.dumps can't write a list that is nested deeply.
    return "[" * depth + "]" * depth


def test_names_that_are_not_utf8_are_read_and_shown_with_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "in" / "d\udce9").mkdir(parents=True)
    (tmp_path / "in" / "d\udce9" / "vertr\udce4ge.txt").write_text("a text")
    (tmp_path / "in" / "rows\udcff.jsonl").write_text('{"text": "a row"}\n{broken\n')
    pq.write_table(pa.table({"text": ["a cell", ""]}), tmp_path / "in" / "cells.parquet")
    (tmp_path / "in" / "cells.parquet").rename(tmp_path / "in" / "cells\udcfe.parquet")
    corpus = prepare_folder(tmp_path / "in")
    names = [corpus.source(document).source.removeprefix(f"{tmp_path}/in/") for document in range(3)]
    assert names == [r"d\xe9/vertr\xe4ge.txt", r"rows\xff.jsonl", r"cells\xfe.parquet"]
    left_out = [json.loads(line)["source"] for line in (corpus.path / "quarantine.jsonl").read_text().splitlines()]
    assert [Path(name).name for name in left_out] == [r"rows\xff.jsonl", r"cells\xfe.parquet"]
    with pytest.raises(UserError, match=r"^--out=.*/out\\xff: the path is not UTF-8"):
        begin(PrepareRequest(sources=SourceSpec(paths=(str(tmp_path / "in"),)), out=tmp_path / "out\udcff"))
    (tmp_path / "in" / "bad\udcff.parquet").write_text("PAR1 not really")
    with pytest.raises(UserError, match=r"^source=.*/bad\\xff.parquet: the Parquet file"):
        prepare_folder(tmp_path / "in", out=tmp_path / "other")


def test_messages_and_tools_that_are_nested_too_deeply_are_left_out(tmp_path: Path) -> None:
    template = str(chat_tokenizer(tmp_path / "tokenizer", TOOL_BLOCK + CHATML))
    rows = []
    for depth in (50, 99, 300, 900, 960, 100_000):
        message = f'{{"role": "user", "content": "the fox? {depth}", "x": {nested(depth)}}}'
        rows.append(f'{{"m": [{message}, {json.dumps(ANSWER)}], "t": null}}')
    tools = json.dumps(f'[{{"name": {nested(900)}}}]')
    parts = f'[{{"role": "user", "content": [{{"type": {nested(900)}}}]}}]'
    chat = json.dumps([{"role": "user", "content": "jump"}, ANSWER])
    rows += [f'{{"m": {chat}, "t": {tools}}}', f'{{"m": {parts}, "t": null}}', f'{{"m": {chat}, "t": null}}']
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.jsonl").write_text("\n".join(rows))
    corpus = prepare_folder(tmp_path / "in", template, messages_field="m", tools_field="t")
    assert [corpus.source(document).offset for document in range(corpus.num_documents)] == [1, 9]
    reasons = dict(reasons_of(corpus))
    assert reasons.keys() == {2, 3, 4, 5, 6, 7, 8}
    assert all("nested" in reason for reason in reasons.values()) and "tools" in reasons[7]


def test_parquet_values_without_a_python_equivalent_are_left_out(tmp_path: Path) -> None:
    raw = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"ok\xff\xfe")]
    )
    (tmp_path / "a").mkdir()
    pq.write_table(pa.table({"text": raw}), tmp_path / "a" / "raw.parquet")
    corpus = prepare_folder(tmp_path / "a")
    assert corpus.num_documents == 1
    assert [reason for _, reason in reasons_of(corpus)] == ["not UTF-8: byte 0xff at offset 0"]
    kind = pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "at": pa.timestamp("us")}))
    chats = [[{**ANSWER, "at": at}] for at in (2**62, 0)]
    (tmp_path / "b" / "in").mkdir(parents=True)
    pq.write_table(pa.table({"m": pa.array(chats, kind)}), tmp_path / "b" / "in" / "times.parquet")
    corpus = prepare_folder(tmp_path / "b" / "in", messages_field="m")
    assert [reason for _, reason in reasons_of(corpus)] == ["the messages can't be read: date value out of range"]


def test_columns_of_a_wrong_type_are_left_out_and_repeated_columns_refused(tmp_path: Path) -> None:
    columns = {"text": ["one", "two"], "translation": [{"de": "b"}, None], "_id": [{"oid": 1}, None]}
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "in" / "rows.parquet")
    corpus = prepare_folder(tmp_path / "in", text_field="text", id_field="_id")
    assert reasons_of(corpus) == [(1, "the id is of type dict, not a string or an integer")]
    with pytest.raises(UserError, match=r"2 were left out \(the text is of type dict"):
        prepare_folder(tmp_path / "in", out=tmp_path / "other", text_field="translation")
    twice = pa.Table.from_arrays([pa.array(["one"]), pa.array(["two"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"^--text-field=text: .*rows\.parquet has several columns"):
        prepare_folder(tmp_path / "rows.parquet")


HOSTILE: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: rng.choice(["", "a text", "\x00", "\ufeff", "\u2028", "<|im_end|>", "{{ 7 * 7 }}", "\U0010ffff"]),
    lambda rng: rng.choice([None, True, 0, -1, 257, 1 << 70, 1e400, float("nan"), 1.5]),
    lambda rng: "\ud800" * rng.randrange(1, 3),
    lambda rng: [rng.choice([1, 2, 300, -5, "x", None]) for _ in range(rng.randrange(4))],
    lambda rng: json.loads(nested(rng.choice([3, 90, 101, 600]))),
    lambda rng: {rng.choice(["role", "content", "type", "\udfff", ""]): hostile(rng) for _ in range(rng.randrange(4))},
    lambda rng: {"role": rng.choice(["user", "assistant", "tool", "x", ""]), "content": hostile(rng)},
    lambda rng: [{"role": rng.choice(["user", "assistant"]), "content": hostile(rng), "tool_calls": hostile(rng)}],
    lambda rng: [{"role": "assistant", "content": [{"type": rng.choice(["text", 5, None]), "text": hostile(rng)}]}],
    lambda rng: [{"role": "user", "content": "q"}, {**ANSWER, "weight": hostile(rng), "name": hostile(rng)}],
)


def hostile(rng: random.Random) -> Any:
    return rng.choice(HOSTILE)(rng)


FIELDS = {
    "text": {"text_field": "a"},
    "tokens": {"tokens_field": "a", "labels_field": "b"},
    "chat": {"messages_field": "a", "tools_field": "b"},
    "prompt": {"prompt_field": "a", "completion_field": "b", "id_field": "c"},
    "pair": {"prompt_field": "a", "chosen_field": "b", "rejected_field": "c"},
}


@pytest.mark.parametrize("kind", FIELDS)
def test_each_of_many_random_rows_is_stored_or_named(tmp_path: Path, kind: str) -> None:
    rng = random.Random(7)
    rows = [{name: hostile(rng) for name in "abc" if rng.random() < 0.95} for _ in range(400)]
    rows.append({"a": [{"role": "user", "content": "the fox?"}, ANSWER], "b": None})
    rows += [{"a": "the dog", "b": "jumps", "c": "lazy"}, {"a": [1, 2], "b": [-100, 2]}]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = str(chat_tokenizer(tmp_path / "tokenizer", TOOL_BLOCK + CHATML))
    corpus = prepare_folder(tmp_path / "in", template, **FIELDS[kind])
    offsets = [corpus.source(document).offset for document in range(corpus.num_documents)]
    left_out = [offset for offset, _ in reasons_of(corpus)]
    assert sorted(offsets + left_out) == list(range(1, len(rows) + 1))


def test_an_internal_error_in_a_unit_is_reported_in_one_line_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("text")
    request = PrepareRequest(sources=SourceSpec(paths=(str(tmp_path),)), out=tmp_path / "out")
    (unit,) = begin(request).units

    def faulty(*_: object) -> None:
        raise KeyError("of ours\nin two lines")

    monkeypatch.setattr(prepare_job, "write_unit", faulty)
    answer = prepare_job._run_unit(unit, out=request.out, tokenizer="bytes", options=request.encoding)
    assert str(answer) == rf"unit 0 of {request.out} ({tmp_path}/0.txt and 1 more): KeyError: 'of ours\nin two lines'"
    monkeypatch.setattr(prepare_job, "_run_units", lambda *_: iter([answer]))
    with pytest.raises(RunError, match=r"0\.txt and 1 more\): KeyError"), preparing(request) as preparation:
        prepare_job.run_preparation(preparation)


def test_random_columns_of_parquet_are_stored_or_named(tmp_path: Path) -> None:
    rng = random.Random(3)
    simple = [
        *((pa.string(), "a"), (pa.int64(), 3), (pa.binary(), b"\xff"), (pa.timestamp("us"), 2**62)),
        *((pa.date64(), datetime.date(2024, 1, 2)), (pa.float32(), 0.5), (pa.decimal128(9, 2), None)),
    ]

    def column(depth: int) -> tuple[pa.DataType, Any]:
        kind = rng.randrange(len(simple) + 4 * (depth > 0))
        if kind < len(simple):
            return simple[kind][0], rng.choice([simple[kind][1], None])
        inner, value = column(depth - 1)
        return [
            (pa.list_(inner), [value] * rng.randrange(3)),
            (pa.map_(pa.string(), inner), [("k", value)]),
            (pa.list_(pa.struct({"type": inner, "text": pa.string()})), [{"type": value, "text": "a"}]),
            (pa.list_(pa.struct({"role": pa.string(), "content": inner})), [{"role": "assistant", "content": value}]),
        ][kind - len(simple)]

    for number in range(60):
        (folder := tmp_path / str(number) / "in").mkdir(parents=True)
        columns = {name: column(3) for name in "abc"}
        table = {name: pa.array([value, value, None], kind) for name, (kind, value) in columns.items()}
        pq.write_table(pa.table(table), folder / "rows.parquet")
        (folder / "rows.jsonl").write_text('{"a": [{"role": "assistant", "content": "x"}], "b": null}\n')
        outcome = ""
        try:
            corpus = prepare_folder(folder, **rng.choice([*FIELDS.values()]))
        except UserError as error:
            outcome = str(error)
        if outcome:
            assert "the sources contain no usable document: 4 were left out (" in outcome
        else:
            assert corpus.num_documents + corpus.info.num_quarantined == 4


def test_the_home_directory_of_an_unknown_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    plain = PrepareRequest(sources=SourceSpec(paths=(str(tmp_path / "a.txt"),)), out=tmp_path / "out")
    for change in (
        {"sources": SourceSpec(paths=("~nobody-at-all/a",))},
        {"out": Path("~nobody-at-all/out")},
        {"tokenizer": "~nobody-at-all/tokenizer"},
        {"without": ("~nobody-at-all/corpus",)},
    ):
        with pytest.raises(UserError, match="home directory of a user that does not exist on this machine"):
            begin(replace(plain, **change))
    with pytest.raises(UserError, match="refers to the home directory"):
        Corpus.open("~nobody-at-all/corpus")
