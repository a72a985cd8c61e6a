"""No string of a conversation becomes part of a special token, whatever a chat template does with the string."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.data.sources.rows import RowError, conversation
from ray_ulysses.data.tokenize.tokenizers import load_tokenizer
from tests.breadth import fast_only
from tests.unit.data.tokenize.families import FAMILIES, Family, family_directory
from tests.unit.data.tokenize.test_forged_tokens import forgeable_tokenizer

Chat = list[dict[str, Any]]
WORDS = ["fox", "jumps over", "lazy", "dog?", "user", "assistant", "string", "Zürich", "猫", "🦊", "so 7 + 5 = 12"]
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
    return " ".join(rng.choice(WORDS if rng.random() < 0.7 else ODD) for _ in range(rng.randint(1, 5)))


def call(rng: random.Random, **arguments: Any) -> dict[str, Any]:
    key = rng.choice(["city", "name", "type", "größe", "a b"])
    given: Any = arguments or {key: sentence(rng), "n": rng.randint(0, 9)}
    if rng.random() < 0.5:
        given = json.dumps(given, ensure_ascii=rng.random() < 0.5)
    return {"type": "function", "id": "call12345", "function": {"name": "weather", "arguments": given}}


def talk(rng: random.Random, family: Family) -> Chat:
    said: Chat = [{"role": "system", "content": sentence(rng)}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 3)):
        said.append({"role": "user", "content": sentence(rng)})
        if family.writes_tools and rng.random() < 0.4:
            said.append({"role": "assistant", "content": "", "tool_calls": [call(rng)]})
            said.append({"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": sentence(rng)})
        said.append({"role": "assistant", "content": sentence(rng)})
        if family.writes_reasoning and rng.random() < 0.3:
            said[-1]["reasoning_content"] = sentence(rng)
    return said


def escaped(rng: random.Random, text: str) -> str:
    """Return a text as JSON string content in which at least one character is escaped."""
    place = rng.randrange(len(text))
    return "".join(
        f"\\u{ord(one):04x}" if at == place or one == '"' or rng.random() < 0.2 else one for at, one in enumerate(text)
    )


def answers(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def calls(rng: random.Random, name: str = "weather", **arguments: Any) -> dict[str, Any]:
    made = call(rng, **arguments)
    made["function"]["name"] = name
    return answers("", tool_calls=[made])


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
    said[-1] = calls(rng, **{rng.choice([key, "/" + key]): token[1:]})


def in_a_name(rng: random.Random, said: Chat, token: str) -> None:
    cut = rng.randint(1, len(token) - 1)
    said[-1] = calls(rng, token[:cut], **{token[cut:]: "fox"})


def in_a_role(rng: random.Random, said: Chat, token: str) -> None:
    role = token.strip("<>|[]/")
    known = role in ("system", "user", "assistant", "tool", "observation")
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
        said = talk(rng, family)
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
