"""Where learned turns begin and end: at the first character as Transformers has it, and with a token to stop at."""

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
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import ChatRow, RowError, RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.data.tokenize.chat import TemplateChat
from ray_ulysses.data.tokenize.chat_template import ChatTemplate
from ray_ulysses.data.tokenize.encoding import DocumentEncoder, load_encoder
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.data.tokenize.spans import EncodedDocument
from tests.breadth import fast_only
from tests.local_preparation import prepare_local
from tests.unit.data.tokenize.families import FAMILIES, family_directory
from tests.unit.data.tokenize.test_chat import chat_tokenizer

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


def some_words(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 6)))


def expected_mask(reference: Any, said: Chat, special: frozenset[int]) -> tuple[list[int], list[int]]:
    """Return Transformers' tokens and mask, with the two differences that the documentation names."""
    found = reference.apply_chat_template(said, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask, offsets = found["input_ids"], list(found["assistant_masks"]), found.encodings[0].offsets
    text, end = reference.apply_chat_template(said, tokenize=False), 0
    for place, token in enumerate(ids):
        if mask[place]:
            end = offsets[place][1] if token in special else end
        elif place and mask[place - 1]:
            # The later bytes of a mark's last character, and a special token that follows a mark without one.
            is_closed = not text[end : offsets[place - 1][1]].strip()
            mask[place] = int(offsets[place] == offsets[place - 1] or (token in special and not is_closed))
            end = offsets[place][1] if token in special else end
    return ids, mask


def compare_with_transformers(directory: Path, form: tuple[str, str, str, str], num: int) -> list[str]:
    """Return the conversations whose learned tokens differ from Transformers' mask, by marks and by rendering."""
    from transformers import AutoTokenizer

    rng, wrong = random.Random(repr(form)), []
    config: dict[str, Any] = {"eos_token": "</s>", "bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    marked = chat_tokenizer(directory / "marked", marked_template(*form), **config)
    plain = chat_tokenizer(directory / "plain", marked_template(*form, marks=False), **config)
    reference = AutoTokenizer.from_pretrained(marked)
    by_marks, by_rendering = (load_encoder(one, EncodingOptions(eos="none")) for one in (marked, plain))
    for _ in range(num):
        said = [
            {"role": role, "content": some_words(rng)}
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
    wrong = [
        one for number, form in enumerate(MARKED) for one in compare_with_transformers(tmp_path / str(number), form, 3)
    ]
    assert wrong == [] and len(MARKED) * 3 > 500


def answers(rng: random.Random, family_name: str) -> Chat:
    """A conversation whose contents are all different; sometimes two answers follow each other."""
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


def learned_texts(encoder: DocumentEncoder, document: EncodedDocument) -> list[str]:
    spans = zip(document.starts.tolist(), document.stops.tolist(), strict=True)
    return [encoder.tokenizer.decode(document.ids[start:stop]) for start, stop in spans]


def ends_of(directory: Path, name: str, num: int) -> tuple[Counter[str], list[str]]:
    """Return the number of turns by the token that ends them, and what is wrong in random conversations."""
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
        learned = [text for document in documents for text in learned_texts(encoder, document)]
        for message in said:
            for part in (message["content"], message.get("reasoning_content", "")):
                times = sum(text.count(part) for text in learned) if part else 0
                if part and times != (message["role"] == "assistant"):
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
    """Random conversations, also with two answers in a row; 690 in all families."""
    ends, wrong = ends_of(tmp_path, name, 8 if name in ("glm4.5", "joined") else 30)
    assert wrong == [] and ends.total() > 10
    # Falcon's earlier turns end with nothing that only a message begins with.
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
    ended = {}
    for eos in ("tokenizer", "none"):
        encoder = load_encoder(directory, EncodingOptions(eos=eos))
        documents = encoder.encode(ChatRow(messages=tuple(said)))
        ended[eos] = [text.rpartition("<")[2] for one in documents for text in learned_texts(encoder, one)]
        # A turn whose reasoning is left out later has a document of its own, which ends as it would go on.
        assert len(documents) == 2 and sum(one.num_open for one in documents) == (eos == "none")
        names = {encoder.tokenizer.decode(np.array([end])) for one in documents for end in one.turn_ends}
        assert names == {"<|observation|>", "<|user|>"}
    assert ended == {
        "tokenizer": ["|user|>", "|observation|>", "|endoftext|>"],
        "none": ["|user|>", "|observation|>", "/think>yes"],
    }


def test_white_space_may_stand_before_the_token_of_the_next_role(tmp_path: Path) -> None:
    """A model writes it before it stops. A turn without reasoning at its end has a document of its own."""
    template = (
        "{% for m in messages %}{% if not loop.first %}\n\n{% endif %}<|im_start|>{{ m.role }}\n"
        "{% if loop.last and m.role == 'assistant' %}{{ m.thinking }}.{% endif %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}\n\n<|im_start|>assistant\n{% endif %}"
    )
    said = [{"role": role, "content": "the lazy fox", "thinking": "dog"} for role in ("user", "assistant") * 2]
    for text in (template, template.replace("loop.last", "true")):
        encoder = load_encoder(chat_tokenizer(tmp_path / str(len(text)), text, eos_token="</s>"))
        documents = encoder.encode(ChatRow(messages=tuple(said)))
        learned = [one for document in documents for one in learned_texts(encoder, document)]
        assert (
            learned == ["dog.the lazy fox\n<|im_start|>", "dog.the lazy fox</s>"]
            and sum(one.num_open for one in documents) == 0
        )


def test_the_end_of_a_document_is_not_learned_after_the_end_of_its_last_turn(tmp_path: Path) -> None:
    template = marked_template("A: ", "", "<|im_end|>", "", marks=False)
    encoder = load_encoder(chat_tokenizer(tmp_path, template, eos_token="</s>"))
    (one,) = encoder.encode(ChatRow(messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})))
    assert encoder.tokenizer.decode(one.ids[-2:]) == "<|im_end|></s>"
    assert one.stops.tolist() == [one.ids.size - 1] and one.num_open == 0


def test_a_chosen_end_token_ends_turns_though_it_is_not_special(tmp_path: Path) -> None:
    template = marked_template("A: ", "", "<think>\n", "", marks=False)
    encoder = load_encoder(chat_tokenizer(tmp_path, template), EncodingOptions(eos="<think>"))
    (one,) = encoder.encode(ChatRow(messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})))
    assert learned_texts(encoder, one) == ["b<think>"] and one.num_open == 0


def test_a_mark_of_a_part_of_a_turn_ends_nothing(tmp_path: Path) -> None:
    """A special token after reasoning that is marked alone would end texts before the answer."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.reasoning_content }}"
        "{% endgeneration %}<|im_start|>{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    encoder = load_encoder(chat_tokenizer(tmp_path, template, eos_token="</s>"), EncodingOptions(turns="marks"))
    answer = {"role": "assistant", "content": "dog", "reasoning_content": "fox"}
    (one,) = encoder.encode(ChatRow(messages=({"role": "user", "content": "a"}, answer)))
    assert learned_texts(encoder, one) == ["fox", "dog<|im_end|>"]
    assert {encoder.tokenizer.decode(np.array([end])) for end in one.turn_ends} == {"<|im_end|>"}


def test_the_tokens_of_a_text_are_read_once_however_many_turns_it_has(tmp_path: Path) -> None:
    """The library makes a list of all at each read."""
    directory = family_directory(tmp_path, FAMILIES["chatml"])
    reads: Counter[str] = Counter()

    class Encoding:
        def __init__(self, found: Any) -> None:
            self._found = found

        def __getattr__(self, name: str) -> Any:
            reads[name] += 1
            return getattr(self._found, name)

    class Counting:
        def __init__(self, tokenizer: Any) -> None:
            self._tokenizer, self.encode_special_tokens = tokenizer, False

        def encode(self, text: str, **options: Any) -> Encoding:
            return Encoding(self._tokenizer.encode(text, **options))

    from tokenizers import Tokenizer

    rust: Any = Counting(Tokenizer.from_file(str(directory / "tokenizer.json")))
    chat = TemplateChat(ChatTemplate(directory), rust, {300: "<|im_end|>"}, 300, EncodingOptions(), {}, None)
    for num_turns in (1, 20):
        said = [{"role": role, "content": f"say {turn}"} for turn in range(num_turns) for role in ("user", "assistant")]
        (one,) = chat.encode(said)
        assert one.starts.size == num_turns
    assert reads == {"ids": 2, "offsets": 2}


@pytest.mark.parametrize("eos", ["tokenizer", "none"])
def test_prepare_warns_of_turns_that_no_special_token_ends(tmp_path: Path, eos: str) -> None:
    tokenizer = family_directory(tmp_path / "tokenizer", FAMILIES["falcon"])
    said = [{"role": role, "content": f"say {turn}"} for turn in range(2) for role in ("user", "assistant")]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    spec = SourceSpec(paths=(str(tmp_path / "rows.jsonl"),), fields=RowFields(messages="messages"))
    request = PrepareRequest(
        sources=spec, out=tmp_path / "corpus", tokenizer=str(tokenizer), encoding=EncodingOptions(eos=eos)
    )
    corpus = prepare_local(request)
    # The end token of the document ends the last turn.
    num_open = 1 if eos == "tokenizer" else 2
    assert corpus.info.encoding.num_open_turns == num_open
    warned = [line for line in _result(tmp_path / "corpus") if line.startswith("warning: ")]
    assert len(warned) == 1 and warned[0].startswith(f"warning: {num_open} ")
