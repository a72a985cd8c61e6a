"""Learned turns: they begin as in Transformers, end with a token to stop at, and forge no special token."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.commands.prepare import _result
from ray_ulysses.data.sources.rows import ChatRow, RowError, conversation
from ray_ulysses.data.tokenize.encoding import DocumentEncoder, load_encoder
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.data.tokenize.spans import EncodedDocument
from ray_ulysses.data.tokenize.tokenizers import load_tokenizer
from tests.breadth import fast_only
from tests.unit.data.tokenize.families import FAMILIES, Family, family_directory
from tests.unit.data.tokenize.test_chat import chat_tokenizer
from tests.unit.data.tokenize.test_encoding import forgeable_tokenizer
from tests.unit.data.tokenize.test_supervision import prepare_rows

Chat = list[dict[str, Any]]
BEFORE = ("ASSISTANT:", "ASSISTANT: ", "<|im_start|>assistant\n", "### Response:\n\n", "[/INST] ", "A ")
FIRST, LAST, AFTER = ("", " ", "\n"), ("", "</s>", "<|im_end|>\n", "\n", " "), ("", "</s>", "\n", " ", "<|im_end|>\n")
MARKED = list(itertools.product(BEFORE, FIRST, LAST, AFTER))
WORDS = ("It", "the", "fox", " quick", "\n", "\n\n", " ", "dog.", "Zürich", "猫", "🦊", "1", "lazy")


def marked_template(before: str, first: str, last: str, after: str, *, marks: bool = True) -> str:
    opens, closes = ("{% generation %}", "{% endgeneration %}") if marks else ("", "")
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ " + json.dumps(before) + " }}" + opens
        + "{{ " + json.dumps(first) + " + m.content + " + json.dumps(last) + " }}" + closes + "{{ " + json.dumps(after)
        + " }}{% else %}{{ 'USER: ' + m.content + ' ' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ " + json.dumps(before) + " }}{% endif %}"
    )  # fmt: skip


def expected_mask(reference: Any, said: Chat, special: frozenset[int]) -> tuple[list[int], list[int]]:
    """Return Transformers' tokens and mask, adjusted for the two documented differences."""
    found = reference.apply_chat_template(said, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask, offsets = found["input_ids"], list(found["assistant_masks"]), found.encodings[0].offsets
    text, end = reference.apply_chat_template(said, tokenize=False), 0
    for place, token in enumerate(ids):
        if mask[place]:
            end = offsets[place][1] if token in special else end
        elif place and mask[place - 1]:
            # Later bytes of a mark's last character, and a special token after a mark that does not include one.
            is_closed = not text[end : offsets[place - 1][1]].strip()
            mask[place] = int(offsets[place] == offsets[place - 1] or (token in special and not is_closed))
            end = offsets[place][1] if token in special else end
    return ids, mask


def compare_with_transformers(directory: Path, form: tuple[str, str, str, str], num: int) -> list[str]:
    """Return the random conversations whose learned tokens differ from Transformers' mask."""
    from transformers import AutoTokenizer

    rng, wrong = random.Random(repr(form)), []
    config: dict[str, Any] = {"eos_token": "</s>", "bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    marked = chat_tokenizer(directory / "marked", marked_template(*form), **config)
    plain = chat_tokenizer(directory / "plain", marked_template(*form, marks=False), **config)
    reference = AutoTokenizer.from_pretrained(marked)
    by_marks, by_rendering = (load_encoder(one, EncodingOptions(eos="none")) for one in (marked, plain))
    for _ in range(num):
        said = [
            {"role": role, "content": "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))}
            for _ in range(rng.randint(1, 3))
            for role in ("user", "assistant")
        ]
        ids, mask = expected_mask(reference, said, by_marks.tokenizer.special_ids)
        (chat,) = by_marks.chat.encode(said)
        ours = np.zeros(len(ids), np.int64)
        for start, stop in zip(chat.starts, chat.stops, strict=True):
            ours[start:stop] = 1
        if chat.ids.tolist() != ids or ours.tolist() != mask:
            wrong.append(f"marks {form}: {said} {ours.tolist()} {mask}")
        firsts = [place for place in range(len(ids)) if mask[place] and (place == 0 or not mask[place - 1])]
        (chat,) = by_rendering.chat.encode(said)
        if chat.starts.tolist() != firsts:
            wrong.append(f"rendering {form}: {said} {chat.starts.tolist()} {firsts}")
    return wrong


@pytest.mark.parametrize(
    "form",
    [("ASSISTANT: ", "", "</s>", "\n"), ("ASSISTANT:", " ", "<|im_end|>\n", ""), ("A ", "", "", "</s>")],
)
def test_a_turn_begins_with_the_token_of_its_first_character(tmp_path: Path, form: tuple[str, str, str, str]) -> None:
    assert compare_with_transformers(tmp_path, form, 8) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_marked_turns_are_those_of_transformers_for_every_border(tmp_path: Path) -> None:
    for number, form in enumerate(MARKED):
        assert compare_with_transformers(tmp_path / str(number), form, 3) == []


def learned_texts(encoder: DocumentEncoder, *documents: EncodedDocument) -> list[str]:
    return [
        encoder.tokenizer.decode(one.ids[start:stop])
        for one in documents
        for start, stop in zip(one.starts.tolist(), one.stops.tolist(), strict=True)
    ]


def end_names(encoder: DocumentEncoder, *documents: EncodedDocument) -> set[str]:
    return {encoder.tokenizer.decode(np.array([end])) for one in documents for end in one.turn_ends}


def ends_of(directory: Path, name: str, num: int) -> tuple[Counter[str], list[str]]:
    """Count the turns of random conversations by the token that ends them, and list errors."""
    family, rng, numbers, wrong = FAMILIES[name], random.Random(name), itertools.count(), []
    encoder = load_encoder(family_directory(directory, family))
    ends: Counter[str] = Counter()

    def distinct() -> str:
        return f"say {next(numbers)}. " + "".join(rng.choice(WORDS) for _ in range(rng.randint(0, 3))).strip() + "!"

    for _ in range(num):
        said = talk(rng, family, distinct)
        try:
            documents = encoder.encode(ChatRow(messages=tuple(said)))
        except RowError:
            ends["refused"] += 1
            continue
        learned = learned_texts(encoder, *documents)
        for message in said:
            for part in filter(None, (message["content"], message.get("reasoning_content", ""))):
                times = sum(text.count(part) for text in learned)
                if times != (message["role"] == "assistant"):
                    wrong.append(f"{part!r} of {message['role']} is learned {times} times: {said}")
        for document in documents:
            last = [encoder.tokenizer.decode(document.ids[stop - 1 : stop]) for stop in document.stops.tolist()]
            ends.update(last)
            is_open = [one not in family.special for one in last]
            if sum(is_open) != document.num_open or not set(encoder.tokenizer.special_ids) >= document.turn_ends:
                wrong.append(f"{document.num_open} open turns, but turns end with {last}: {said}")
    return ends, wrong


@pytest.mark.parametrize("name", fast_only(FAMILIES, "glm4.5", "joined"))
def test_every_turn_is_learned_once_and_ends_with_a_token_to_stop_at(tmp_path: Path, name: str) -> None:
    ends, wrong = ends_of(tmp_path, name, 8 if name in ("glm4.5", "joined") else 30)
    assert wrong == [] and ends.total() > 10
    # Falcon's earlier turns have no end token.
    assert name == "falcon" or set(ends) <= {*FAMILIES[name].special, "refused"}


def test_the_token_of_the_next_role_ends_a_turn(tmp_path: Path) -> None:
    directory = family_directory(tmp_path, FAMILIES["glm4.5"])
    said = [
        {"role": "user", "content": "hot?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "no", "reasoning_content": "7 is cold"},
        {"role": "user", "content": "fine"},
        {"role": "assistant", "content": "yes"},
    ]
    for eos, last in (("tokenizer", "|endoftext|>"), ("none", "/think>yes")):
        encoder = load_encoder(directory, EncodingOptions(eos=eos))
        documents = encoder.encode(ChatRow(messages=tuple(said)))
        ended = [text.rpartition("<")[2] for text in learned_texts(encoder, *documents)]
        assert ended == ["|user|>", "|observation|>", last]
        # A turn whose reasoning is dropped later has a document of its own, which ends with the next role's token.
        assert len(documents) == 2 and sum(one.num_open for one in documents) == (eos == "none")
        assert end_names(encoder, *documents) == {"<|observation|>", "<|user|>"}


def test_white_space_may_precede_the_token_of_the_next_role(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if not loop.first %}\n\n{% endif %}<|im_start|>{{ m.role }}\n"
        "{% if loop.last and m.role == 'assistant' %}{{ m.thinking }}.{% endif %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}\n\n<|im_start|>assistant\n{% endif %}"
    )
    said = [{"role": role, "content": "the lazy fox", "thinking": "dog"} for role in ("user", "assistant") * 2]
    for text in (template, template.replace("loop.last", "true")):
        encoder = load_encoder(chat_tokenizer(tmp_path / str(len(text)), text, eos_token="</s>"))
        documents = encoder.encode(ChatRow(messages=tuple(said)))
        assert learned_texts(encoder, *documents) == ["dog.the lazy fox\n<|im_start|>", "dog.the lazy fox</s>"]
        assert sum(one.num_open for one in documents) == 0


REASONED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.thinking }}{% endgeneration %}"
    "<|im_start|>{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
ENDED: dict[str, tuple[str, EncodingOptions, list[str], set[str]]] = {
    "the document's end comes after": (
        marked_template("A:", "", "<|im_end|>", "", marks=False),
        EncodingOptions(),
        ["dog<|im_end|>"],
        {"<|im_end|>"},
    ),
    "a chosen token that is not special": (
        marked_template("A:", "", "<think>\n", "", marks=False),
        EncodingOptions(eos="<think>"),
        ["dog<think>"],
        {"<think>"},
    ),
    # If only the reasoning is marked, the special token after it must not end texts before the answer.
    "a mark of a part ends nothing": (
        REASONED,
        EncodingOptions(turns="marks"),
        ["fox", "dog<|im_end|>"],
        {"<|im_end|>"},
    ),
}


@pytest.mark.parametrize("case", ENDED)
def test_a_turn_ends_with_its_own_end(tmp_path: Path, case: str) -> None:
    template, options, learned, ends = ENDED[case]
    encoder = load_encoder(chat_tokenizer(tmp_path, template, eos_token="</s>"), options)
    answer = {"role": "assistant", "content": "dog"} | ({"thinking": "fox"} if template == REASONED else {})
    (one,) = encoder.encode(ChatRow(messages=({"role": "user", "content": "a"}, answer)))
    assert learned_texts(encoder, one) == learned and end_names(encoder, one) == ends
    assert encoder.tokenizer.decode(one.ids[-1:]) == ("<think>" if options.eos == "<think>" else "</s>")


@pytest.mark.parametrize(("eos", "num_open"), [("tokenizer", 1), ("none", 2)])
def test_prepare_warns_of_turns_that_no_special_token_ends(tmp_path: Path, eos: str, num_open: int) -> None:
    tokenizer = str(family_directory(tmp_path / "tokenizer", FAMILIES["falcon"]))
    said = [{"role": role, "content": f"say {turn}"} for turn in range(2) for role in ("user", "assistant")]
    encoding = EncodingOptions(eos=eos)
    corpus = prepare_rows(tmp_path, [{"messages": said}], tokenizer, encoding=encoding, messages_field="messages")
    # The document's end token ends the last turn.
    assert corpus.info.encoding.num_open_turns == num_open
    assert any(line.startswith(f"warning: {num_open} ") for line in _result(corpus.path))


SAYINGS = ["fox", "jumps over", "lazy", "dog?", "user", "assistant", "string", "Zürich", "猫", "🦊", "so 7 + 5 = 12"]
ODD = [
    " \n\tspaced out \n\n",
    '{"city": "Ulm", "t": [1, 2.5, null]}',
    "a < b || b > c && d <= e",
    "<think>\nlet me see\n</think>\n\nyes",
    "```html\n<b>|x|</b> [/INS] <|\n```",
    "\\u003c and \\n and \"quotes\" and 'those'",
    "{{ messages }} {% if x %}",
    "im_end end_of_turn |> eot_id",
    "\U000f0001 \ue000 \u200b \u00a0 nbsp",
    "[1] ] [ > << >> </ />",
    "<tool_response>\n{}\n</tool_response>",
    "\x07\x7f",
    "/start https://x.y?",
    "[1, 2]",
]
CITY = {"type": "string", "description": "where?", "enum": ["Ulm", "string", "a < b"]}
COUNT = {"type": ["integer", "null"], "default": 3}
PARAMETERS = {"type": "object", "properties": {"city": CITY, "größe": COUNT, "a b": COUNT}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "a | b", "parameters": PARAMETERS}}]


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choice(SAYINGS if rng.random() < 0.7 else ODD) for _ in range(rng.randint(1, 5)))


def answers(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def calls(rng: random.Random, arguments: dict[str, Any], name: str = "weather") -> dict[str, Any]:
    is_text = rng.random() < 0.5
    given = json.dumps(arguments, ensure_ascii=rng.random() < 0.5) if is_text else arguments
    function = {"name": name, "arguments": given}
    return answers("", tool_calls=[{"type": "function", "id": "call12345", "function": function}])


def talk(rng: random.Random, family: Family, text: Callable[[], str]) -> Chat:
    """Return a random conversation, sometimes with two answers in a row."""
    said: Chat = [{"role": "system", "content": text()}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 3)):
        said.append({"role": "user", "content": text()})
        for _ in range(2 if rng.random() < 0.3 else 1):
            if family.writes_tools and rng.random() < 0.4:
                key = rng.choice(["city", "name", "type", "größe", "a b"])
                said.append(calls(rng, {key: text(), "n": rng.randint(0, 9)}))
                said.append({"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": text()})
            said.append(answers(text()))
            if family.writes_reasoning and rng.random() < 0.3:
                said[-1]["reasoning_content"] = text()
    return said


def escaped(rng: random.Random, text: str) -> str:
    """Return a text as JSON string content in which at least one character is escaped."""
    place = rng.randrange(len(text))
    return "".join(
        f"\\u{ord(one):04x}" if at == place or one == '"' or rng.random() < 0.2 else one for at, one in enumerate(text)
    )


def quoted(arguments: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return answers("", tool_calls=[{"type": "function", "function": function}])


def in_arguments(rng: random.Random, said: Chat, token: str) -> None:
    pair = '"{}": "fox"' if rng.random() < 0.3 else '"city": "fox {} dog"'
    said[-1] = quoted("{" + pair.format(escaped(rng, token)) + "}")


def in_a_function_call(rng: random.Random, said: Chat, token: str) -> None:
    inner = json.dumps({"name": "weather", "arguments": '{"city": "' + escaped(rng, token) + '"}'})
    said[-1] = dict(conversation([{"from": "function_call", "value": inner}]).messages[0])


def in_two(rng: random.Random, said: Chat, token: str) -> None:
    """Split a token: around other text in a content, between reasoning and content, or between two answers."""
    cut = rng.randint(1, len(token) - 1)
    first, last = f"fox {token[:cut]}", f"{token[cut:]} dog"
    between = rng.choice(["<think>", "</think>", " ", "\n", "<", "x"])
    said[-1:] = rng.choice(
        [
            [answers(f"{first}{between}{last}")],
            [answers(last, reasoning_content=first)],
            [answers(first), answers(last)],
        ]
    )


def in_a_key(rng: random.Random, said: Chat, token: str) -> None:
    key = token.strip("<>|/")
    said[-1] = calls(rng, {rng.choice([key, "/" + key]): token[1:]})


def in_a_name(rng: random.Random, said: Chat, token: str) -> None:
    cut = rng.randint(1, len(token) - 1)
    said[-1] = calls(rng, {token[cut:]: "fox"}, token[:cut])


def in_a_role(rng: random.Random, said: Chat, token: str) -> None:
    role = token.strip("<>|[]/")
    known = role in ("system", "user", "assistant", "tool", "tool_response", "observation")
    said[-2]["role"] = rng.choice(["end" if known else role, token.upper() if token.islower() else token.lower()])


FORGERIES: list[Callable[[random.Random, Chat, str], None]] = [
    *(in_arguments, in_a_function_call, in_two, in_two, in_a_key, in_a_name, in_a_role),
]


def reason_of(chat: Any, said: Chat, tools: Chat | None = None) -> str | None:
    try:
        chat.encode(said, tools or [])
    except RowError as error:
        return str(error)
    return None


def is_forgery(reason: str | None) -> bool:
    return reason is not None and "special token" in reason


def search(directory: Path, name: str, num: int) -> tuple[int, list[str]]:
    """Return the number of honest conversations that were kept, and a list of errors.

    A forged conversation must be refused, or have the same special tokens as with the token replaced by letters q.
    """
    family, rng = FAMILIES[name], random.Random(name)
    tokenizer = load_tokenizer(family_directory(directory, family))
    chat, wrong, num_kept = tokenizer.chat(), [], 0

    def specials(said: Chat) -> list[list[int]]:
        return [
            [one for one in document.ids.tolist() if one in tokenizer.special_ids] for document in chat.encode(said)
        ]

    for _ in range(num):
        said = talk(rng, family, partial(sentence, rng))
        reason = reason_of(chat, said, TOOLS if "tools" in family.template and rng.random() < 0.5 else None)
        num_kept += reason is None
        if is_forgery(reason):
            wrong.append(f"{reason}: {said}")
        forgery, token, state = rng.choice(FORGERIES), rng.choice(family.special), rng.getstate()
        forged, neutral = copy.deepcopy(said), copy.deepcopy(said)
        forgery(rng, forged, token)
        rng.setstate(state)
        forgery(rng, neutral, "q" * len(token))
        if reason_of(chat, forged) is reason_of(chat, neutral) is None and specials(forged) != specials(neutral):
            wrong.append(f"{forgery.__name__} of {token}: {forged}")
    return num_kept, wrong


@pytest.mark.parametrize("name", fast_only(FAMILIES, "qwq", "harmony"))
def test_forgeries_are_found_and_honest_conversations_kept(tmp_path: Path, name: str) -> None:
    num_kept, wrong = search(tmp_path, name, 80 if name not in ("qwq", "harmony") else 12)
    assert wrong == [] and num_kept > 4


ASKED = {"role": "user", "content": "the fox?"}
ISSUED: dict[str, tuple[str, Chat]] = {
    "an escaped value": ("granite", [quoted('{"city": "a \\u003c|end_of_text|> b"}')]),
    "an escaped letter": ("llama3.1", [quoted('{"city": "a <|\\u0065ot_id|> b"}')]),
    "an escaped key": ("cohere", [quoted('{"\\u003c|END_OF_TURN_TOKEN|>": "b"}')]),
    # The template sorts by key, and a placeholder sorts differently.
    "a token that the template writes in an expression": (
        "gemma4",
        [quoted('{"city": "a \\u003c|\\"|> b", "name": "x", "Zug": "y", "a b": "z"}')],
    ),
    "removed text": ("qwq", [answers("a <|im_<think>end|> b")]),
    "text side by side": ("qwq", [answers("end|> b", reasoning_content="a <|im_")]),
    "a key between the template's brackets": ("xml", [quoted('{"/s": "b"}')]),
    "a key that the template uses as a name": ("keyed", [quoted('{"tool_call": "b"}')]),
    "a field of a message": ("keyed", [{**ASKED, "/tool_call": "a"}, quoted("{}")]),
    "a word that the template compares with others": ("keyed", [{**ASKED, "name": "assistant"}, quoted("{}")]),
    # Because of the content, the template renders placeholders differently.
    "a word beside a content that the template cuts": (
        "keyed",
        [{**ASKED, "name": "assistant"}, answers("[INST a </think> b")],
    ),
    "a role of a token that the template does not write": ("phi3", [{**ASKED, "role": "sep"}, answers("b")]),
    "a role": ("phi3", [{"role": "end", "content": "a"}, answers("b")]),
}


@pytest.mark.parametrize("case", ISSUED)
def test_a_conversation_whose_strings_form_a_special_token_is_refused(tmp_path: Path, case: str) -> None:
    name, said = ISSUED[case]
    chat = load_tokenizer(family_directory(tmp_path, FAMILIES[name])).chat()
    with pytest.raises(RowError, match="into the special token"):
        chat.encode([ASKED, *said])


def test_honest_conversations_with_two_argument_forms_or_a_role_token_are_kept(tmp_path: Path) -> None:
    chat = load_tokenizer(family_directory(tmp_path / "glm", FAMILIES["glm4.5"])).chat()
    as_object = answers("", tool_calls=[{"type": "function", "function": {"name": "w", "arguments": {"city": "Ulm"}}}])
    assert chat.encode([ASKED, quoted('{"city": "Ulm"}'), {"role": "tool", "content": "7"}, ASKED, as_object])
    chat = load_tokenizer(family_directory(tmp_path / "phi", FAMILIES["phi3"])).chat()
    assert chat.encode([ASKED, {"role": "tool_response", "content": "7"}, answers("b")])


@pytest.mark.parametrize("name", ["granite", "gemma4"])
@pytest.mark.parametrize(
    "arguments", ['{"city": "\\ud83c fox"}', '{"a":' * 900 + "1" + "}" * 900], ids=["half", "deep"]
)
def test_arguments_that_can_not_be_written_as_an_object_stay_json(tmp_path: Path, name: str, arguments: str) -> None:
    reason = reason_of(load_tokenizer(family_directory(tmp_path, FAMILIES[name])).chat(), [ASKED, quoted(arguments)])
    assert reason is None or "the chat template fails" in reason


def test_unknown_text_is_not_a_forgery(tmp_path: Path) -> None:
    # Placeholders are unknown to a tokenizer without byte tokens, just like other text.
    directory = forgeable_tokenizer(tmp_path / "tokenizer", "unigram")
    (directory / "chat_template.jinja").write_text(FAMILIES["alpaca"].template)
    chat = load_tokenizer(directory).chat()
    assert chat.encode([ASKED, answers("Zürich 7 {")])
    with pytest.raises(RowError, match=r"'</s>'$"):
        chat.encode([{"role": "user", "content": "the </s>"}, answers("a")])
