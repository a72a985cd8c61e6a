"""If a field option is set, a ``.json`` file is read as rows, and its markup never becomes a document."""

from __future__ import annotations

import codecs
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ulysses.data.sources import records
from ray_ulysses.data.sources.extraction import RawDocument, read_unit
from ray_ulysses.data.sources.records import array_values
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import Rejected, SourceSpec, list_units
from ray_ulysses.errors import UserError
from tests.breadth import examples

TEXT = RowFields(text="text")
TORN = None
"""Marks a file that ends the preparation with an error."""
TEXTS = ["fox", 'Zwölf "quoted" {', '\n}[1] \\ \u2028, {"text": "x"} // é\t\U0001f98a']
ROWS: list[dict[str, Any]] = [
    {"text": TEXTS[0]},
    {"meta": {"text": "inner", "list": [1, {"text": "deeper"}]}, "text": TEXTS[1], "n": -2.5e3},
    {"text": TEXTS[2], "n": None},
]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]
LIST, INDENTED = json.dumps(ROWS), json.dumps(ROWS, indent=2, ensure_ascii=False)
OTHERS = [1, "text", None, [], [{"text": "inner"}], {"text": 5}, {"text": ""}, {"txt": "x"}]
# File content, texts of its rows, and number of rejected entries.
Case = tuple[str | bytes, list[str] | None, int]
CASES: dict[str, list[Case]] = {
    "one object": [(LINES[1], TEXTS[1:2], 0), (json.dumps(ROWS[1], indent=4), TEXTS[1:2], 0)],
    "an object that json alone reads": [
        (f'{{"text": "a",\n "other": {other}\n}}\n', ["a"], 0)
        for other in (r'"\ud83d"', r'"\udc00 "', "[" * 300 + "]" * 300, "NaN")
    ],
    "a torn object": [(json.dumps(ROWS[1], indent=1)[:cut], [], 1) for cut in (1, 30, -1)],
    "objects of several lines": [("\n".join(json.dumps(row, indent=2) for row in ROWS), [], 1)],
    "comments": [("{\n  // a comment\n" + json.dumps(ROWS[1], indent=2)[2:], [], 1)],
    "a list": [(LIST, TEXTS, 0), (INDENTED, TEXTS, 0), (json.dumps([*OTHERS, *ROWS]), TEXTS, len(OTHERS))],
    "a torn list": [(whole[:cut], TORN, 0) for whole in (LIST, INDENTED) for cut in (1, 40, -1)],
    "a list and more": [(LIST + more, TORN, 0) for more in ("]", " 1", "\n[]", ",", '{"text": "x"}')],
    "a list that is not UTF-8": [(LIST[:-1].encode() + b', {"text": "\xff"}]', TORN, 0)],
    "a list without rows": [
        (json.dumps(one), [], 1) for one in ([], [1, 2], ["text"], [[{"text": "nested"}]], [{"a": [{"text": "x"}]}])
    ],
    "rows under a key": [(json.dumps({"version": 1, "data": ROWS}, indent=indent), [], 1) for indent in (None, 1)],
    # One of its lines would be a complete row.
    "torn rows under a key": [('{"data": [\n' + ",\n".join(LINES) + "\n]}"[:cut], [], 1) for cut in (0, 2)],
    "a misspelt field": [('[{"Text": "a"}]', [], 1), ('{"txt": "a"}\n{"txt": "b"}', [], 1)],
    "lines": [(end.join(LINES) + last, TEXTS, 0) for end, last in (("\n", ""), ("\r\n", "\n"), ("\n \n", "\n"))],
    "a broken first line": [(LINES[0][:-3] + "\n" + "\n".join(LINES[1:]), TEXTS[1:], 1)],
    "a broken line": [("\n".join([LINES[0], LINES[1][:20], LINES[2]]), [TEXTS[0], TEXTS[2]], 1)],
    "a line that is not UTF-8": [("\n".join(LINES).encode() + b'\n{"text": "\xff"}', TEXTS, 1)],
    "lines of other values": [("\n".join([*LINES, *map(json.dumps, OTHERS)]), TEXTS, len(OTHERS))],
    "lines after another value": [
        ("\n".join([first, *LINES]), TEXTS, 1)
        for first in ('["id", "text"]', "[]", ' [1, [{"text": "nested"}]]', "1", "null")
    ],
    "lines of other types": [('{"text": 5}\n{"text": null}\n{"text": ""}', [], 3), ('[{"text": 5}]', [], 1)],
    "scalars": [(one, [], 1) for one in ("", " \n", "1", "null", '"text"', "text", "{}", "\ufeff")],
    "no JSON": [(gzip.compress(LIST.encode()), [], 1), (LINES[0].encode("utf-16"), [], 1)],
}


def read(path: Path, fields: RowFields = TEXT) -> tuple[list[str], list[Rejected]]:
    units, listed = list_units(SourceSpec(paths=(str(path),), fields=fields))
    found = [one for unit in units for one in read_unit(unit)]
    texts = [str(one.content) for one in found if isinstance(one, RawDocument)]
    return texts, [*listed, *(one for one in found if isinstance(one, Rejected))]


@pytest.mark.parametrize("read_bytes", [1, 1 << 20])
def test_only_rows_with_the_named_field_become_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(records, "_READ_BYTES", read_bytes)
    path = tmp_path / "rows.json"
    for name, cases in CASES.items():
        for data, expected, num_left_out in cases:
            for mark in (b"", codecs.BOM_UTF8 + b"\n") if isinstance(data, str) else (b"",):
                path.write_bytes(mark + (data.encode() if isinstance(data, str) else data))
                if expected is TORN:
                    with pytest.raises(UserError, match=rf"^source={path}: the JSON file can't be read"):
                        read(path)
                    continue
                found, left_out = read(path)
                assert (found, len(left_out)) == (expected, num_left_out), (name, data)
                assert all(one.source == str(path) and one.reason for one in left_out)


@pytest.mark.parametrize(
    ("first", "row", "count", "fields"),
    [("{broken\n", "text", 8000, RowFields()), ("{broken\n", "text", 8000, TEXT), ("", "txt", 6000, TEXT)],
    ids=["found", "named", "no rows"],
)
def test_lines_in_a_json_file_are_read_as_a_stream(
    tmp_path: Path, first: str, row: str, count: int, fields: RowFields
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(first + (json.dumps({row: "x" * 1000}) + "\n") * count)
    (unit,) = list_units(SourceSpec(paths=(str(path),), fields=fields))[0]
    tracemalloc.start()
    found = sum(isinstance(one, RawDocument) for one in read_unit(unit))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20, "the complete file was held in memory"
    assert found == (count if row == "text" else 0)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def parsed(path: Path) -> list[Any] | None:
    try:
        return list(array_values(path))
    except ValueError:
        return None


@settings(max_examples=examples(50))
@given(
    values=st.lists(VALUES, max_size=6),
    indent=st.sampled_from([None, 1]),
    size=st.integers(1, 9),
    cut=st.integers(0, 9),
)
def test_a_list_is_parsed_as_json_parses_it_wherever_the_buffer_ends(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], indent: int | None, size: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("array") / "list.json"
    text = json.dumps(values, indent=indent, ensure_ascii=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_READ_BYTES", size)
        path.write_text(f" \n{text}\n ", encoding="utf-8", errors="surrogatepass")
        assert parsed(path) == values
        path.write_text(text[: -1 - cut])
        assert parsed(path) is None, "a list without its end"
        path.write_text(f"{text} 1")
        assert parsed(path) is None, "something follows"


@pytest.mark.parametrize(
    "data", [b"{}", b"[,]", b"[1,]", b"[1 2]", b"[1]]", b"[NaN, x]", b"1", b'["\xff"]', b"[1\xff,2]"]
)
def test_a_malformed_list_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(records, "_READ_BYTES", 2)
    (tmp_path / "other.json").write_bytes(data)
    assert parsed(tmp_path / "other.json") is None


def test_little_more_than_a_value_is_held(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[" + ",\n".join(json.dumps({"text": "x" * 1_000_000}) for _ in range(40)) + "]")
    tracemalloc.start()
    assert sum(len(row["text"]) for row in array_values(path)) == 40_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16_000_000
