"""Rows of JSON and JSONL files become documents however a file is divided; records that are too large are left out."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import tempfile
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.merge import Duplicates
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources import records
from ray_ulysses.data.sources.extraction import RawDocument, read_unit
from ray_ulysses.data.sources.records import array_values, byte_ranges, range_lines
from ray_ulysses.data.sources.rows import TOO_LARGE, Rejected, RowFields
from ray_ulysses.data.sources.units import SourceSpec, list_units
from ray_ulysses.errors import UserError
from tests.breadth import examples, fast_only
from tests.local_preparation import prepare_local

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


LARGE = (256 << 20) + 10
PIECE = b"x" * (1 << 20)


def zstd_of(*parts: tuple[bytes, int]) -> bytes:
    """Compress repeated pieces without building the complete data in memory."""
    packer = zstandard.ZstdCompressor().compressobj()
    return b"".join(packer.compress(piece) for piece, times in parts for _ in range(times)) + packer.flush()


def found_in(file: Path, fields: RowFields | None = None) -> list[tuple[int, str]]:
    units, _ = list_units(SourceSpec(paths=(str(file),), fields=fields or RowFields()))
    found = [one for unit in units for one in read_unit(unit)]
    return [
        (one.offset, one.reason if isinstance(one, Rejected) else str(one.content))
        for one in found
        if isinstance(one, Rejected | RawDocument)
    ]


def test_a_large_line_of_a_compressed_file_is_left_out_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.zst"
    line = ((b'{"text": "', 1), (PIECE, LARGE // len(PIECE) + 1), (b'"}\n', 1))
    path.write_bytes(zstd_of((b'{"text": "a"}\n', 1), *line, (b'{"text": "b"}\n', 1)))
    assert found_in(path) == [(1, "a"), (2, TOO_LARGE), (3, "b")]


def test_a_line_of_very_many_objects_is_left_out(tmp_path: Path) -> None:
    line = b'{"text": [' + b"{}," * (9 << 20) + b"0]}"
    with gzip.open(tmp_path / "rows.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(line + b'\n{"text": "a"}\n')
    (place, reason), kept = found_in(tmp_path / "rows.jsonl.gz")
    assert place == 1 and "lists and objects" in reason and kept == (2, "a")


@pytest.mark.parametrize("suffix", fast_only(("txt", "jsonl", "json"), "txt"))
def test_a_large_sparse_file_is_left_out(tmp_path: Path, suffix: str) -> None:
    with open(tmp_path / f"rows.{suffix}", "wb") as file:
        file.truncate(LARGE)
    assert found_in(tmp_path / f"rows.{suffix}")[0][1] == TOO_LARGE


@pytest.mark.slow
def test_a_large_value_of_a_list_is_left_out_with_the_rest(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(b'[{"text": "a"}, {"text": [' + b"[]," * (9 << 20) + b'0]}, {"text": "b"}]')
    kept, (place, reason) = found_in(tmp_path / "rows.json")
    assert (kept, place) == ((1, "a"), 2)
    assert "lists and objects" in reason and "the rest of the list" in reason


def large_table() -> pa.Table:
    return pa.table({"text": pa.chunked_array([pa.array([text]) for text in ("a", "x" * LARGE, "b")])})


@pytest.mark.slow
def test_a_row_group_that_unpacks_beyond_any_text_is_left_out(tmp_path: Path) -> None:
    pq.write_table(large_table(), tmp_path / "rows.parquet", row_group_size=1, compression="zstd")
    (_, a), (place, reason), (_, b) = found_in(tmp_path / "rows.parquet")
    assert (a, place, b) == ("a", 2, "b")
    assert "'text' expands from" in reason


def test_a_large_cell_of_parquet_that_is_not_packed_is_left_out(tmp_path: Path) -> None:
    pq.write_table(large_table(), tmp_path / "rows.parquet", compression="none")
    assert found_in(tmp_path / "rows.parquet") == [(1, "a"), (2, f"the text is {TOO_LARGE}"), (3, "b")]


@pytest.mark.slow
def test_a_list_that_is_stored_as_one_value_is_left_out(tmp_path: Path) -> None:
    tokens = pa.ListArray.from_arrays(pa.array([0, 3, 140 << 20]), pa.array(np.zeros(140 << 20, np.int32)))
    pq.write_table(pa.table({"tokens": tokens}), tmp_path / "rows.parquet", row_group_size=1)
    _, (place, reason) = found_in(tmp_path / "rows.parquet", RowFields(tokens="tokens"))
    assert place == 2 and "'tokens.list.element' expands from" in reason


WHOLE = 1 << 30


def request_of(path: Path, out: Path, unit_bytes: int, duplicates: Duplicates, **fields: str) -> PrepareRequest:
    spec = SourceSpec(paths=(str(path),), fields=RowFields.from_options(fields))
    return PrepareRequest(sources=spec, out=out, unit_bytes=unit_bytes, duplicates=duplicates)


def prepare_file(
    path: Path, out: Path, unit_bytes: int, duplicates: Duplicates = "quarantine", **fields: str
) -> Corpus:
    return prepare_local(request_of(path, out, unit_bytes, duplicates, **fields))


def stored_tokens(corpus: Corpus) -> tuple[int, int]:
    """Return the number and the CRC-32 of all stored tokens, including those of repeated documents."""
    num_tokens, crc32 = 0, 0
    for shard in corpus.info.shards:
        num_tokens += shard.num_tokens
        crc32 = zlib.crc32(np.fromfile(corpus.path / "shards" / shard.name, "<u2", shard.num_tokens).tobytes(), crc32)
    return num_tokens, crc32


def described(corpus: Corpus) -> dict[str, Any]:
    """Return the content of a corpus, without its division into shards."""
    documents = pq.read_table(corpus.path / "documents.parquet")
    info = corpus.info
    spans = None if info.spans is None else (info.spans.num_spans, info.spans.content_crc32)
    return {
        "documents": documents.to_pylist(),
        "tokens": [corpus.read(d, 0, int(corpus.lengths[d])).tolist() for d in range(corpus.num_documents)],
        "stored": stored_tokens(corpus),
        "quarantine": (corpus.path / "quarantine.jsonl").read_text(),
        "info": (info.lengths_crc32, info.max_token_id, info.num_quarantined, info.byte_unigram_nats, spans),
        "entropy": info.token_unigram_nats,
    }


def outcome(path: Path, out: Path, unit_bytes: int) -> dict[str, Any] | str:
    """Return the corpus or the error, neither of which may depend on the units."""
    try:
        return described(prepare_file(path, out, unit_bytes))
    except UserError as error:
        return str(error).replace(str(out), "OUT")


SOME_TEXT = st.text(alphabet=st.sampled_from("ab ü漢😀\r\u2028\x85"), max_size=12)
SOME_LINES = st.one_of(
    SOME_TEXT.map(lambda text: json.dumps({"text": text}, ensure_ascii=False).encode()),
    st.integers(0, 3).map(lambda number: json.dumps({"text": f"long {number} " * 40}).encode()),
    st.sampled_from([b"", b"", b" \t", b"{broken", b"[1]", b'{"other": 1}', b'{"text": "\xff"}', b'{"text": 5}']),
    st.binary(max_size=6).filter(lambda data: b"\n" not in data),
)


@settings(max_examples=examples(50))
@given(
    lines=st.lists(SOME_LINES, max_size=12),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    is_ended=st.booleans(),
    unit_bytes=st.integers(1, 400),
)
@example(lines=[b'{"text": "' + b"x" * 300 + b'"}', b'{"text": "y"}'], ending=b"\n", is_ended=False, unit_bytes=7)
@example(lines=[b"{broken"] * 9 + [b'{"text": "last"}'], ending=b"\r\n", is_ended=True, unit_bytes=10)
@example(lines=['\ufeff{"text": "漢"}'.encode()] * 4, ending=b"\n", is_ended=True, unit_bytes=12)
@example(lines=[b'{"text": ""}', b"\x1f\x8b"], ending=b"\n", is_ended=False, unit_bytes=1)
def test_a_file_gives_the_same_corpus_in_any_units(
    lines: list[bytes], ending: bytes, is_ended: bool, unit_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "rows.jsonl")
        path.write_bytes(ending.join(lines) + (ending if is_ended else b""))
        parts = outcome(path, Path(directory, "parts"), max(unit_bytes, path.stat().st_size // 24))
        assert parts == outcome(path, Path(directory, "whole"), WHOLE)


@settings(max_examples=examples(300))
@given(data=st.binary(max_size=60).map(lambda data: data.replace(b"a", b"\n")), unit_bytes=st.integers(1, 70))
def test_every_line_belongs_to_one_range(data: bytes, unit_bytes: int) -> None:
    with tempfile.NamedTemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray_ulysses.data.sources.records._SKIP_BYTES", 3)
        Path(file.name).write_bytes(data)
        ranges = byte_ranges(len(data), unit_bytes)
        found = [line for first, last in ranges for line in range_lines(file.name, first, last)]
        assert found == re.findall(rb"[^\n]*\n|[^\n]+", data)
        assert all(0 < last - first <= unit_bytes for first, last in ranges) or ranges == [(0, 0)]
        assert (ranges[0][0], ranges[-1][1]) == (0, len(data))


@pytest.mark.parametrize("duplicates", ["quarantine", "keep"])
def test_repeats_are_reported_by_their_line_in_the_file(tmp_path: Path, duplicates: Duplicates) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"p": f"prompt {number % 7}", "c": "answer" * (number % 3 + 1)} for number in range(40)]
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    fields = {"prompt_field": "p", "completion_field": "c"}
    parts = prepare_file(path, tmp_path / "parts", 150, duplicates, **fields)
    assert described(parts) == described(prepare_file(path, tmp_path / "whole", WHOLE, duplicates, **fields))
    if duplicates == "quarantine":
        last = json.loads((parts.path / "quarantine.jsonl").read_text().splitlines()[-1])
        assert (last["offset"], last["reason"]) == (79, f"the same content as {path} at 37")


def test_a_file_with_one_json_object_in_any_of_its_ranges_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("plain text\n" * 50 + '{"text": "good"}\n' + "plain text\n" * 50)
    corpus = prepare_file(path, tmp_path / "out", 60)
    assert (corpus.num_documents, corpus.info.num_quarantined) == (1, 100)
    assert corpus.source(0).offset == 51


@pytest.mark.parametrize("unit_bytes", [5, WHOLE])
def test_all_files_without_a_json_object_are_reported_at_once(tmp_path: Path, unit_bytes: int) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    rows = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(2))
    files = {
        "a": b"this is\nplain text\n",
        "b": b"\n\n",
        "c": b"[1]\n",
        "d": b'{"text": "good"}\n',
        "e": gzip.compress(rows.encode(), mtime=0),
        "f": rows.encode("utf-16"),
    }
    for name, data in files.items():
        (tree / f"{name}.jsonl").write_bytes(data)
    with pytest.raises(UserError, match="JSON object") as caught:
        prepare_file(tree, tmp_path / "out", unit_bytes)
    assert [str(one).split(":")[0] for one in caught.value.args] == [f"source={tree}/{name}.jsonl" for name in "acef"]
    assert not (tmp_path / "out" / "corpus.json").exists()
    # Once the files are corrected, the preparation succeeds.
    for name in "acef":
        (tree / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    assert prepare_file(tree, tmp_path / "out", unit_bytes).num_documents == 5
