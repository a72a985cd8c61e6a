"""A JSONL file divided into many units gives the same corpus as the file in one unit."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.prepare.merge import Duplicates
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.records import byte_ranges, range_lines
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.errors import UserError
from tests.breadth import examples
from tests.local_preparation import prepare_local

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
LINES = st.one_of(
    SOME_TEXT.map(lambda text: json.dumps({"text": text}, ensure_ascii=False).encode()),
    st.integers(0, 3).map(lambda number: json.dumps({"text": f"long {number} " * 40}).encode()),
    st.sampled_from([b"", b"", b" \t", b"{broken", b"[1]", b'{"other": 1}', b'{"text": "\xff"}', b'{"text": 5}']),
    st.binary(max_size=6).filter(lambda data: b"\n" not in data),
)


@settings(max_examples=examples(50))
@given(
    lines=st.lists(LINES, max_size=12),
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
