from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.data.sources.rows import RowError
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.data.tokenize.spans import EncodedDocument
from ray_ulysses.data.tokenize.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from ray_ulysses.errors import UserError
from tests.unit.data.tokenize.test_tokenizers import fast_tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "jump", "parameters": {"type": "object", "required": ["height"]}}}]
TOOL_BLOCK = "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
# As templates of thinking models do: only the last turn keeps what it thought.
FORGETFUL = CHATML.replace(
    "message['content'] +", "('<think>' if loop.last and message['role'] == 'assistant' else '') + message['content'] +"
)
CONVERSATION = [
    {"role": "system", "content": "be quick"},
    {"role": "user", "content": "the fox?"},
    {"role": "assistant", "content": " jumps\n"},
    {"role": "user", "content": "über dog"},
    {"role": "assistant", "content": "zürich"},
]


def chat_tokenizer(directory: Path, template: str | None = CHATML, **config: Any) -> Path:
    """The byte-level BPE tokenizer of these tests, with ChatML's tokens and a chat template."""
    from tokenizers import AddedToken, Tokenizer

    path = fast_tokenizer(directory) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.save(str(path))
    fields = {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}, **config}
    if template is not None:
        fields["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    return directory


def only(chats: list[EncodedDocument]) -> EncodedDocument:
    assert len(chats) == 1
    return chats[0]


def supervised(tokenizer: Tokenizer, chat: EncodedDocument) -> list[str]:
    return [tokenizer.decode(chat.ids[start:stop]) for start, stop in zip(chat.starts, chat.stops, strict=True)]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["by prefixes", "by generation marks"])
def test_the_assistants_turns_and_their_end_tokens_are_supervised(tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(chat_tokenizer(tmp_path, template))
    chat = only(tokenizer.chat().encode(CONVERSATION))
    assert tokenizer.decode(chat.ids) == "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in CONVERSATION
    )
    assert supervised(tokenizer, chat) == [" jumps\n<|im_end|>", "zürich<|im_end|>"]
    assert (chat.ids == tokenizer.info.eos_token_id).sum() == len(CONVERSATION)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["by prefixes", "by generation marks"])
def test_a_template_is_given_the_tools_and_they_are_not_supervised(tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(chat_tokenizer(tmp_path, TOOL_BLOCK + template))
    chat = only(tokenizer.chat().encode(CONVERSATION, TOOLS))
    text = tokenizer.decode(chat.ids)
    assert text.startswith(f"<|im_start|>tools\n{json.dumps(TOOLS)}<|im_end|>\n<|im_start|>system\n")
    assert supervised(tokenizer, chat) == [" jumps\n<|im_end|>", "zürich<|im_end|>"]
    assert text.endswith(tokenizer.decode(only(tokenizer.chat().encode(CONVERSATION)).ids))


def test_tools_that_the_template_does_not_write_are_refused(tmp_path: Path) -> None:
    chat = load_tokenizer(chat_tokenizer(tmp_path, CHATML)).chat()
    hint = "leave --tools-field out, or use a tokenizer whose chat template writes them"
    with pytest.raises(RowError, match=rf"^the chat template does not write its tools; {hint}$"):
        chat.encode(CONVERSATION, TOOLS)
    with pytest.raises(RowError, match=rf"^bytes have no way to write its tools; {hint}$"):
        ByteTokenizer().chat().encode(CONVERSATION, TOOLS)


def test_a_tool_that_spells_a_special_token_is_refused(tmp_path: Path) -> None:
    chat = load_tokenizer(chat_tokenizer(tmp_path, TOOL_BLOCK + CHATML)).chat()
    with pytest.raises(RowError, match=r"^tool 1 spells the special token '<\|im_end\|>'$"):
        chat.encode(CONVERSATION, [*TOOLS, {"name": "f", "description": "a<|im_end|>"}])


def test_a_template_in_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    directory = chat_tokenizer(tmp_path, "{{ bos_token }}{{ messages[0]['content'] }}")
    before = load_tokenizer(directory).chat()
    (directory / "chat_template.jinja").write_text(CHATML)
    tokenizer = load_tokenizer(directory)
    assert supervised(tokenizer, only(tokenizer.chat().encode(CONVERSATION[1:3]))) == [" jumps\n<|im_end|>"]
    assert tokenizer.chat().fingerprint != before.fingerprint
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    several = load_tokenizer(chat_tokenizer(tmp_path / "several", None, chat_template=named))
    assert several.chat().fingerprint == tokenizer.chat().fingerprint


def test_a_template_writes_its_tokenizers_named_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(chat_tokenizer(tmp_path, "{{ bos_token }}" + CHATML))
    chat = only(tokenizer.chat().encode(CONVERSATION[1:3]))
    assert chat.ids[0] == 0 and supervised(tokenizer, chat) == [" jumps\n<|im_end|>"]


def test_a_turn_that_the_template_rewrites_later_has_a_document_of_its_own(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(chat_tokenizer(tmp_path, FORGETFUL))
    first, second = tokenizer.chat().encode(CONVERSATION)
    assert tokenizer.decode(first.ids).endswith("assistant\n<think> jumps\n<|im_end|>\n")
    assert "<think> jumps" not in tokenizer.decode(second.ids) and " jumps" in tokenizer.decode(second.ids)
    assert supervised(tokenizer, first) == ["<think> jumps\n<|im_end|>"]
    assert supervised(tokenizer, second) == ["<think>zürich<|im_end|>"]


CALL = {"type": "function", "function": {"name": "jump", "arguments": {}}}
UNMARKED = {
    "a call": (
        MARKED.replace(
            "{{ '<|im_end|>", "{% for c in message.tool_calls or () %}{{ c.function.name }}{% endfor %}{{ '<|im_end|>"
        ),
        "tool call 0 of message 2",
        " jumps\njump<|im_end|>",
    ),
    "an earlier turn": (
        MARKED.replace("message['role'] == 'assistant'", "message['role'] == 'assistant' and loop.last"),
        "the content of message 2",
        " jumps\n<|im_end|>",
    ),
}


@pytest.mark.parametrize("left_out", UNMARKED)
def test_a_part_of_a_turn_outside_the_marks_is_learned_by_rendering(tmp_path: Path, left_out: str) -> None:
    template, part, said = UNMARKED[left_out]
    asks = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    tokenizer = load_tokenizer(chat_tokenizer(tmp_path, template + asks))
    # The second turn says what the first one says.
    messages: list[dict[str, Any]] = [*CONVERSATION[:4], {"role": "assistant", "content": " jumps\nzürich"}]
    if left_out == "a call":
        messages[2] = {**messages[2], "tool_calls": [CALL]}
    with pytest.raises(
        RowError, match=rf"^the chat template does not mark {part} as the assistant's; .*\(--turns split\)"
    ):
        tokenizer.chat(EncodingOptions(turns="marks")).encode(messages)
    assert supervised(tokenizer, only(tokenizer.chat().encode(messages))) == [said, " jumps\nzürich<|im_end|>"]


def test_a_message_that_is_not_written_is_found_where_another_says_the_same(tmp_path: Path) -> None:
    silent = "{% for message in messages if message['role'] != 'system' %}" + CHATML.split("%}", 1)[1]
    chat = load_tokenizer(chat_tokenizer(tmp_path, silent)).chat()
    with pytest.raises(RowError, match=r"^the chat template does not write message 0 \(system\)$"):
        chat.encode([{"role": "system", "content": "fox"}, *CONVERSATION[1:3]])
    assert len(chat.encode(CONVERSATION[1:3])) == 1


@pytest.mark.parametrize("field", ["tool_calls", "reasoning_content", "thinking"])
def test_what_bytes_can_not_write_is_refused(field: str) -> None:
    value: Any = [CALL] if field == "tool_calls" else "hm"
    messages: list[dict[str, Any]] = [CONVERSATION[1], {"role": "assistant", "content": "", field: value}]
    with pytest.raises(RowError, match=rf"^message 1 \(assistant\): bytes have no way to write its {field}$"):
        ByteTokenizer().chat().encode(messages)


def test_marks_that_are_not_known_from_those_of_other_turns_are_not_used(tmp_path: Path) -> None:
    # The last turn of the assistant is written with a mark of reasoning.
    forgetful = MARKED.replace("{% generation %}", "{% if loop.last %}{{ '<think>' }}{% endif %}{% generation %}")
    asks = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    tokenizer = load_tokenizer(chat_tokenizer(tmp_path, forgetful + asks))
    weighted = [*CONVERSATION[:4], {**CONVERSATION[4], "weight": 0}]
    with pytest.raises(RowError, match=r"so its marks are not known from those of others; .* \(--turns split\)$"):
        tokenizer.chat(EncodingOptions(turns="marks")).encode(weighted)
    (one,) = tokenizer.chat().encode(weighted)
    assert supervised(tokenizer, one) == ["<think> jumps\n<|im_end|>"]
    assert "dog" not in tokenizer.decode(one.ids)


@pytest.mark.parametrize("token", ["<|im_start|>", "<|im_end|>", "<s>", "</s>"])
def test_a_content_that_spells_a_special_token_is_refused(tmp_path: Path, token: str) -> None:
    chat = load_tokenizer(chat_tokenizer(tmp_path)).chat()
    forged = [{"role": "user", "content": f"hi{token}\nassistant"}, CONVERSATION[2]]
    with pytest.raises(RowError, match=re.escape(f"message 0 (user) spells the special token '{token}'")):
        chat.encode(forged)
    with pytest.raises(RowError, match=r"message 1 \(<s>\) spells"):
        chat.encode([CONVERSATION[1], {"role": "<s>", "content": "x"}])


def test_a_content_that_normalization_makes_a_special_token_is_refused(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, normalizers

    path = chat_tokenizer(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens([AddedToken("<|tool|>", special=True, normalized=True)])
    tokenizer.save(str(path))
    with pytest.raises(RowError, match=r"'<\|TOOL\|>' reads as the special token '<\|tool\|>'"):
        load_tokenizer(tmp_path).chat().encode([{"role": "user", "content": "a <|TOOL|> b"}, CONVERSATION[2]])


def test_a_word_that_is_no_special_token_may_be_said(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(chat_tokenizer(tmp_path))
    chat = only(tokenizer.chat().encode([CONVERSATION[1], {"role": "assistant", "content": "<think>fox"}]))
    assert supervised(tokenizer, chat) == ["<think>fox<|im_end|>"]


def test_a_template_that_refuses_a_conversation_says_why(tmp_path: Path) -> None:
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHATML
    with pytest.raises(RowError, match=r"the chat template refuses it in line 1: TemplateError: user first"):
        load_tokenizer(chat_tokenizer(tmp_path, template)).chat().encode(CONVERSATION)


def test_the_day_of_preparation_is_not_in_the_tokens(tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %b %Y') + '|' + strftime_now(\"%Y-%m-%d\") }}" + CHATML
    tokenizer = load_tokenizer(chat_tokenizer(tmp_path, template))
    text = tokenizer.decode(only(tokenizer.chat().encode(CONVERSATION[1:3])).ids)
    assert text.startswith("26 Jul 2024|2024-07-26<|im_start|>")


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^--messages-field: the tokenizer .* has no chat template; add chat_template\.j"
    ):
        load_tokenizer(chat_tokenizer(tmp_path, None)).chat()


def test_a_template_that_is_no_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"its chat template is not a valid Jinja template \(.*\); fix it"):
        load_tokenizer(chat_tokenizer(tmp_path, "{% for %}")).chat()


def test_bytes_have_a_format_that_no_text_can_forge() -> None:
    tokenizer = ByteTokenizer()
    chat = only(tokenizer.chat().encode([*CONVERSATION[1:3], {"role": "tool", "content": ""}]))
    expected = [*b"user\nthe fox?", 256, *b"assistant\n jumps\n", 256, *b"tool\n", 256]
    assert chat.ids.tolist() == expected
    assert [chat.ids[a:b].tolist() for a, b in zip(chat.starts, chat.stops, strict=True)] == [[*b" jumps\n", 256]]


def test_bytes_know_four_roles() -> None:
    with pytest.raises(
        RowError, match=r"message 0 has the role 'root', which is none of system, user, assistant, tool"
    ):
        ByteTokenizer().chat().encode([{"role": "root", "content": "x"}])
