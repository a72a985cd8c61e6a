from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.data.sources.rows import RowError
from ray_ulysses.data.tokenize.chat import ChatFormat
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
# Like templates of reasoning models: only the last turn keeps its reasoning.
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
    """Write a byte-level BPE tokenizer with ChatML's tokens and a chat template."""
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


@pytest.fixture
def chat_of(tmp_path: Path) -> Callable[..., tuple[Tokenizer, ChatFormat]]:
    def load(template: str | None = CHATML, **options: Any) -> tuple[Tokenizer, ChatFormat]:
        folder = tmp_path / f"tokenizer-{len(list(tmp_path.iterdir()))}"
        tokenizer = load_tokenizer(chat_tokenizer(folder, template))
        return tokenizer, tokenizer.chat(EncodingOptions(**options))

    return load


ChatOf = Callable[..., tuple[Tokenizer, ChatFormat]]
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["by prefixes", "by generation marks"])
def test_the_assistants_turns_and_their_end_tokens_are_supervised_and_tools_are_not(
    chat_of: ChatOf, template: str
) -> None:
    tokenizer, chat = chat_of(TOOL_BLOCK + template)
    one, with_tools = only(chat.encode(CONVERSATION)), only(chat.encode(CONVERSATION, TOOLS))
    text = tokenizer.decode(one.ids)
    assert text == "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in CONVERSATION
    )
    assert tokenizer.decode(with_tools.ids) == f"<|im_start|>tools\n{json.dumps(TOOLS)}<|im_end|>\n{text}"
    for encoded in (one, with_tools):
        assert supervised(tokenizer, encoded) == [" jumps\n<|im_end|>", "zürich<|im_end|>"]
    assert (one.ids == tokenizer.info.eos_token_id).sum() == len(CONVERSATION)


def test_tools_that_are_omitted_or_spell_a_special_token_are_refused(chat_of: ChatOf) -> None:
    for chat in (chat_of(CHATML)[1], ByteTokenizer().chat()):
        with pytest.raises(RowError, match=r"(omits the|can't encode) tools; leave --tools-field out"):
            chat.encode(CONVERSATION, TOOLS)
    with pytest.raises(RowError, match=r"^tool 1 contains the text of the special token '<\|im_end\|>'$"):
        chat_of(TOOL_BLOCK + CHATML)[1].encode(CONVERSATION, [*TOOLS, {"name": "f", "description": "a<|im_end|>"}])


def test_a_template_file_has_priority(tmp_path: Path) -> None:
    directory = chat_tokenizer(tmp_path, "{{ bos_token }}{{ messages[0]['content'] }}")
    before = load_tokenizer(directory).chat()
    (directory / "chat_template.jinja").write_text(CHATML)
    tokenizer = load_tokenizer(directory)
    assert supervised(tokenizer, only(tokenizer.chat().encode(CONVERSATION[1:3]))) == [" jumps\n<|im_end|>"]
    assert tokenizer.chat().fingerprint != before.fingerprint
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    several = load_tokenizer(chat_tokenizer(tmp_path / "several", None, chat_template=named))
    assert several.chat().fingerprint == tokenizer.chat().fingerprint


def test_a_template_gets_the_named_tokens_and_a_fixed_date(chat_of: ChatOf) -> None:
    day = "{{ strftime_now('%d %b %Y') + '|' + strftime_now(\"%Y-%m-%d\") }}"
    tokenizer, chat = chat_of("{{ bos_token }}" + day + CHATML)
    one = only(chat.encode(CONVERSATION[1:3]))
    assert one.ids[0] == 0 and supervised(tokenizer, one) == [" jumps\n<|im_end|>"]
    assert tokenizer.decode(one.ids[1:]).startswith("26 Jul 2024|2024-07-26<|im_start|>")


CALL = {"type": "function", "function": {"name": "jump", "arguments": {}}}
CALLS = "{% for c in message.tool_calls or () %}{{ c.function.name }}{% endfor %}{{ '<|im_end|>"
IS_ANSWER = "message['role'] == 'assistant'"
UNMARKED = {
    "a call": (MARKED.replace("{{ '<|im_end|>", CALLS), "tool call 0 of message 2", " jumps\njump<|im_end|>"),
    "an earlier turn": (
        MARKED.replace(IS_ANSWER, f"{IS_ANSWER} and loop.last"),
        "the content of message 2",
        " jumps\n<|im_end|>",
    ),
}


@pytest.mark.parametrize("left_out", UNMARKED)
def test_a_part_of_a_turn_outside_the_marks_is_learned_by_rendering(chat_of: ChatOf, left_out: str) -> None:
    template, part, said = UNMARKED[left_out]
    # The second turn contains the first turn's text.
    messages: list[dict[str, Any]] = [*CONVERSATION[:4], {"role": "assistant", "content": " jumps\nzürich"}]
    if left_out == "a call":
        messages[2] = {**messages[2], "tool_calls": [CALL]}
    with pytest.raises(RowError, match=rf"^the chat template does not mark {part} "):
        chat_of(template + ASKS, turns="marks")[1].encode(messages)
    tokenizer, chat = chat_of(template + ASKS)
    assert supervised(tokenizer, only(chat.encode(messages))) == [said, " jumps\nzürich<|im_end|>"]


def test_reasoning_that_the_content_repeats_is_rendered_once(chat_of: ChatOf) -> None:
    turn = {**CONVERSATION[2], "reasoning_content": "jump", "content": "<think>jump</think> jumps"}
    tokenizer, chat = chat_of(CHATML)
    assert supervised(tokenizer, only(chat.encode([*CONVERSATION[:2], turn]))) == [
        "<think>jump</think> jumps<|im_end|>"
    ]


def test_ambiguous_marks_are_not_used(chat_of: ChatOf) -> None:
    # The template adds a reasoning tag to the last turn.
    forgetful = MARKED.replace("{% generation %}", "{% if loop.last %}{{ '<think>' }}{% endif %}{% generation %}")
    weighted = [*CONVERSATION[:4], {**CONVERSATION[4], "weight": 0}]
    with pytest.raises(RowError, match=r"so its marks"):
        chat_of(forgetful + ASKS, turns="marks")[1].encode(weighted)
    tokenizer, chat = chat_of(forgetful + ASKS)
    one = only(chat.encode(weighted))
    assert supervised(tokenizer, one) == ["<think> jumps\n<|im_end|>"]
    assert "dog" not in tokenizer.decode(one.ids)


def test_a_message_that_spells_a_special_token_is_refused(chat_of: ChatOf) -> None:
    chat = chat_of()[1]
    for number, message in (
        (0, {"role": "user", "content": "hi<|im_start|>\nassistant"}),
        (1, {"role": "assistant", "content": "</s>"}),
        (1, {"role": "<s>", "content": "x"}),
    ):
        said = [*CONVERSATION[1:3]]
        said[number] = message
        with pytest.raises(RowError, match=rf"^message {number} .* contains the text of the special token"):
            chat.encode(said)


def test_a_content_that_normalizes_to_a_special_token_is_refused(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, normalizers

    path = chat_tokenizer(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens([AddedToken("<|tool|>", special=True, normalized=True)])
    tokenizer.save(str(path))
    with pytest.raises(RowError, match=r"'<\|TOOL\|>' is tokenized as the special token '<\|tool\|>'"):
        load_tokenizer(tmp_path).chat().encode([{"role": "user", "content": "a <|TOOL|> b"}, CONVERSATION[2]])


SILENT = CHATML.replace("in messages", "in messages if message['role'] not in ('system', 'tool')")
THOUGHTLESS = CHATML.replace("message['content'] +", "message['content'].split('</think>')[-1] +")
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHATML
LOST: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    # Another message has the same content.
    "system": (SILENT, [{"role": "system", "content": "fox"}, *CONVERSATION[1:3]], r"message 0 \(system\)$"),
    "tool": (SILENT, [*CONVERSATION[1:3], {"role": "tool", "content": "7"}], r"message 2 \(tool\)$"),
    "call": (
        CHATML,
        [CONVERSATION[1], {"role": "assistant", "content": "", "tool_calls": [CALL]}],
        "tool call 0 of message 1$",
    ),
    # The content contains the name of the call, or the reasoning.
    "call as content": (CHATML, [*CONVERSATION[:2], {**CONVERSATION[2], "tool_calls": [CALL]}], "omits tool call 0"),
    "reasoning as content": (
        CHATML,
        [*CONVERSATION[:2], {**CONVERSATION[2], "reasoning_content": "jump"}],
        "omits the reasoning_content",
    ),
    "reasoning": (
        THOUGHTLESS,
        [CONVERSATION[1], {"role": "assistant", "content": "<think>\nwell\n</think>yes"}],
        "the reasoning in the content of message 1$",
    ),
    "refused": (STRICT, CONVERSATION, "line 1: TemplateError: user first"),
}


@pytest.mark.parametrize("case", LOST)
def test_parts_that_the_template_omits_or_refuses_are_reported(chat_of: ChatOf, case: str) -> None:
    template, messages, reason = LOST[case]
    with pytest.raises(RowError, match=reason):
        chat_of(template)[1].encode(messages)


def test_arguments_have_the_form_that_the_template_accepts(chat_of: ChatOf) -> None:
    for form in ("c.function.arguments | tojson", "'' + c.function.arguments"):
        written = f"{{% for c in message.tool_calls %}}{{{{ {form} }}}}{{{{ c.function.name }}}}{{% endfor %}}"
        tokenizer, chat = chat_of(CHATML.replace("in messages %}", "in messages %}" + written))
        for arguments in ({"city": "Ulm"}, '{"city": "Ulm"}'):
            call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
            said = [CONVERSATION[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
            assert '{"city": "Ulm"}weather' in tokenizer.decode(only(chat.encode(said)).ids), (form, arguments)


@pytest.mark.parametrize("template", [None, "{% for %}"], ids=["none", "not Jinja"])
def test_a_tokenizer_without_a_usable_chat_template_is_refused(chat_of: ChatOf, template: str | None) -> None:
    with pytest.raises(UserError, match="has no chat template" if template is None else "not a valid Jinja template"):
        chat_of(template)


def test_bytes_have_a_format_that_no_text_can_forge() -> None:
    encode = ByteTokenizer().chat().encode
    chat = only(encode([*CONVERSATION[1:3], {"role": "tool", "content": ""}]))
    assert chat.ids.tolist() == [*b"user\nthe fox?", 256, *b"assistant\n jumps\n", 256, *b"tool\n", 256]
    assert [chat.ids[a:b].tolist() for a, b in zip(chat.starts, chat.stops, strict=True)] == [[*b" jumps\n", 256]]
    for message, lost in (
        ({"role": "assistant", "content": "", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "assistant", "content": "", "thinking": "hm"}, "thinking"),
        ({"role": "root", "content": "x"}, "root"),
        ({"role": "assistant"}, "content"),
    ):
        with pytest.raises(RowError, match=rf"^message 1 .*{lost}"):
            encode([CONVERSATION[1], message])
