"""JSON lists are read a value at a time, and are exactly those that ``json`` reads."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.data.sources import records
from ray_ulysses.data.sources.records import array_values

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


@given(
    values=st.lists(VALUES, max_size=6),
    indent=st.sampled_from([None, 1]),
    size=st.integers(1, 9),
    cut=st.integers(0, 9),
)
def test_what_json_reads_is_read_wherever_the_file_is_cut(
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


@pytest.mark.parametrize("text", ["", " ", "{}", "[,]", "[1,]", "[1 2]", "[1", "[1]]", "[NaN, x]", "1", '"[1]"'])
def test_anything_else_is_no_list(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert parsed(path) is None


def test_bytes_that_are_no_text_after_a_value_are_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_READ_BYTES", 2)
    path = tmp_path / "list.json"
    path.write_bytes(b"[1" + b"\xff\xff" + b",2]")
    assert parsed(path) is None


def test_a_byte_order_mark_is_left_out_and_bytes_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_bytes(b"\xef\xbb\xbf[1, 2]")
    assert parsed(path) == [1, 2]
    path.write_bytes(b'["\xff"]')
    with pytest.raises(UnicodeDecodeError):
        list(array_values(path))


def test_little_more_than_a_value_is_held(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    rows = 40
    with path.open("w") as file:
        file.write("[" + ",\n".join(json.dumps({"text": "x" * 1_000_000}) for _ in range(rows)) + "]")
    tracemalloc.start()
    assert sum(len(row["text"]) for row in array_values(path)) == rows * 1_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16_000_000
