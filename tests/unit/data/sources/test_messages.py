"""Conversations in the forms of OpenAI, of ShareGPT, and of TRL's prompts and completions of messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.extraction import RawDocument, read_unit
from ray_ulysses.data.sources.rows import (
    CompletionRow,
    RowError,
    RowFields,
    TokenRow,
    conversation,
    row_content,
    row_weight,
)
from ray_ulysses.data.sources.units import SourceSpec, list_units
from tests.local_preparation import prepare_local
from tests.unit.data.tokenize.test_chat import chat_tokenizer
from tests.unit.data.tokenize.test_supervision import reasons_of, supervised_of

OPENAI = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
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


def test_messages_of_sharegpt_are_those_of_openai() -> None:
    assert conversation(SHAREGPT) == conversation(OPENAI)


def test_other_names_of_senders_and_calls_that_are_objects() -> None:
    said = [{"from": "user", "value": "u"}, {"from": "function_call", "value": [{"name": "f", "arguments": "{}"}]}]
    said += [{"from": "tool", "value": "t"}, {"from": "assistant", "value": "a", "weight": 0}]
    assert conversation(said).messages == (
        {"role": "user", "content": "u"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "a", "weight": 0},
    )


def test_messages_may_be_stored_as_json() -> None:
    assert conversation(json.dumps(SHAREGPT)) == conversation(OPENAI)
    assert conversation(json.dumps(OPENAI[2:]), prompt=json.dumps(OPENAI[:2])) == conversation(OPENAI)


def test_what_the_assistant_said_in_a_prompt_is_not_learned() -> None:
    first = conversation(OPENAI[4:], prompt=OPENAI[:4])
    assert [message.get("weight") for message in first.messages] == [None, None, 0, None, None]
    assert conversation(OPENAI, prompt=None) == conversation(OPENAI)


@pytest.mark.parametrize(
    ("messages", "prompt", "reason"),
    [
        (
            [{"from": "bard", "value": "x"}],
            None,
            "message 0 is from 'bard', which is none of human, user, gpt, assistant, system, observation, tool, "
            "function_call",
        ),
        ([{"from": "human"}], None, "message 0 (user): the content is missing, not a string"),
        ([{"from": "human", "value": 3}], None, "message 0 (user): the content is of type int, not a string"),
        (
            [{"from": "function_call", "value": "jump"}],
            None,
            "the calls of message 0 are no JSON: Expecting value: line 1 column 1 (char 0)",
        ),
        (
            [{"from": "function_call", "value": f'{{"name": "f", "arguments": {"[" * 600 + "]" * 600}}}'}],
            None,
            "the calls of message 0 are nested more than 100 deep",
        ),
        (
            [{"from": "function_call", "value": '{"name": "f"}'}],
            None,
            "message 0 (function_call): a call has no name or no arguments",
        ),
        ([{"from": "gpt", "value": "x"}], [{"role": "user"}], "message 0 (user): the content is missing, not a string"),
        ([{"role": "assistant"}], [OPENAI[1]], "message 1 (assistant): the content is missing, not a string"),
        ([], [OPENAI[1]], "empty"),
    ],
)
def test_what_is_no_conversation_says_why(messages: Any, prompt: Any, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        conversation(messages, prompt=prompt)
    assert str(caught.value) == reason


def test_an_instruction_is_put_into_the_prompt_of_alpaca_with_its_input_or_without() -> None:
    row = {"prompt": "Add.", "input": "1 2", "completion": "3"}
    with_input = row_content(row, "completion")  # type: ignore[arg-type]
    assert with_input == CompletionRow(
        prompt="Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:",
        completion="3",
    )
    without = CompletionRow(
        prompt="Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\n\n### Instruction:\nAdd.\n\n### Response:",
        completion="3",
    )
    for given in ("", None):
        assert row_content({**row, "input": given}, "completion") == without  # type: ignore[arg-type]


def test_messages_in_the_fields_of_texts_are_told_their_options() -> None:
    with pytest.raises(RowError) as caught:
        row_content({"prompt": OPENAI[:2], "completion": OPENAI[4:]}, "completion")
    assert str(caught.value) == (
        "the prompt is a list; if it holds messages, name the completion's by --messages-field, and those before "
        "them by --prompt-field"
    )


def test_a_loss_mask_of_booleans_is_one_of_numbers() -> None:
    content = row_content({"tokens": [5, 6, 7]}, "tokens")
    assert isinstance(content, TokenRow)
    masks = (row_weight(mask, content) for mask in ([False, True, True], [0, 1, 1]))
    assert [mask.tolist() for mask in masks if not isinstance(mask, float)] == [[0.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_form_of_one_conversation_gives_the_same_tokens_and_spans(tmp_path: Path, kind: str) -> None:
    said = [{"role": "user", "content": "the fox?"}, {"role": "assistant", "content": " jumps"}]
    shared = [{"from": "human", "value": "the fox?"}, {"from": "gpt", "value": " jumps"}]
    forms: list[tuple[dict[str, Any], RowFields]] = [
        ({"m": said}, RowFields(messages="m")),
        ({"m": shared}, RowFields(messages="m")),
        ({"m": json.dumps(said)}, RowFields(messages="m")),
        ({"p": said[:1], "c": said[1:]}, RowFields(messages="c", prompt="p")),
    ]
    tokenizer, digests = str(chat_tokenizer(tmp_path / "tokenizer")), []
    for number, (row, fields) in enumerate(forms):
        path = tmp_path / f"rows-{number}.{kind}"
        if kind == "jsonl":
            path.write_text(json.dumps(row) + "\n")
        else:
            pq.write_table(pa.Table.from_pylist([row]), path)
        spec = SourceSpec(paths=(str(path),), fields=fields)
        corpus = prepare_local(PrepareRequest(sources=spec, out=tmp_path / f"out-{number}", tokenizer=tokenizer))
        assert reasons_of(corpus) == []
        digests.append(corpus.digests().tolist())
    assert digests == [digests[0]] * len(forms)


def test_a_null_is_left_out_where_parquet_filled_it_in_and_kept_where_json_lines_have_it(tmp_path: Path) -> None:
    """A column of structs gives each call the arguments of all, null where a call has none of that name."""

    def asking(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [call]}]

    def content_of(path: Path) -> list[Any]:
        fields = RowFields.from_options({"messages_field": "m", "tools_field": "t"})
        units, _ = list_units(SourceSpec(paths=(str(path),), fields=fields))
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


def test_of_a_completion_of_messages_the_prompts_turns_are_not_learned(tmp_path: Path) -> None:
    said = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": said[:3], "completion": said[3:]}) + "\n")
    spec = SourceSpec(paths=(str(path),), fields=RowFields(messages="completion", prompt="prompt"))
    corpus = prepare_local(PrepareRequest(sources=spec, out=tmp_path / "out"))
    learned = bytes(token for token in supervised_of(corpus, 0) if token < 256).decode()
    assert "four" in learned and "two" not in learned
