"""Borders of learned turns: they begin as in Transformers, and end with a token to stop at."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.commands.prepare import _result
from ray_ulysses.data.sources.rows import ChatRow, RowError
from ray_ulysses.data.tokenize.encoding import DocumentEncoder, load_encoder
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.data.tokenize.spans import EncodedDocument
from tests.breadth import fast_only
from tests.unit.data.tokenize.families import FAMILIES, family_directory
from tests.unit.data.tokenize.test_chat import chat_tokenizer
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


def answers(rng: random.Random, family_name: str) -> Chat:
    """Return a random conversation with distinct contents, sometimes with two answers in a row."""
    family, said, numbers = FAMILIES[family_name], list[dict[str, Any]](), itertools.count()

    def text() -> str:
        return f"say {next(numbers)}. " + "".join(rng.choice(WORDS) for _ in range(rng.randint(0, 3))).strip() + "!"

    for _ in range(rng.randint(1, 3)):
        said.append({"role": "user", "content": text()})
        for _ in range(2 if rng.random() < 0.3 else 1):
            if family.writes_tools and rng.random() < 0.3:
                function = {"name": f"call{next(numbers)}", "arguments": {"city": "Ulm"}}
                call = {"type": "function", "id": "call12345", "function": function}
                said.append({"role": "assistant", "content": "", "tool_calls": [call]})
                said.append({"role": "tool", "name": function["name"], "tool_call_id": "call12345", "content": text()})
            said.append({"role": "assistant", "content": text()})
            if family.writes_reasoning and rng.random() < 0.3:
                said[-1]["reasoning_content"] = text()
    return said


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
    family, rng, wrong = FAMILIES[name], random.Random(name), []
    encoder = load_encoder(family_directory(directory, family))
    ends: Counter[str] = Counter()
    for _ in range(num):
        said = answers(rng, name)
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
