"""Untrusted chat templates stop at the resource limits, with a readable error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.data.sources.rows import RowError
from ray_ulysses.data.tokenize import chat_template
from ray_ulysses.data.tokenize.chat_template import ChatTemplate
from ray_ulysses.errors import UserError

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
    with pytest.raises(UserError, match="its chat template never ends: its loops run for more than 200,000 iterations"):
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
    with pytest.raises(RowError, match="runs for more than -1 s"):
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
