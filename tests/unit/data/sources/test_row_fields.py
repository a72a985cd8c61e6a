from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.data.prepare.preparation import PrepareRequest, listed
from ray_ulysses.data.sources.rows import (
    ChatRow,
    CompletionRow,
    RowError,
    RowFields,
    TokenRow,
    fitting_options,
    row_content,
    row_id,
)
from ray_ulysses.data.sources.units import SourceSpec, list_units
from ray_ulysses.errors import ConfigError, UserError

HELLO = {"role": "user", "content": "hello"}
BROKEN = "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
PREPARE = "prepare: 1 problem\n  - "


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        (
            RowFields(text="t", messages="m"),
            "auto",
            "--messages-field='m': a row is one kind of document, and --text-field='t' chose another; give one of the "
            "two, and prepare the other rows into another corpus",
        ),
        (
            RowFields(labels="l"),
            "auto",
            "--labels-field='l': labels need tokens, and --tokens-field is not given; name that field too",
        ),
        (
            RowFields(tools="t"),
            "auto",
            "--tools-field='t': tools need messages, and --messages-field is not given; name that field too",
        ),
        (
            RowFields(text="t", system="s"),
            "auto",
            "--system-field='s': needs --messages-field, which is not given; name that field too",
        ),
        (
            RowFields(prompt="p"),
            "auto",
            "--prompt-field='p': needs --completion-field, which is not given; name that field too",
        ),
        (
            RowFields(completion="c"),
            "auto",
            "--completion-field='c': needs --prompt-field, which is not given; name that field too",
        ),
        (
            RowFields(input="i"),
            "auto",
            "--input-field='i': needs --completion-field, which is not given; name that field too",
        ),
        (
            RowFields(messages="m", prompt="p", completion="c"),
            "auto",
            "--completion-field='c': the completion of a chat is --messages-field='m' already; name one of the two",
        ),
        (
            RowFields(tokens="x", labels="x"),
            "auto",
            "--labels-field='x': is the field of --tokens-field already; name two fields",
        ),
        (RowFields(id=""), "auto", "--id-field='': is no name of a field; name a key or a column"),
        (
            RowFields(tokens="x"),
            "text",
            "--tokens-field='x': --kind=text reads whole files, which have no fields; leave it out, or set another "
            "kind",
        ),
    ],
    ids=[
        "two kinds",
        "labels alone",
        "tools alone",
        "system alone",
        "prompt alone",
        "completion alone",
        "input alone",
        "two completions",
        "one field twice",
        "empty",
        "text files",
    ],
)
def test_options_that_do_not_go_together_are_refused(fields: RowFields, kind: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fields.check(kind)
    assert str(caught.value) == PREPARE + text


def test_all_wrong_options_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        RowFields(labels="l", prompt="p", text="t").check("auto")
    assert [problem.path for problem in caught.value.problems] == [
        "--prompt-field",
        "--labels-field",
        "--prompt-field",
    ]


@pytest.mark.parametrize(
    "fields",
    [
        RowFields(),
        RowFields(text="t", id="i"),
        RowFields(tokens="t", labels="l"),
        RowFields(messages="m"),
        RowFields(messages="m", tools="t"),
        RowFields(messages="c", prompt="p"),
        RowFields(prompt="p", input="i", completion="c"),
        RowFields(prompt="p", completion="c", id="p"),
    ],
)
def test_options_that_go_together_pass(fields: RowFields) -> None:
    fields.check("auto")


def test_fields_for_sources_that_have_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"^--messages-field='m': no source has rows with fields \(the first: "):
        list_units(SourceSpec(paths=(str(tmp_path),), fields=RowFields(messages="m")))


def test_rows_become_documents_of_their_kind() -> None:
    tokens = row_content({"tokens": [1, 2], "labels": [-100, 2]}, "tokens")
    assert isinstance(tokens, TokenRow) and tokens.labels is not None
    assert (tokens.tokens.tolist(), tokens.labels.tolist()) == ([1, 2], [-100, 2])
    array = row_content({"tokens": np.array([3, 4], dtype=np.uint16)}, "tokens")
    assert isinstance(array, TokenRow) and array.tokens.dtype == np.int64 and array.labels is None
    chat = row_content({"messages": [{"role": "user", "content": "hi", "name": None}]}, "messages")
    assert chat == ChatRow(messages=({"role": "user", "content": "hi"},))
    completion = row_content({"prompt": "", "completion": "c"}, "completion")
    assert completion == CompletionRow(prompt="", completion="c")


@pytest.mark.parametrize(
    ("kind", "row", "reason"),
    [
        ("tokens", {"tokens": []}, "empty"),
        ("tokens", {"tokens": None}, "the tokens are missing, not a list of integers"),
        ("tokens", {"tokens": "abc"}, "the tokens are of type str, not a list of integers"),
        ("tokens", {"tokens": [1, 2.0]}, "the tokens are no list of integers: item 1 is of type float"),
        ("tokens", {"tokens": [True]}, "the tokens are no list of integers: item 0 is of type bool"),
        ("tokens", {"tokens": [1, None]}, "the tokens are no list of integers: item 1 is missing"),
        ("tokens", {"tokens": [1 << 70]}, "the tokens do not fit 64 bits"),
        ("tokens", {"tokens": [1], "labels": [1, 2]}, "2 labels for 1 tokens"),
        ("messages", {"messages": "{"}, f"the messages are no JSON: {BROKEN}"),
        ("messages", {"messages": '"hi"'}, "the messages are of type str, not a list"),
        ("messages", {"messages": [HELLO], "prompt": 3}, "the messages of the prompt are of type int, not a list"),
        ("messages", {"messages": []}, "empty"),
        ("messages", {"messages": ["hi"]}, "message 0 is of type str, not an object with role and content"),
        ("messages", {"messages": [{"content": "hi"}]}, "message 0 has no role"),
        ("messages", {"messages": [{"role": "user"}]}, "message 0 (user): the content is missing, not a string"),
        ("messages", {"messages": [{"role": "user", "content": "\ud800"}]}, "a lone surrogate at character 0"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "url": "b"}]}]},
            'message 0 (user): part 1 of the content is "image", not text',
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": ["a"]}]},
            "message 0 (user): part 0 of the content is of type str, not an object with a type",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "message 0 (user): the text of part 0 is missing, not a string",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
            "a lone surrogate at character 0",
        ),
        ("messages", {"messages": [HELLO], "tools": "{"}, f"the tools are no JSON: {BROKEN}"),
        ("messages", {"messages": [HELLO], "tools": {"name": "f"}}, "the tools are of type dict, not a list"),
        ("messages", {"messages": [HELLO], "tools": '["f"]'}, "tool 0 is of type str, not an object"),
        ("messages", {"messages": [HELLO], "tools": [{"name": "\ud800"}]}, "a lone surrogate at character 0"),
        ("completion", {"prompt": "p", "completion": ""}, "the completion is empty"),
        ("completion", {"prompt": "p", "input": 0, "completion": "c"}, "the input is of type int, not a string"),
        ("completion", {"prompt": None, "completion": "c"}, "the prompt is missing, not a string"),
    ],
)
def test_what_is_no_document_says_why(kind: Any, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError) as caught:
        row_content(row, kind)
    assert str(caught.value) == reason


def test_parts_of_text_are_joined_as_transformers_joins_them() -> None:
    parts = [{"type": "text", "text": text, "image_url": None} for text in ("see", " this ", "")]
    for content, expected in ((parts, "see  this  "), (parts[:1], "see"), ([], "")):
        row = row_content({"messages": [{"role": "user", "content": content}]}, "messages")
        assert row == ChatRow(messages=({"role": "user", "content": expected},))


@pytest.mark.parametrize("value", [None, "", [], "[]", "null"])
def test_a_row_without_tools_is_a_chat(value: object) -> None:
    assert row_content({"messages": [HELLO], "tools": value}, "messages") == ChatRow(messages=(HELLO,))


def test_tools_are_a_list_or_its_json() -> None:
    tools = [{"name": "f", "parameters": {"a": {"type": "int"}, "b": None, "required": ["a"]}, "strict": False}]
    for value in (tools, json.dumps(tools)):
        row = row_content({"messages": [HELLO], "tools": value}, "messages")
        assert isinstance(row, ChatRow) and list(row.tools) == tools


def test_a_rows_own_id_is_text() -> None:
    assert [row_id(value) for value in ("a-1", 17, None)] == ["a-1", "17", ""]
    with pytest.raises(RowError, match=r"the id is of type list, not a string or an integer"):
        row_id([1])


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"id": 1, "messages": [], "tools": []}, "--messages-field messages --tools-field tools"),
        ({"conversations": [], "text": ""}, "--messages-field conversations"),
        ({"instruction": "", "input": "", "output": ""}, None),
        ({"prompt": "", "response": ""}, "--prompt-field prompt --completion-field response"),
        ({"question": "", "answer": ""}, "--prompt-field question --completion-field answer"),
        ({"input_ids": [], "labels": [], "attention_mask": []}, "--tokens-field input_ids --labels-field labels"),
        ({"content": "", "path": ""}, "--text-field content"),
        ({"a": "", "b": ""}, ""),
    ],
)
def test_the_options_that_fit_the_fields_of_rows_are_named(row: dict[str, object], options: str | None) -> None:
    if options is None:
        options = "--prompt-field instruction --input-field input --completion-field output"
    assert fitting_options([*row]) == options
    roles = re.findall(r"--(\w+)-field (\w+)", options)
    RowFields.from_options({f"{role}_field": name for role, name in roles}).check("auto")


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.jsonl.gz", "chats.json", "list.json"])
def test_rows_without_the_field_are_refused_before_they_are_read_with_the_option_that_fits(
    tmp_path: Path, name: str
) -> None:
    rows = [{"id": number, "messages": [{"role": "user", "content": "q"}]} for number in range(3)]
    text = json.dumps(rows) if name == "list.json" else "\n".join(map(json.dumps, rows))
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    request = PrepareRequest(sources=SourceSpec(paths=(str(tmp_path / name),)), out=tmp_path / "out")
    with pytest.raises(UserError) as caught:
        listed(request)
    hint = ", or --kind text for whole files" if name.endswith("json") else ""
    assert str(caught.value) == (
        f"--text-field=text: none of the first rows of {tmp_path / name} has such a field; the fields are 'id', "
        f"'messages'; use --messages-field messages{hint}"
    )
    # Beside other documents they are left out and listed.
    (tmp_path / "a.txt").write_text("a text")
    assert listed(replace(request, sources=SourceSpec(paths=(str(tmp_path),)))).units
