"""Rows and their field options: each row becomes a document of its kind, or is rejected with a reason."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ulysses.data.prepare.preparation import PrepareRequest, listed
from ray_ulysses.data.sources.extraction import RawDocument, read_unit
from ray_ulysses.data.sources.rows import (
    ChatRow,
    CompletionRow,
    RowError,
    RowFields,
    TokenRow,
    conversation,
    fitting_options,
    row_content,
    row_id,
    row_weight,
)
from ray_ulysses.data.sources.units import SourceSpec, list_units
from ray_ulysses.errors import ConfigError, UserError
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
    (said("function_call", f'{{"name": "f", "arguments": {"[" * 600 + "]" * 600}}}'), "100 deep"),
    (said("function_call", '{"name": "f"}'), "no arguments"),
    (parts("a"), "part 1 .* type str"),
    (parts({"type": "image", "url": "b"}), 'part 1 .* "image"'),
    (parts({"type": "text"}), "part 1 is missing"),
    (parts({"type": "text", "text": "\ud800"}), "lone surrogate"),
]
NOT_DOCUMENTS: list[tuple[Any, dict[str, Any], str]] = [
    *(("tokens", {"tokens": value}, reason) for value, reason in NOT_TOKENS),
    ("tokens", {"tokens": [1], "labels": [1, 2]}, "2 labels for 1"),
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
