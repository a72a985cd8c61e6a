from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.config.yaml_text import dump_yaml, parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E9", 1e9),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("131_072", 131072),
        ("010", 10),
        ("+7", 7),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("[1, 2, 4]", [1, 2, 4]),
    ],
)
def test_plain_scalars_are_what_they_look_like(text: str, value: object) -> None:
    parsed, problems = parse_yaml(text, "x")
    assert not problems
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("text", ["no", "on", "Yes", "1:30", "2026-01-31", "0x1F", "1__0", "_1", "1.2.3", "e5", "="])
def test_what_yaml_1_1_would_convert_stays_text(text: str) -> None:
    assert parse_yaml(text, "x") == (text, ())


def test_every_duplicate_key_is_found_at_any_depth_with_both_lines() -> None:
    _, problems = parse_yaml("run:\n  name: a\n  seed: 1\n  name: b\ndata: {}\nrun: {}\n", "c.yaml")
    assert sorted(str(problem) for problem in problems) == [
        "c.yaml:4='name': the key is given twice, on line 2 and on line 4; keep one of the two",
        "c.yaml:6='run': the key is given twice, on line 1 and on line 6; keep one of the two",
    ]


def test_a_merge_key_may_be_overridden_without_being_a_duplicate() -> None:
    value, problems = parse_yaml("a: {b: &b {x: 1, y: 2}}\nc: &c {<<: *b, x: 3}\nd: {<<: *c, y: 4}\n", "x")
    assert not problems
    assert value == {"a": {"b": {"x": 1, "y": 2}}, "c": {"x": 3, "y": 2}, "d": {"x": 3, "y": 4}}


@pytest.mark.parametrize(
    "text", ["a: [1, 2", "a: b: c", "\ta: 1", "? [1]\n: 2", "a: !!python/name:os.system", "a\n---\nb"]
)
def test_what_is_not_plain_yaml_is_refused_at_its_place(text: str) -> None:
    value, problems = parse_yaml(text, "c.yaml")
    assert value is None
    assert len(problems) == 1
    assert problems[0].path.startswith("c.yaml")
    assert problems[0].rule.startswith("not valid YAML: ")


def test_a_file_that_cannot_be_read_is_a_problem_that_names_it(tmp_path: Path) -> None:
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"\xf0\x00\x80")
    rules = [read_yaml(path)[1][0].rule for path in (tmp_path / "none.yaml", tmp_path, binary)]
    assert rules == ["the file does not exist", "is a directory", "is not UTF-8 text"]


# A zero byte and halves of characters are no text.
_LETTERS = st.characters(exclude_characters="\0", codec="utf-8")
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(_LETTERS, max_size=12),
)
_LOOKALIKES = st.sampled_from(["3e-4", "1_000", "no", "null", "~", "", "010", "<<", "true", ".inf", "1:30", "- a"])


@settings(deadline=None)  # a busy machine is not a defect
@given(
    st.dictionaries(
        st.text(_LETTERS, max_size=8) | _LOOKALIKES, _SCALARS | _LOOKALIKES | st.lists(_SCALARS, max_size=3), max_size=5
    )
)
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
        (_bomb("a{n}: &a{n} [*a{below}, *a{below}, *a{below}, *a{below}]\n", 30), "more than 10,000 values"),
        (_bomb("a{n}: &a{n} {{<<: [*a{below}, *a{below}]}}\n", 30), "more than 10,000 values"),
        ("run: &a\n  name: *a\n", "an alias may not occur inside the value that it refers to"),
        ("run: " + "[" * 900 + "]" * 900, "nested deeper than 50 levels"),
        ("[" * 100_000, "nested deeper than 50 levels"),
        ("a:\n" + "  - 1\n" * 20_000, "more than 10,000 values"),
        ("# " + "x" * 200_000, "is larger than 128 KiB"),
        ("a: !!float ''", "the tag 'tag:yaml.org,2002:float' is not supported"),
        ("a: !!bool x", "the tag 'tag:yaml.org,2002:bool' is not supported"),
        ("a: !!timestamp x", "the tag 'tag:yaml.org,2002:timestamp' is not supported"),
        ('"\\ud800": 1', "or a lone surrogate"),
        ('a: "\\0"', "may not contain a zero byte"),
        ('a: "\\UFFFFFFFF"', "not valid YAML"),
        ("a: " + "9" * 5000, "not valid YAML"),
    ],
)
def test_what_would_exhaust_time_or_memory_or_end_in_a_traceback_is_refused(text: str, rule: str) -> None:
    value, problems = parse_yaml(text, "c.yaml")
    assert value is None
    assert [problem.path.partition(":")[0] for problem in problems] == ["c.yaml"]
    assert rule in problems[0].rule and len(problems[0].rule) < 200


def test_an_alias_stands_for_its_value() -> None:
    text = "a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n"
    assert parse_yaml(text, "c.yaml") == ({"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}, ())


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.yaml")
    value, (problem,) = read_yaml(tmp_path / "c.yaml")
    assert value is None
    assert problem.rule == (
        "can't be read (a pipe, a socket or a device, not a plain file; put the file back, or remove what is there)"
    )
