"""Published and untrusted chat templates."""

from __future__ import annotations

import itertools
import json
import os
import re
import textwrap
from collections import Counter
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.data.sources.rows import RowError
from ray_ulysses.data.tokenize import chat_template
from ray_ulysses.data.tokenize.chat_template import ChatTemplate, training_template, trl_templates
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.data.tokenize.spans import EncodedDocument
from ray_ulysses.data.tokenize.tokenizers import load_tokenizer
from ray_ulysses.errors import UserError
from tests.breadth import fast_only
from tests.unit.data.tokenize.test_tokenizers import fast_tokenizer
from tests.unit.data.tokenize.test_turns import reason_of

TEMPLATES = Path(__file__).parent / "chat_templates"
PUBLISHED = ("qwen3", "qwen3_6", "gptoss", "phi3", "deepseekv3", "glm4moe")
SPECIAL = re.compile(r"<[|｜][^<>|｜ ]+[|｜]>")
ENDS = {"gptoss": "<|return|>", "phi3": "<|endoftext|>", "deepseekv3": "<｜end▁of▁sentence｜>", "glm4moe": "<|user|>"}
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": CITY}}
NO_TOOLS = "the chat template omits the tools; leave --tools-field out, or use a tokenizer whose chat template"
NO_REASONING = "the chat template omits the reasoning_content of message"
Turn = tuple[int, bool, bool, bool]
GRID: tuple[Turn, ...] = tuple(itertools.product((1, 2, 3), (False, True), (False, True), (False, True)))


def talk(turns: int, calls: bool, thinks: bool, system: bool) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = [{"role": "system", "content": "be quick"}] if system else []
    for turn in range(turns):
        thought = {"reasoning_content": f"let me think {turn}"} if thinks else {}
        said.append({"role": "user", "content": f"question {turn}?"})
        if calls:
            function = {"name": "weather", "arguments": {"city": f"town{turn}"}}
            call = {"type": "function", "id": "call12345", "function": function}
            said.append({"role": "assistant", "content": "", "tool_calls": [call], **thought})
            said.append({"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": f"sunny {turn}"})
        said.append({"role": "assistant", "content": f"answer {turn}.", **thought})
    return said


def tokenizer_of(directory: Path, template: str, special: Collection[str], end: str) -> Path:
    """Write a small tokenizer with a chat template and the template's special tokens."""
    from tokenizers import Tokenizer

    path = str(fast_tokenizer(directory) / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.add_special_tokens(sorted({*SPECIAL.findall(template), *special}))
    tokenizer.save(path)
    config = {"eos_token": end, "bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


def directory_of(tmp_path: Path, name: str) -> Path:
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    end = ENDS.get(name.removesuffix("_training"), "<|im_end|>")
    return tokenizer_of(tmp_path / name, text, {"<|im_end|>", "<|endoftext|>", "<｜end▁of▁sentence｜>"}, end)


def without_today(template: str) -> str:
    return re.sub(r"strftime_now\([^)]*\)", "'2024-07-26'", template)


def spans_of(tokens: EncodedDocument) -> list[tuple[int, int]]:
    return list(zip(tokens.starts.tolist(), tokens.stops.tolist(), strict=True))


@pytest.mark.parametrize("name", fast_only(PUBLISHED, "qwen3", "phi3", "deepseekv3"))
def test_every_turn_is_learned_once_after_its_prompt(tmp_path: Path, name: str) -> None:
    directory = directory_of(tmp_path, name)
    tokenizer, template = load_tokenizer(directory), ChatTemplate(directory)
    chat = tokenizer.chat()
    refused: Counter[str] = Counter()
    for turns, calls, thinks, system in GRID:
        messages, tools = talk(turns, calls, thinks, system), [WEATHER] if calls else []
        render = partial(template.render, tools=tools)
        try:
            documents = chat.encode(messages, tools)
        except RowError as error:
            refused[re.sub(r"message \d+", "message", str(error))[: len(NO_TOOLS)]] += 1
            continue
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        learned = Counter[int]()
        for one in documents:
            for start, stop in spans_of(one):
                before, said = tokenizer.decode(one.ids[:start]), tokenizer.decode(one.ids[start:stop])
                # Find the turn whose prompt precedes the span. DeepSeek-V3's prompt opens reasoning that it drops.
                asked = {number: render(messages[:number], asks=True) for number in answers}
                (number,) = [
                    number for number, prompt in asked.items() if before in (prompt, prompt.removesuffix("<think>\n"))
                ]
                learned[number] += 1
                content, thought = messages[number]["content"], messages[number].get("reasoning_content", "")
                assert content in said and thought in said
                assert not messages[number].get("tool_calls") or f"town{(number - system) // 4}" in said
                assert name == "glm4moe" or int(one.ids[stop - 1]) in tokenizer.special_ids
        assert learned == dict.fromkeys(answers, 1)
    expected = {
        "phi3": {NO_TOOLS: 12, NO_REASONING: 6},
        "deepseekv3": {
            'the chat template fails in line 1: TypeError: can only concatenate str (not "dict") to str': 12,
            NO_REASONING: 6,
        },
    }
    assert refused == expected.get(name, {})


@pytest.mark.parametrize(("name", "num_documents"), [("qwen3", 2), ("gptoss", 2), ("phi3", 1)])
def test_turns_share_a_document_if_the_template_never_changes_them(
    tmp_path: Path, name: str, num_documents: int
) -> None:
    tokenizer = load_tokenizer(directory_of(tmp_path, name))
    messages = talk(2, calls=False, thinks=name != "phi3", system=True)
    assert len(tokenizer.chat().encode(messages)) == num_documents
    whole = tokenizer.chat(EncodingOptions(turns="whole"))
    if num_documents == 1:
        assert len(whole.encode(messages)) == 1
    else:
        with pytest.raises(RowError, match=r"renders message 2 differently .*\(--turns split\)"):
            whole.encode(messages)


@pytest.mark.parametrize("name", fast_only([f"{name}_training" for name in PUBLISHED], "gptoss_training"))
def test_marked_turns_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    directory = directory_of(tmp_path, name)
    path = directory / "chat_template.jinja"
    path.write_text(without_today(path.read_text(encoding="utf-8")), encoding="utf-8")
    chat, reference = load_tokenizer(directory).chat(), AutoTokenizer.from_pretrained(directory)
    by_marks = load_tokenizer(directory).chat(EncodingOptions(turns="marks"))
    compared, unmarked = 0, set[str]()
    for turn in GRID:
        messages, tools = talk(*turn), [WEATHER] if turn[1] else []
        try:
            documents = chat.encode(messages, tools)
        except RowError:
            continue
        try:
            assert [one.ids.tolist() for one in by_marks.encode(messages, tools)] == [documents[0].ids.tolist()]
        except RowError as error:
            # The marks omit reasoning, so these turns are found by rendering.
            unmarked.add(re.sub(r" \d.*", "", str(error)))
            continue
        found = reference.apply_chat_template(
            messages, tools=tools or None, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = np.zeros(documents[0].ids.size, dtype=np.int64)
        for start, stop in spans_of(documents[0]):
            mask[start:stop] += 1
        assert found["input_ids"] == documents[0].ids.tolist()
        assert found["assistant_masks"] == mask.tolist(), turn
        compared += 1
    assert compared >= 6 and any(mask)
    assert unmarked <= {NO_REASONING, NO_REASONING.replace("omits", "does not mark")}


@pytest.mark.parametrize("name", ["qwen3", "phi3_training"])
def test_only_the_last_turn_is_learned_on_request(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(directory_of(tmp_path, name))
    chat = tokenizer.chat(EncodingOptions(train_on="last"))
    (one,) = chat.encode(talk(3, calls=False, thinks=False, system=True))
    said = "".join(tokenizer.decode(one.ids[start:stop]) for start, stop in spans_of(one))
    assert "answer 2." in said and "answer 0." not in said and "answer 1." not in said
    text = tokenizer.decode(one.ids)
    assert all(f"question {turn}?" in text and f"answer {turn}." in text for turn in range(3))


def test_a_given_template_replaces_the_tokenizers_own(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, "qwen3")
    source = (TEMPLATES / "qwen3_training.jinja").read_text(encoding="utf-8")
    own, given = load_tokenizer(directory).chat(), load_tokenizer(directory).chat(EncodingOptions(chat_template=source))
    messages = talk(3, calls=True, thinks=True, system=False)
    assert len(given.encode(messages, [WEATHER])) == 1 < len(own.encode(messages, [WEATHER]))
    assert given.fingerprint != own.fingerprint
    for options, refused in (
        (EncodingOptions(chat_template="\n{% for %}"), r"^--chat-template: .*line 2"),
        (EncodingOptions(turns="marks"), r"^--turns=marks: "),
    ):
        with pytest.raises(UserError, match=refused):
            load_tokenizer(directory).chat(options)


def test_a_conversation_that_the_assistant_begins_requires_marks(
    tmp_path: Path,
) -> None:
    begins = [{"role": "assistant", "content": "yes?"}, *talk(1, calls=False, thinks=False, system=False)]
    with pytest.raises(RowError, match=r"^the chat template has no generation prompt before message 0"):
        load_tokenizer(directory_of(tmp_path, "qwen3")).chat().encode(begins)
    (tokens,) = load_tokenizer(directory_of(tmp_path, "qwen3_training")).chat().encode(begins)
    assert len(spans_of(tokens)) == 2


RESULTS = Path(__file__).parents[3] / "results" / "chat_templates.md"
_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "</s>")


def test_the_training_variant_of_the_tokenizers_template_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("qwen3", "phi3"):
        directory = directory_of(tmp_path, name)
        variant = (TEMPLATES / f"{name}_training.jinja").read_text(encoding="utf-8")
        assert training_template(directory, TEMPLATES) == variant
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(UserError, match=r"^--chat-template=training: TRL has no training variant"):
        training_template(directory, TEMPLATES)
    monkeypatch.setattr("ray_ulysses.data.tokenize.chat_template.trl_templates", lambda: None)
    with pytest.raises(UserError, match="install trl"):
        training_template(directory)
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"^--messages-field: .* has no chat template"):
        training_template(directory, TEMPLATES)


def templates() -> Path | None:
    named = os.environ.get("RAY_ULYSSES_TRL_TEMPLATES")
    return trl_templates() if named is None else Path(named)


def outcome_of(directory: Path, has_marks: bool) -> tuple[Counter[str], list[str]]:
    """Return counts of the outcomes of all conversations in the grid, and a list of errors."""
    from transformers import AutoTokenizer

    tokenizer, reference = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    chat, by_marks = tokenizer.chat(), tokenizer.chat(EncodingOptions(turns="marks")) if has_marks else None
    met: Counter[str] = Counter()
    wrong = []
    for turn in GRID:
        messages, tools = talk(*turn), [WEATHER] if turn[1] else []
        try:
            documents = chat.encode(messages, tools)
        except RowError as error:
            is_reasoned = re.match(r"the chat template (fails in line \d+: |omits |renders )", str(error))
            met["refused"] += 1
            met["because " + textwrap.shorten(re.sub(r"[0-9]+", "N", str(error)), 90, placeholder=" ...")] += 1
            if not is_reasoned:
                wrong.append(f"{turn}: {error}")
            continue
        met["rendered"] += 1
        answers = [one for one in messages if one["role"] == "assistant"]
        said = "".join(tokenizer.decode(one.ids[a:b]) for one in documents for a, b in spans_of(one))
        wrong += [f"{turn}: {one['content']!r} is not learned" for one in answers if said.count(one["content"]) < 1]
        # If the marks omit a part of a turn, such as earlier reasoning, turns are found by rendering instead.
        if by_marks is not None and reason_of(by_marks, messages, tools) is None:
            found: Any = reference.apply_chat_template(
                messages, tools=tools or None, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            mask = np.zeros(documents[0].ids.size, dtype=np.int64)
            for start, stop in spans_of(documents[0]):
                mask[start:stop] += 1
            met["equal"] += found["assistant_masks"] == mask.tolist()
            met["compared"] += 1
            if found["input_ids"] != documents[0].ids.tolist():
                wrong.append(f"{turn}: other tokens than Transformers'")
    return met, wrong


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(templates() is None, reason="the package trl is not installed")
def test_every_template_of_trl_renders_a_conversation_or_refuses_it_with_a_reason(tmp_path: Path) -> None:
    folder = templates()
    assert folder is not None
    rows, problems, all_met = [], [], Counter[str]()
    paths = sorted(folder.glob("*.jinja"))
    for path in paths:
        text = path.read_text(encoding="utf-8")
        has_marks = "generation %}" in text
        ends = [end for end in _ENDS if end in text] or ["<|im_end|>"]
        directory = tokenizer_of(tmp_path / path.stem, without_today(text), ends, ends[0])
        met, wrong = outcome_of(directory, has_marks)
        problems += [f"{path.stem}: {one}" for one in wrong]
        all_met += met
        compared = f"{met['equal']} of {met['compared']}" if met["compared"] else ""
        reasons = [f"{count} {name.removeprefix('because ')}" for name, count in met.items() if name[:7] == "because"]
        rows.append([path.stem, str(met["rendered"]), str(met["refused"]), compared, "; ".join(reasons)])
        if met["compared"] != met["equal"]:
            problems.append(f"{path.stem}: {compared} masks are equal")
    version = next(iter(folder.parent.parent.glob("trl-*.dist-info")), Path("trl")).name.removesuffix(".dist-info")
    head = ["template", "rendered", "refused", "spans equal Transformers' mask", "refused, why"]
    cells = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    RESULTS.write_text(
        f"# Chat templates\n\nAll {len(paths)} templates of {version}, each on {len(GRID)} conversations (1 to 3 turns "
        "x tools x reasoning x a system message), by `tests/unit/data/tokenize/test_chat_template.py`. "
        f"{all_met['rendered']:,} are rendered and {all_met['refused']:,} refused with a reason; of those whose "
        f"turns the template marks whole, {all_met['equal']:,} of {all_met['compared']:,} have "
        "the spans of Transformers' mask.\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in cells) + "\n",
        encoding="utf-8",
    )
    assert problems == []
    assert len(paths) > 50 and all_met["rendered"] > 800 and all_met["compared"] > 350


CHAT = [{"role": "user", "content": "the fox?"}, {"role": "assistant", "content": "jumps"}]
LATER = "{% if messages | length > 1 %}"
RANGE = "{% for a in range(99999) %}"
ENDLESS = {
    "nested loops": RANGE * 4 + "{% endfor %}" * 4,
    "a loop that takes nothing": RANGE + "{% for b in range(9) if false %}{% endfor %}{% endfor %}",
    "loops over messages": "{% for a in range(9999) if a < 0 %}{% endfor %}" * 30,
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a recursive loop": (
        "{% set x = range(50) %}{% for a in x recursive %}{% if loop.depth < 50 %}{{ loop(x) }}{% endif %}{% endfor %}"
    ),
    "long values in a loop": RANGE + "{{ range(99999) | list | length }}{% endfor %}",
}
LARGE = {
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a repeated text": "{{ 'x' * 10 ** 10 }}",
    "a repeated list": "{{ ([0] * 9999999999) | length }}",
    "products": "{% set n = namespace(x=2) %}{% for a in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a text that doubles": (
        "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    ),
    "a block that doubles": "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "much output": "{% set x = 'ab' * 9999999 %}" + "{% for a in range(9999) %}{{ x }}{% endfor %}",
    "a width": "{{ '%9999999999d' % 1 }}",
    "a width of a filter": "{{ '%9999999999d' | format(1) }}",
    "a centre": "{{ 'x' | center(9999999999) }}",
    "an indent": "{{ 'x' | indent(9999999999, true) }}",
    "slices": "{{ [1] | slice(9999999999) | list }}",
    "an indent of JSON": "{{ [1] | tojson(indent=9999999999) }}",
    "a list of the same lists": (
        "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}"
    ),
    "lists of the same lists that are compared": (
        "{% macro f(x, y, n) %}{% if n %}{{ f([x, x], [y, y], n - 1) }}{% else %}{{ x == y }}{% endif %}{% endmacro %}"
        "{{ f([1], [1], 60) }}"
    ),
    "batches of the same batches": (
        "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = (n.x + n.x) | batch(2) | list %}"
        "{% endfor %}{{ n.x }}"
    ),
    "a joined text": "{% set x = 'a' * 900000 %}{{ x.join(range(9999) | map('string')) | length }}",
    "replacements of a method": "{% set x = 'a' * 99999 %}{{ x.replace('a', x) | length }}",
    "tabs": "{{ ('\\t' * 9999999).expandtabs(99999) | length }}",
    "a table": "{% set x = 'a' * 99999 %}{{ x.translate({97: x}) | length }}",
    "a format of long texts": "{% set x = 'a' * 999999 %}{{ ('%s' * 50 % (" + "x, " * 50 + ")) | length }}",
    "a format of a method of long texts": "{{ ('{0}' * 9999).format('a' * 99999) | length }}",
}
RAISING = {
    "a division by zero": "{{ 1 / 0 }}",
    "a float that overflows": "{{ 2.0 ** 5000 }}",
    "a number of many digits": "{{ (9 ** 9999) | string }}",
    "deep recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a call that the sandbox refuses": "{{ messages.append(1) }}",
    "text that is drawn by chance": "{{ lipsum(99999, false, 99999, 99999) }}",
}
NOT_COMPILED = {
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep loops": "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
    "a number of too many digits": "{{ " + "9" * 5000 + " }}",
    "a tag without end": "{% for a in messages %}",
    "a filter that there is not": "{{ 1 | nothing }}",
    "megabytes": "strftime_now('" * (1_100_000 // 14) + "x" * 12,
}


@pytest.fixture
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MOST_STEPS", 200_000)


def named(cases: dict[str, str]) -> Any:
    return pytest.mark.parametrize("template", list(cases.values()), ids=list(cases))


def own(folder: Path, template: str) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(template)
    return ChatTemplate(folder)


@named(ENDLESS)
@pytest.mark.usefixtures("_few_steps")
def test_an_endless_template_is_refused_when_it_is_loaded(tmp_path: Path, template: str) -> None:
    with pytest.raises(UserError, match="its chat template never ends: the loops run for more than 200,000 iterations"):
        own(tmp_path, template)


@pytest.mark.usefixtures("_few_steps")
def test_a_template_that_is_endless_for_some_conversations_rejects_them_and_is_then_refused(tmp_path: Path) -> None:
    template = own(tmp_path, LATER + ENDLESS["nested loops"] + "{% endif %}{{ messages[0].content }}")
    for _ in range(8):
        with pytest.raises(RowError, match="the chat template does not terminate"):
            template.render(CHAT, ())
    assert template.render(CHAT[:1], ()) == "the fox?"
    with pytest.raises(UserError, match="its chat template never ends"):
        template.render(CHAT, ())
    # Each template counts its own iterations, although Transformers caches templates of the same text.
    one, other = own(tmp_path, RANGE + "{% endfor %}"), own(tmp_path, RANGE + "{% endfor %}")
    for _ in range(4):
        assert (one.render(CHAT, ()), other.render(CHAT, ())) == ("", "")


def test_a_template_with_few_slow_steps_reaches_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = own(tmp_path, LATER + "{% for a in range(9999) %}{% endfor %}{% endif %}")
    monkeypatch.setattr(chat_template, "_MOST_S", -1.0)
    with pytest.raises(RowError, match="rendering takes more than -1 s"):
        template.render(CHAT, ())


@named(LARGE)
def test_a_conversation_is_rejected_if_the_template_makes_a_large_value(tmp_path: Path, template: str) -> None:
    with pytest.raises(RowError, match=r"the chat template fails( in line 1)?: OverflowError"):
        own(tmp_path, template).render(CHAT, ())


@named(RAISING)
def test_a_conversation_is_rejected_if_the_template_raises(tmp_path: Path, template: str) -> None:
    with pytest.raises(RowError, match="the chat template fails"):
        own(tmp_path, template).render(CHAT, ())


@named(NOT_COMPILED)
def test_a_template_that_can_not_be_compiled_is_refused(tmp_path: Path, template: str) -> None:
    with pytest.raises(UserError, match=r"its chat template (can't be compiled|is not a valid Jinja|has )"):
        own(tmp_path, template)


def test_values_and_loops_behave_as_without_limits(tmp_path: Path) -> None:
    text = (
        "{% for a in x recursive %}{{ loop.length }}{{ loop.revindex }}{{ 'l' if loop.last }}{% else %}none{% endfor %}"
    )
    for size in (0, 1, 3, 70):
        found = own(tmp_path, f"{{% set x = range({size}) | list %}}" + text).render(CHAT, ())
        turns = [f"{size}{size - turn}{'l' if turn == size - 1 else ''}" for turn in range(size)]
        assert found == ("".join(turns) or "none")
    text = (
        "{% for (a, b), (c, d) in [((1, messages[0].role), [2, 'x'])] %}{{ a }}{{ b }}{{ c }}{{ d }}{% endfor %}"
        "{% set c, d = messages[0].role, {'e': messages[1].role} %}{{ c in ['user', d.e] }}{{ d.e }}"
        "{{ [c, d.e] | join('+') }}{{ '-'.join([c, d.e]) }}{{ '%s=%s' % (c, d.e) }}{{ '{}{a}'.format(c, a=1) }}"
    )
    found = own(tmp_path, text).render(CHAT, ())
    assert found == "1user2xTrueassistantuser+assistantuser-assistantuser=assistantuser1"
