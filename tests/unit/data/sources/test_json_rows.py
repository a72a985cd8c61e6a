"""A ``.json`` file is read as rows where a field is named: its markup never becomes a document."""

from __future__ import annotations

import codecs
import gzip
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.data.sources import records
from ray_ulysses.data.sources.extraction import RawDocument, read_unit
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import Rejected, SourceSpec, list_units
from ray_ulysses.errors import UserError

TEXT = RowFields(text="text")
TORN = None
"""Expected of a file that ends its preparation by an error."""


def read(path: Path, fields: RowFields = TEXT) -> tuple[list[str], list[Rejected]]:
    """Return the documents of a file, and what is left out of it."""
    units, listed = list_units(SourceSpec(paths=(str(path),), fields=fields))
    found = [one for unit in units for one in read_unit(unit)]
    texts = [str(one.content) for one in found if isinstance(one, RawDocument)]
    return texts, [*listed, *(one for one in found if isinstance(one, Rejected))]


WORDS = (
    "fox",
    "Zwölf",
    '"quoted"',
    "{",
    "}",
    "[1]",
    "\n",
    "\\",
    "\u2028",
    "\U0001f98a",
    ",",
    '{"text": "x"}',
    "//",
    "é\t",
)


def some_text(rng: random.Random) -> str:
    return "t" + " ".join(rng.choice(WORDS) for _ in range(rng.randrange(6)))


def some_row(rng: random.Random) -> dict[str, Any]:
    row: dict[str, Any] = {"text": some_text(rng)}
    if rng.random() < 0.3:
        row = {"meta": {"text": "inner", "list": [1, {"text": "deeper"}]}, **row, "n": rng.choice([1, -2.5e3, None])}
    return row


def dumped(value: Any, rng: random.Random, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=rng.random() < 0.5)


def lines_of(rows: list[Any], rng: random.Random) -> list[str]:
    return [dumped(row, rng) for row in rows]


def joined(lines: list[str], rng: random.Random) -> str:
    return rng.choice(["\n", "\r\n", "\n\n", "\n \n"]).join(lines) + rng.choice(["", "\n"])


def texts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["text"] for row in rows]


# Each returns a file, the texts of its rows, and how many entries are left out.
Form = Callable[[random.Random], tuple[str | bytes, list[str] | None, int]]


def rows_of(rng: random.Random, fewest: int = 1) -> list[dict[str, Any]]:
    return [some_row(rng) for _ in range(rng.randrange(fewest, 7))]


def one_object(rng: random.Random) -> Any:
    row = some_row(rng)
    return dumped(row, rng, rng.choice([None, 0, 1, 4])), texts([row]), 0


def a_list(rng: random.Random) -> Any:
    rows = rows_of(rng)
    return dumped(rows, rng, rng.choice([None, 0, 2])), texts(rows), 0


def a_torn_list(rng: random.Random) -> Any:
    whole = dumped(rows_of(rng), rng, rng.choice([None, 1])).rstrip()
    return whole[: rng.randrange(1, len(whole))], TORN, 0


def a_list_and_more(rng: random.Random) -> Any:
    return dumped(rows_of(rng), rng) + rng.choice(["]", " 1", "\n[]", ",", '{"text": "x"}']), TORN, 0


def rows_under_a_key(rng: random.Random) -> Any:
    value = {"version": 1, rng.choice(["data", "rows", "a"]): rows_of(rng)}
    return dumped(value, rng, rng.choice([None, 1])), [], 1


def torn_rows_under_a_key(rng: random.Random) -> Any:
    # Its last line but two would be a row.
    whole = '{"data": [\n' + ",\n".join(lines_of(rows_of(rng, 2), rng)) + "\n]}"
    return whole[: rng.randrange(whole.index("\n", 12) + 1, len(whole) - 4)], [], 1


def a_misspelt_field(rng: random.Random) -> Any:
    rows = [{rng.choice(["Text", "texts", "txt"]): row["text"]} for row in rows_of(rng)]
    form = rng.choice([lambda: dumped(rows, rng, 1), lambda: joined(lines_of(rows, rng), rng)])
    return form(), [], 1


def misspelt_fields_among_rows(rng: random.Random) -> Any:
    rows, wrong = rows_of(rng), [{"txt": "x"}] * rng.randrange(1, 4)
    both = [*rows, *wrong]
    rng.shuffle(both)
    kept = [row["text"] for row in both if "text" in row]
    return rng.choice([dumped(both, rng, 1), joined(lines_of(both, rng), rng)]), kept, len(wrong)


def json_lines(rng: random.Random) -> Any:
    rows = rows_of(rng)
    return joined(lines_of(rows, rng), rng), texts(rows), 0


def a_broken_first_line(rng: random.Random) -> Any:
    rows = rows_of(rng, 3)
    lines = lines_of(rows, rng)
    cut = rng.randrange(1, len(lines[0]))
    # A line that begins a list without an end is an error.
    lines[0] = (
        lines[0][cut:] if rng.random() < 0.5 and lines[0][cut:].lstrip()[:1] not in ("", "[", "{") else lines[0][:cut]
    )
    return joined(lines, rng), texts(rows[1:]), 1


def a_broken_line(rng: random.Random) -> Any:
    rows = rows_of(rng, 3)
    lines, place = lines_of(rows, rng), rng.randrange(1, len(rows))
    lines[place] = lines[place][: rng.randrange(1, len(lines[place]))]
    return joined(lines, rng), [row["text"] for number, row in enumerate(rows) if number != place], 1


def a_line_that_is_not_utf8(rng: random.Random) -> Any:
    rows = rows_of(rng)
    lines = [line.encode() for line in lines_of(rows, rng)]
    lines.insert(rng.randrange(1, len(lines) + 1), b'{"text": "\xff"}')
    return b"\n".join(lines), texts(rows), 1


def lines_of_other_values(rng: random.Random) -> Any:
    rows = rows_of(rng)
    others = [rng.choice(["1", '"text"', "null", "[1, 2]", "true"]) for _ in range(rng.randrange(1, 4))]
    return joined([*lines_of(rows, rng), *others], rng), texts(rows), len(others)


def lines_after_another_value(rng: random.Random) -> Any:
    rows = rows_of(rng)
    first = rng.choice(['["id", "text"]', "[]", ' [1, [{"text": "nested"}]]', "1", "null"])
    return joined([first, *lines_of(rows, rng)], rng), texts(rows), 1


def one_object_that_json_alone_reads(rng: random.Random) -> Any:
    other = rng.choice(['"\\ud83d"', '"\\udc00 "', "[" * 300 + "]" * 300, "NaN"])
    row = some_row(rng)
    return dumped(row, rng, 1).rstrip()[:-1] + f',\n "other": {other}\n}}\n', texts([row]), 0


def a_list_that_is_not_utf8(rng: random.Random) -> Any:
    whole = dumped(rows_of(rng), rng, rng.choice([None, 1])).encode()
    return whole[:-1] + b', {"text": "\xff"}]', TORN, 0


def a_list_of_rows_and_others(rng: random.Random) -> Any:
    rows = rows_of(rng)
    others = [rng.choice([1, "text", None, [], [{"text": "inner"}], {"text": 5}, {"text": ""}]) for _ in range(2)]
    both: list[Any] = [*rows, *others]
    rng.shuffle(both)
    return dumped(both, rng, rng.choice([None, 1])), [one["text"] for one in both if one in rows], 2


def other_lists(rng: random.Random) -> Any:
    value = rng.choice([[], [1, 2], ["text"], [[{"text": "nested"}]], [None], [{}], [{"a": [{"text": "x"}]}]])
    return dumped(value, rng, rng.choice([None, 1])), [], 1


def scalars(rng: random.Random) -> Any:
    return rng.choice(["", " \n", "1", "null", '"text"', "text", "{}", "{ }\n", "\ufeff"]), [], 1


def a_torn_object(rng: random.Random) -> Any:
    whole = dumped(some_row(rng), rng, rng.choice([None, 1]))
    return whole[: rng.randrange(1, len(whole))], [], 1


def json_with_comments(rng: random.Random) -> Any:
    return "{\n  // a comment\n" + dumped(some_row(rng), rng, 2)[2:], [], 1


def objects_of_several_lines(rng: random.Random) -> Any:
    return "\n".join(dumped(row, rng, 2) for row in rows_of(rng, 2)), [], 1


def wrong_types(rng: random.Random) -> Any:
    rows = [{"text": rng.choice([5, None, "", [], {}, True])} for _ in range(rng.randrange(1, 4))]
    return rng.choice([dumped(rows, rng), "\n".join(lines_of(rows, rng))]), [], len(rows)


def compressed(rng: random.Random) -> Any:
    return gzip.compress(dumped(rows_of(rng), rng).encode()), [], 1


def other_encodings(rng: random.Random) -> Any:
    return dumped(some_row(rng), rng, 1).encode("utf-16"), [], 1


FORMS: tuple[Form, ...] = (
    one_object,
    a_list,
    a_torn_list,
    a_list_and_more,
    rows_under_a_key,
    torn_rows_under_a_key,
    a_misspelt_field,
    misspelt_fields_among_rows,
    json_lines,
    a_broken_first_line,
    a_broken_line,
    a_line_that_is_not_utf8,
    lines_of_other_values,
    lines_after_another_value,
    one_object_that_json_alone_reads,
    a_list_that_is_not_utf8,
    a_list_of_rows_and_others,
    other_lists,
    scalars,
    a_torn_object,
    json_with_comments,
    objects_of_several_lines,
    wrong_types,
    compressed,
    other_encodings,
)


def held_as_expected(path: Path, form: Form, seed: int) -> None:
    rng = random.Random(f"{form.__name__} {seed}")
    data, expected, num_left_out = form(rng)
    raw = data.encode() if isinstance(data, str) else data
    if isinstance(data, str) and rng.random() < 0.3:
        raw = codecs.BOM_UTF8 + rng.choice([b"", b" ", b"\n"]) + raw
    path.write_bytes(raw)
    if expected is TORN:
        with pytest.raises(
            UserError, match=rf"^source={path}: the JSON file can't be read \(.+\); restore or remove it"
        ):
            read(path)
        return
    found, left_out = read(path)
    assert found == expected
    assert len(left_out) == num_left_out
    assert all(one.source == str(path) and one.reason for one in left_out)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_only_rows_with_the_named_field_become_documents(tmp_path: Path, form: Form) -> None:
    for seed in range(3):
        held_as_expected(tmp_path / "rows.json", form, seed)


@pytest.mark.slow
def test_only_rows_become_documents_in_a_thousand_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3, 53):
        monkeypatch.setattr(records, "_READ_BYTES", random.Random(seed).choice([1, 3, 16, 1 << 20]))
        for form in FORMS:
            held_as_expected(tmp_path / "rows.json", form, seed)


def test_without_a_named_field_a_file_without_rows_is_a_text(tmp_path: Path) -> None:
    rows = ['{"text": "one"}', '{"text": "two"}']
    under_a_key = '{"data": [\n' + rows[0] + "\n]}"
    path = tmp_path / "rows.json"
    for text, expected in (
        (rows[0], [rows[0]]),
        (under_a_key, [under_a_key]),
        ("\n".join(["{broken", rows[0], '{"no": 1}', rows[1]]), ["one", "two"]),
        (f"[{rows[0]}, {rows[1]}]", ["one", "two"]),
    ):
        path.write_text(text)
        assert read(path, RowFields())[0] == expected
    path.write_text(f"[{rows[0]}, {rows[1]}")
    with pytest.raises(UserError, match=r"rows\.json: the JSON file can't be read \(its list has no end\)"):
        read(path, RowFields())


@pytest.mark.parametrize("fields", [RowFields(), TEXT], ids=["found", "named"])
def test_lines_in_a_json_file_are_read_as_a_stream(tmp_path: Path, fields: RowFields) -> None:
    path = tmp_path / "rows.json"
    line = json.dumps({"text": "x" * 1000}) + "\n"
    path.write_text("{broken\n" + line * 8000)
    (unit,) = list_units(SourceSpec(paths=(str(path),), fields=fields))[0]
    tracemalloc.start()
    try:
        assert sum(isinstance(one, RawDocument) for one in read_unit(unit)) == 8000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20, "the file of 8 MB was held"


def test_lines_without_a_row_are_not_held(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"txt": 1}\n' * 20_000)
    (unit,) = list_units(SourceSpec(paths=(str(path),), fields=TEXT))[0]
    tracemalloc.start()
    try:
        assert sum(isinstance(one, Rejected) for one in read_unit(unit)) == 20_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20, "every line was held"
