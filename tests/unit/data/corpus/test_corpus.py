from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ulysses.data.corpus import row_groups
from ray_ulysses.data.corpus.corpus import Corpus, table_crc32
from ray_ulysses.data.corpus.flat_file import FlatFile, FlatWriter
from ray_ulysses.data.corpus.format import SPANS_SCHEMA
from ray_ulysses.data.corpus.row_groups import RowGroupWriter
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.errors import UserError
from tests.local_preparation import prepare_local
from tests.unit.data.corpora import check_content, text_corpus, varied_texts


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return text_corpus(tmp_path, varied_texts(30), unit_bytes=2000)


def test_any_range_of_any_document_is_read(tmp_path: Path) -> None:
    texts = varied_texts(12)
    corpus = text_corpus(tmp_path, texts, unit_bytes=1000)
    assert len(corpus.info.shards) > 2
    for document, text in enumerate(texts):
        tokens = [*text.encode(), corpus.info.tokenizer.eos_token_id]
        for start in range(0, len(tokens) + 1, 3):
            for length in {0, 1, len(tokens) - start, (len(tokens) - start) // 2}:
                if start + length <= len(tokens):
                    found = corpus.read(document, start, length)
                    assert found.dtype == "<u2" and found.tolist() == tokens[start : start + length]


def test_a_corpus_opens_with_what_the_plan_needs_and_reads_no_document(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        pytest.fail("a document was read")

    with monkeypatch.context() as patch:
        patch.setattr(FlatFile, "read", forbidden)
        patch.setattr(pq, "read_table", forbidden)
        patch.setattr(pq.ParquetFile, "read_row_group", forbidden)
        again = Corpus.open(str(corpus.path))
    assert (again.num_documents, again.info.num_tokens) == (corpus.num_documents, corpus.info.num_tokens)
    assert again.lengths.dtype == np.uint32 and not again.lengths.flags.writeable
    assert again.fingerprint == corpus.fingerprint
    assert (again.info.tokenizer.vocab_size, again.info.dtype) == (257, "uint16")
    check_content(again)


def test_a_directory_without_a_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.path=.*nowhere: does not exist; create it with `ray-ulysses prepare`"):
        Corpus.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"is not a prepared corpus"):
        Corpus.open(tmp_path)


def store_info(corpus: Corpus, **changes: Any) -> Path:
    """Write a `corpus.json` with changed fields and valid checksums."""
    (corpus.path / "corpus.json").write_text(json.dumps(replace(corpus.info, **changes).to_json()))
    return corpus.path


def sealed(fields: dict[str, Any], **changes: Any) -> str:
    fields = {name: value for name, value in (fields | changes).items() if name != "checksum"}
    return json.dumps({**fields, "checksum": stable_hash(fields)})


def test_a_broken_edited_or_inconsistent_corpus_json_is_refused(corpus: Corpus) -> None:
    path, info = corpus.path / "corpus.json", corpus.info
    fields = json.loads(path.read_text())

    def with_info(**changes: Any) -> str:
        return json.dumps(replace(info, **changes).to_json())

    for text, said in (
        *((text, r"corpus\.json") for text in ("", "[]", "{}", '{"format_version": 5}')),
        (json.dumps({**fields, "format_version": 7}), "format 7, but this version reads 5"),
        (json.dumps({**fields, "max_token_id": 1}), "do not match the checksum"),
        (sealed(fields, num_documents=29), "do not match the fingerprint"),
        (with_info(num_documents=0, index=replace(info.index, num_items=0)), "the corpus is empty"),
        (with_info(index=replace(info.index, num_items=2)), "the index has 2 values for 30 documents"),
        *((with_info(dtype=dtype), f"dtype='{dtype}'") for dtype in ("float32", "uint8", "uint32")),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            Corpus.open(corpus.path)


@pytest.mark.parametrize("content", [lambda data: data[:-1], lambda data: b"\0" * len(data), None])
@pytest.mark.parametrize("name", ["documents.parquet", "shards/shard-00001.tokens"])
def test_a_cut_zeroed_or_missing_file_is_named(
    corpus: Corpus, name: str, content: Callable[[bytes], bytes] | None
) -> None:
    path = corpus.path / name
    data = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content(data))
    with pytest.raises(UserError, match=rf"{path.name} can't be"):
        Corpus.open(corpus.path).check_files()
    if name.startswith("shards"):
        with pytest.raises(UserError, match=rf"{path.name} can't be read .*; restore the file"):
            corpus.read(corpus.info.shards[0].num_documents, 0, 2)


@pytest.mark.parametrize("name", ["shards/shard-00000.tokens", "documents.index"])
def test_a_file_replaced_by_a_sound_one_of_the_same_size_is_noticed(tmp_path: Path, name: str) -> None:
    texts = [f"{number}" * (3 + number) for number in range(10, 20)]
    corpus = text_corpus(tmp_path, texts)
    other = text_corpus(tmp_path / "other", texts[::-1])
    theirs = (other.path / name).read_bytes()
    assert len(theirs) == (corpus.path / name).stat().st_size
    (corpus.path / name).write_bytes(theirs)
    for read in (lambda: Corpus.open(corpus.path).check_files(), lambda: Corpus.open(corpus.path).read(0, 0, 2)):
        with pytest.raises(UserError, match=r"the file was replaced by another of the same size"):
            read()


def prompts(directory: Path, first: str) -> Corpus:
    """Prepare 40 rows that are equally long, with prompts of different lengths."""
    directory.mkdir()
    rows = [{"prompt": first[: 1 + number % 3], "completion": first[1 + number % 3 :]} for number in range(40)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = RowFields.from_options({"prompt_field": "prompt", "completion_field": "completion"})
    sources = SourceSpec(paths=(str(directory / "rows.jsonl"),), fields=fields)
    return prepare_local(PrepareRequest(sources=sources, out=directory / "corpus", duplicates="keep"))


def test_a_document_is_found_in_its_row_group(corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(row_groups, "GROUP_ROWS", 7)
    small = text_corpus(tmp_path / "small", varied_texts(30), unit_bytes=2000)
    metadata = pq.read_metadata(small.path / "documents.parquet")
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [7, 7, 7, 7, 2]
    for document in (*range(30), 0, 29):
        length = int(corpus.lengths[document])
        assert small.read(document, 0, length).tolist() == corpus.read(document, 0, length).tolist()
        assert Path(small.source(document).source).name == Path(corpus.source(document).source).name
    assert small.fingerprint == corpus.fingerprint


def write_documents(corpus: Corpus, table: pa.Table, crc32: int | None, **changes: Any) -> Path:
    """Replace the document table of a corpus, with the given checksum in its footer."""
    path = corpus.path / "documents.parquet"
    notes = {} if crc32 is None else {b"ray_ulysses.content_crc32": f"{crc32:08x}".encode()}
    pq.write_table(table.replace_schema_metadata(notes), path, write_page_checksum=True)
    return store_info(corpus, documents_bytes=path.stat().st_size, **changes)


def with_column(corpus: Corpus, name: str, values: pa.Array) -> pa.Table:
    table = pq.read_table(corpus.path / "documents.parquet")
    return table.set_column(table.schema.get_field_index(name), name, values)


def test_documents_that_are_not_those_of_corpus_json_are_refused(corpus: Corpus) -> None:
    table, crc32 = pq.read_table(corpus.path / "documents.parquet"), corpus.info.lengths_crc32
    swapped = with_column(corpus, "length", pa.array(table.column("length").to_numpy()[::-1]))
    with pytest.raises(UserError, match=r"documents\.parquet .*the document lengths do not match"):
        _ = Corpus.open(write_documents(corpus, swapped, crc32)).lengths
    with pytest.raises(UserError, match=r"documents\.parquet .*replaced by another one"):
        Corpus.open(write_documents(corpus, swapped, None))
    with pytest.raises(UserError, match=r"documents\.parquet .*the file has 29 documents, expected 30"):
        Corpus.open(write_documents(corpus, table.slice(1), crc32))


@pytest.mark.parametrize("column", ["length", "source", "content"])
def test_documents_with_another_column_are_refused(corpus: Corpus, column: str) -> None:
    table = with_column(corpus, column, pa.array(["x"] * 30, pa.large_string()).cast(pa.large_binary()))
    with pytest.raises(UserError, match=r"documents\.parquet .*the columns do not match"):
        Corpus.open(write_documents(corpus, table, corpus.info.lengths_crc32))


def forge(corpus: Corpus, lengths: Sequence[int]) -> Path:
    """Replace the lengths of a corpus, with valid checksums."""
    crc32 = zlib.crc32(np.asarray(lengths, "<i8").tobytes())
    table = with_column(corpus, "length", pa.array(lengths, pa.int64()))
    return write_documents(corpus, table, crc32, lengths_crc32=crc32, num_tokens=sum(lengths))


@pytest.mark.parametrize("wrong", [-1, 0, 2**32 - 1, 2**62])
def test_lengths_that_exceed_the_shards_are_refused(corpus: Corpus, wrong: int) -> None:
    lengths = [int(one) for one in corpus.lengths]
    # The sum does not change.
    lengths[3:5] = [wrong, lengths[3] + lengths[4] - wrong]
    with pytest.raises(UserError, match=r"documents\.parquet .*a document has -?\d+ tokens, but"):
        _ = Corpus.open(forge(corpus, lengths)).lengths
    longest = max(shard.num_tokens for shard in corpus.info.shards)
    with pytest.raises(UserError, match=r"corpus\.json .*num_tokens is \d+, but the shards contain"):
        Corpus.open(forge(corpus, [longest] * corpus.num_documents))


@pytest.mark.parametrize(("place", "value"), [(0, -1), (0, 2**62), (1, 1), (1, -5), (1, 2**40), (0, 10**6)])
def test_a_wrong_index_entry_is_refused_when_its_document_is_read(corpus: Corpus, place: int, value: int) -> None:
    other = corpus.read(8, 0, 1).tolist()
    entries = np.fromfile(corpus.path / "documents.index", "<i8", count=2 * corpus.num_documents)
    entries[2 * 7 + place] = value
    writer = FlatWriter(corpus.path / "documents.index", np.dtype(np.int64))
    writer.add(entries)
    forged = Corpus.open(store_info(corpus, index=writer.close()))
    length = int(forged.lengths[7])
    with pytest.raises(UserError, match=r"documents\.index can't be used \(the entry for document 7 is wrong"):
        forged.read(7, 0, length)
    assert forged.read(8, 0, 1).tolist() == other


def test_spans_of_missing_documents_and_without_statistics_are_refused(tmp_path: Path) -> None:
    corpus = prompts(tmp_path / "one", "abcdefgh")
    table = pq.read_table(corpus.path / "spans.parquet")
    for place, number in ((0, -1), (-1, 10**10), (5, 39), (-1, -1)):
        documents = table.column("document").to_numpy().copy()
        documents[place] = number
        write_spans(corpus, table.set_column(0, "document", pa.array(documents)), statistics=["document"])
        with pytest.raises(UserError, match=r"spans\.parquet can't be used \(the spans are not ordered"):
            _ = Corpus.open(corpus.path).spans
    write_spans(corpus, table, statistics=[])
    with pytest.raises(UserError, match=r"spans\.parquet can't be used \(the footer lacks the minimum"):
        Corpus.open(corpus.path)


def write_spans(corpus: Corpus, table: pa.Table, statistics: Sequence[str]) -> None:
    path = corpus.path / "spans.parquet"
    writer = RowGroupWriter(path, SPANS_SCHEMA, checksum=table_crc32, statistics=statistics)
    writer.add(table)
    writer.close(table_crc32(table))
    assert corpus.info.spans is not None
    spans = replace(corpus.info.spans, num_bytes=path.stat().st_size, content_crc32=table_crc32(table))
    store_info(corpus, spans=spans)
