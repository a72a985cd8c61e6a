from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.config.yaml_text import dump_yaml, parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("3e-4", 3e-4), ("1E9", 1e9), ("-2.5e+3", -2500.0), (".5", 0.5), ("1.", 1.0)],
        *[("131_072", 131072), ("010", 10), ("+7", 7), ("true", True), ("null", None), ("~", None), ("", None)],
        # What YAML 1.1 would convert stays text.
        *((text, text) for text in ("no", "on", "Yes", "1:30", "2026-01-31", "0x1F", "1__0", "_1", "1.2.3", "e5", "=")),
    ],
)
def test_plain_scalars_are_what_they_look_like(text: str, value: object) -> None:
    parsed, problems = parse_yaml(text, "x")
    assert not problems
    assert parsed == value and type(parsed) is type(value)


def test_every_duplicate_key_is_found_at_any_depth_with_both_lines() -> None:
    _, problems = parse_yaml("run:\n  name: a\n  seed: 1\n  name: b\ndata: {}\nrun: {}\n", "c.yaml")
    assert sorted((problem.path, problem.value) for problem in problems) == [("c.yaml:4", "name"), ("c.yaml:6", "run")]
    assert "on line 2 and on line 4" in str(problems)


def test_an_alias_stands_for_its_value_and_a_merge_key_may_be_overridden() -> None:
    value, problems = parse_yaml("a: {b: &b {x: 1, y: 2}}\nc: &c {<<: *b, x: 3}\nd: {<<: *c, y: 4}\ne: *b\n", "x")
    assert not problems
    assert value == {"a": {"b": {"x": 1, "y": 2}}, "c": {"x": 3, "y": 2}, "d": {"x": 3, "y": 4}, "e": {"x": 1, "y": 2}}


def test_a_file_that_cannot_be_read_is_a_problem_that_names_it(tmp_path: Path) -> None:
    binary, pipe = tmp_path / "model.bin", tmp_path / "c.yaml"
    binary.write_bytes(b"\xf0\x00\x80")
    os.mkfifo(pipe)
    rules = [read_yaml(path)[1][0].rule for path in (tmp_path / "none.yaml", tmp_path, binary, pipe)]
    assert rules[:3] == ["the file does not exist", "is a directory", "is not UTF-8 text"]
    assert "a pipe" in rules[3]


# A zero byte and halves of characters are no text.
_LETTERS = st.characters(exclude_characters="\0", codec="utf-8")
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
_SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), _FLOATS, st.text(_LETTERS, max_size=12))
_LOOKALIKES = st.sampled_from(["3e-4", "1_000", "no", "null", "~", "", "010", "<<", "true", ".inf", "1:30", "- a"])
_KEYS = st.text(_LETTERS, max_size=8) | _LOOKALIKES


@given(st.dictionaries(_KEYS, _SCALARS | _LOOKALIKES | st.lists(_SCALARS, max_size=3), max_size=5))
def test_what_is_written_is_read_back_with_its_types(value: dict[str, object]) -> None:
    read, problems = parse_yaml(dump_yaml(value), "x")
    assert not problems
    assert read == value
    assert {key: type(item) for key, item in value.items()} == {key: type(read[key]) for key in value}


def _bomb(line: str, levels: int) -> str:
    return "a0: &a0 {k: 1}\n" + "".join(line.format(n=n, below=n - 1) for n in range(1, levels))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        *((text, "not valid YAML") for text in ("a: [1, 2", "a: b: c", "\ta: 1", "? [1]\n: 2", "a\n---\nb")),
        ("a: !!python/name:os.system", "not valid YAML"),
        (_bomb("a{n}: &a{n} [*a{below}, *a{below}, *a{below}, *a{below}]\n", 30), "more than 10,000 values"),
        (_bomb("a{n}: &a{n} {{<<: [*a{below}, *a{below}]}}\n", 30), "more than 10,000 values"),
        ("run: &a\n  name: *a\n", "an alias must not occur inside"),
        ("run: " + "[" * 900 + "]" * 900, "nested deeper than 50 levels"),
        ("[" * 100_000, "nested deeper than 50 levels"),
        ("a:\n" + "  - 1\n" * 20_000, "more than 10,000 values"),
        ("# " + "x" * 200_000, "is larger than 128 KiB"),
        ("a: !!timestamp x", "is not supported"),
        ('"\\ud800": 1', "a lone surrogate"),
        ('a: "\\0"', "a zero byte"),
        ('a: "\\UFFFFFFFF"', "not valid YAML"),
        ("a: " + "9" * 5000, "not valid YAML"),
    ],
    ids=lambda value: value[:12],
)
def test_what_is_not_plain_yaml_or_would_exhaust_time_or_memory_is_refused(text: str, rule: str) -> None:
    value, (problem,) = parse_yaml(text, "c.yaml")
    assert value is None
    assert problem.path.partition(":")[0] == "c.yaml"
    assert rule in problem.rule and len(problem.rule) < 200
