from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ulysses.data.corpus import row_groups
from ray_ulysses.data.corpus.corpus import Corpus, table_crc32
from ray_ulysses.data.corpus.flat_file import FlatFile, FlatWriter
from ray_ulysses.data.corpus.format import SPANS_SCHEMA, token_dtype
from ray_ulysses.data.corpus.row_groups import RowGroupWriter
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.errors import UserError
from ray_ulysses.storage.retry import StorageAwayError
from tests.local_preparation import prepare_local
from tests.unit.data.corpora import check_content, text_corpus, varied_texts
from tests.unit.storage.test_retry import SleepingClock, policy_of


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


def test_a_shard_is_read_by_one_line_of_numpy(corpus: Corpus) -> None:
    shard = corpus.info.shards[0]
    tokens = np.memmap(corpus.path / "shards" / shard.name, "<u2", "r", shape=shard.num_tokens)
    index = np.fromfile(corpus.path / "documents.index", "<i8", 2 * corpus.num_documents).reshape(-1, 2)
    first, length = index[1]
    assert tokens[first : first + length].tolist() == corpus.read(1, 0, int(length)).tolist()


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_the_smallest_type_that_holds_the_vocabulary_is_used(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size).name == name


def test_a_corpus_opens_with_what_the_plan_needs(corpus: Corpus) -> None:
    again = Corpus.open(str(corpus.path))
    assert again.lengths.dtype == np.uint32 and not again.lengths.flags.writeable
    assert again.fingerprint == corpus.fingerprint
    assert again.info.tokenizer.vocab_size == 257
    check_content(again)


def test_a_missing_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.path=.*nowhere: does not exist; create it with `ray-ulysses prepare`"):
        Corpus.open(tmp_path / "nowhere")


def test_a_directory_that_is_no_corpus_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a prepared corpus \(no corpus.json\)"):
        Corpus.open(tmp_path)


def test_a_corpus_of_another_format_is_refused(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    path = corpus.path / "corpus.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "format_version": 7}))
    with pytest.raises(UserError, match=r"the corpus has format 7, this version reads 5"):
        Corpus.open(corpus.path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format_version": 5}'])
def test_a_broken_corpus_json_is_named(corpus: Corpus, text: str) -> None:
    (corpus.path / "corpus.json").write_text(text)
    with pytest.raises(UserError, match=r"corpus\.json can't be used"):
        Corpus.open(corpus.path)


def test_an_edited_corpus_json_is_refused(corpus: Corpus) -> None:
    path = corpus.path / "corpus.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "max_token_id": fields["max_token_id"] - 1}))
    with pytest.raises(UserError, match=r"its fields were changed: they do not match its checksum"):
        Corpus.open(corpus.path)
    del fields["checksum"]
    edited = {**fields, "num_documents": fields["num_documents"] - 1}
    path.write_text(json.dumps({**edited, "checksum": stable_hash(edited)}))
    with pytest.raises(UserError, match=r"its fields do not match its fingerprint"):
        Corpus.open(corpus.path)


def test_an_empty_corpus_is_refused(corpus: Corpus) -> None:
    empty = replace(corpus.info, num_documents=0, index=replace(corpus.info.index, num_items=0))
    (corpus.path / "corpus.json").write_text(json.dumps(empty.to_json()))
    with pytest.raises(UserError, match=r"the corpus is empty"):
        Corpus.open(corpus.path)


def test_a_missing_or_cut_sidecar_is_named(corpus: Corpus) -> None:
    path = corpus.path / "documents.parquet"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(UserError, match=r"documents\.parquet can't be used \(it has \d+ bytes, expected \d+\)"):
        Corpus.open(corpus.path)
    path.write_bytes(b"\0" * len(data))
    with pytest.raises(UserError, match=r"documents\.parquet can't be used"):
        Corpus.open(corpus.path)
    path.unlink()
    with pytest.raises(UserError, match=r"documents\.parquet can't be used \(No such file or directory\)"):
        Corpus.open(corpus.path)


def test_a_truncated_shard_is_named_by_the_check_and_by_the_read(corpus: Corpus) -> None:
    path = corpus.path / "shards" / corpus.info.shards[1].name
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"shard-00001\.tokens can't be read \(it has \d+ bytes, expected \d+"):
        corpus.check_files()
    document = corpus.info.shards[0].num_documents
    with pytest.raises(UserError, match=r"the shard .*shard-00001\.tokens can't be read .*; restore the file"):
        corpus.read(document, 0, 2)


def test_a_missing_shard_is_named(corpus: Corpus) -> None:
    (corpus.path / "shards" / "shard-00000.tokens").unlink()
    with pytest.raises(UserError, match=r"shard-00000\.tokens can't be read \(.*No such file or directory"):
        corpus.check_files()


def test_a_shard_with_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path, varied_texts(3, longest=3000))
    path = corpus.path / "shards" / "shard-00000.tokens"
    clean = path.read_bytes()
    expected = [corpus.read(document, 0, int(corpus.lengths[document])) for document in range(3)]
    noticed = 0
    for at in range(0, len(clean), 97):
        damaged = bytearray(clean)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"shard-00000\.tokens can't be read .*; restore the file"):
            check_content(corpus)
        fresh = Corpus.open(corpus.path)
        for document in range(3):
            try:
                found = fresh.read(document, 0, int(corpus.lengths[document]))
            except UserError as error:
                noticed += "shard-00000.tokens can't be read" in str(error)
            else:
                assert np.array_equal(found, expected[document]), f"byte {at}"
    assert noticed > 5


@pytest.mark.parametrize("name", ["shards/shard-00000.tokens", "documents.index"])
def test_a_file_replaced_by_a_sound_one_of_the_same_size_is_noticed(tmp_path: Path, name: str) -> None:
    texts = [f"{number}" * (3 + number) for number in range(10, 20)]
    corpus = text_corpus(tmp_path, texts)
    other = text_corpus(tmp_path / "other", texts[::-1])
    theirs = (other.path / name).read_bytes()
    assert len(theirs) == (corpus.path / name).stat().st_size
    (corpus.path / name).write_bytes(theirs)
    with pytest.raises(UserError, match=r"it was replaced by another file of the same size"):
        Corpus.open(corpus.path).check_files()
    with pytest.raises(UserError, match=r"it was replaced by another file of the same size"):
        Corpus.open(corpus.path).read(0, 0, 2)


def prompts(directory: Path, first: str) -> Corpus:
    """Prepare 40 rows whose prompts and completions together are equally long, whatever the first part of a row."""
    directory.mkdir()
    rows = [{"prompt": first[: 1 + number % 3], "completion": first[1 + number % 3 :]} for number in range(40)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = RowFields.from_options({"prompt_field": "prompt", "completion_field": "completion"})
    sources = SourceSpec(paths=(str(directory / "rows.jsonl"),), fields=fields)
    return prepare_local(PrepareRequest(sources=sources, out=directory / "corpus", duplicates="keep"))


def test_label_spans_that_are_replaced_after_the_corpus_was_opened_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "GROUP_ROWS", 7)
    corpus, other = prompts(tmp_path / "one", "abcdefgh"), prompts(tmp_path / "two", "abcdefgh")
    path = other.path / "spans.parquet"
    writer = RowGroupWriter(tmp_path / "others", SPANS_SCHEMA, checksum=table_crc32, statistics=["document"])
    table = pq.read_table(path)
    starts = pa.array(4 - table.column("start").to_numpy())
    writer.add(table.set_column(1, "start", starts))
    writer.close(corpus.info.spans.content_crc32)
    assert (tmp_path / "others").stat().st_size == path.stat().st_size
    again = Corpus.open(corpus.path)
    assert again.label_weights(0, 0, 8).tolist() == [0.0, *[1.0] * 7]
    (corpus.path / "spans.parquet").write_bytes((tmp_path / "others").read_bytes())
    with pytest.raises(UserError, match=r"spans\.parquet can't be used"):
        again.label_weights(39, 0, 8)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "uint32"])
def test_a_type_that_does_not_fit_the_vocabulary_is_refused(corpus: Corpus, dtype: str) -> None:
    fields = replace(corpus.info, dtype=dtype).to_json()
    (corpus.path / "corpus.json").write_text(json.dumps(fields))
    with pytest.raises(
        UserError,
        match=rf"corpus\.json can't be used \(dtype='{dtype}': tokens of a vocabulary of 257 are stored as uint16",
    ):
        Corpus.open(corpus.path)


def test_opening_reads_no_document(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        pytest.fail("a document was read")

    monkeypatch.setattr(FlatFile, "read", forbidden)
    monkeypatch.setattr(pq, "read_table", forbidden)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", forbidden)
    again = Corpus.open(corpus.path)
    assert (again.num_documents, again.info.num_tokens) == (corpus.num_documents, corpus.info.num_tokens)


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


def test_lengths_that_are_not_those_of_corpus_json_are_refused(corpus: Corpus) -> None:
    path = corpus.path / "documents.parquet"
    table = pq.read_table(path)
    lengths = table.column("length").to_numpy()[::-1]
    swapped = table.set_column(0, "length", pa.array(lengths))
    noted = {b"ray_ulysses.content_crc32": f"{corpus.info.lengths_crc32:08x}".encode()}
    pq.write_table(swapped.replace_schema_metadata(noted), path)
    info = replace(corpus.info, documents_bytes=path.stat().st_size)
    (corpus.path / "corpus.json").write_text(json.dumps(info.to_json()))
    with pytest.raises(
        UserError, match=r"documents\.parquet can't be used \(its document lengths do not match corpus\.json\)"
    ):
        _ = Corpus.open(corpus.path).lengths
    pq.write_table(swapped, path)
    info = replace(corpus.info, documents_bytes=path.stat().st_size)
    (corpus.path / "corpus.json").write_text(json.dumps(info.to_json()))
    with pytest.raises(
        UserError, match=r"documents\.parquet can't be used \(it was replaced by another file of the same"
    ):
        Corpus.open(corpus.path)
    pq.write_table(table.slice(1), path)
    info = replace(corpus.info, documents_bytes=path.stat().st_size)
    (corpus.path / "corpus.json").write_text(json.dumps(info.to_json()))
    with pytest.raises(UserError, match=r"documents\.parquet can't be used \(it has 29 documents, expected 30\)"):
        Corpus.open(corpus.path)


def test_a_storage_that_stays_away_ends_the_read(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = Corpus.open(corpus.path, retry=policy_of(SleepingClock()))

    def away(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", away)
    with pytest.raises(
        StorageAwayError, match=r"documents\.index: the storage did not answer for 60 s \(14 tries, the last"
    ):
        patient.read(3, 0, 5)
    monkeypatch.undo()
    assert patient.read(3, 0, 5).size == 5


def forge(corpus: Corpus, lengths: Sequence[int], num_tokens: int | None = None) -> Path:
    """Give a corpus other lengths, with the checksums that fit them."""
    path = corpus.path / "documents.parquet"
    table = pq.read_table(path)
    forged = table.set_column(0, "length", pa.array(lengths, pa.int64()))
    crc32 = zlib.crc32(np.asarray(lengths, "<i8").tobytes())
    pq.write_table(
        forged.replace_schema_metadata({b"ray_ulysses.content_crc32": f"{crc32:08x}".encode()}),
        path,
        write_page_checksum=True,
    )
    num_tokens = sum(lengths) if num_tokens is None else num_tokens
    info = replace(corpus.info, documents_bytes=path.stat().st_size, lengths_crc32=crc32, num_tokens=num_tokens)
    (corpus.path / "corpus.json").write_text(json.dumps(info.to_json()))
    return corpus.path


@pytest.mark.parametrize("false", [-1, 0, -(2**62), 2**31, 2**32 - 1, 2**62])
def test_a_length_that_no_shard_can_hold_is_refused(corpus: Corpus, false: int) -> None:
    lengths = [int(one) for one in corpus.lengths]
    # The sum stays what it was, as far as other lengths allow it.
    lengths[3:5] = [false, lengths[3] + lengths[4] - false]
    with pytest.raises(UserError, match=r"documents\.parquet can't be used \(a document has -?\d+ tokens, but"):
        _ = Corpus.open(forge(corpus, lengths)).lengths


def test_more_tokens_than_the_shards_hold_are_refused(corpus: Corpus) -> None:
    longest = max(shard.num_tokens for shard in corpus.info.shards)
    with pytest.raises(UserError, match=r"corpus\.json can't be used \(num_tokens is \d+, but its shards hold"):
        Corpus.open(forge(corpus, [longest] * corpus.num_documents))


@pytest.mark.parametrize(
    ("place", "value"), [(0, -1), (0, 2**62), (0, -(2**62)), (1, 1), (1, -5), (1, 2**40), (0, 10**6), (1, 10**6)]
)
def test_a_false_entry_of_the_index_is_refused_when_its_document_is_read(
    corpus: Corpus, place: int, value: int
) -> None:
    other = corpus.read(8, 0, 1).tolist()
    entries = np.fromfile(corpus.path / "documents.index", "<i8", count=2 * corpus.num_documents)
    entries[2 * 7 + place] = value
    writer = FlatWriter(corpus.path / "documents.index", np.dtype(np.int64))
    writer.add(entries)
    info = replace(corpus.info, index=writer.close())
    (corpus.path / "corpus.json").write_text(json.dumps(info.to_json()))
    forged = Corpus.open(corpus.path)
    length = int(forged.lengths[7])
    with pytest.raises(UserError, match=r"documents\.index can't be used \(its entry for document 7 is wrong"):
        forged.read(7, 0, length)
    assert forged.read(8, 0, 1).tolist() == other


def test_an_index_of_another_number_of_documents_is_refused(corpus: Corpus) -> None:
    info = replace(corpus.info, index=replace(corpus.info.index, num_items=2))
    (corpus.path / "corpus.json").write_text(json.dumps(info.to_json()))
    with pytest.raises(UserError, match=r"corpus\.json can't be used \(its index has 2 values for 30 documents"):
        Corpus.open(corpus.path)


@pytest.mark.parametrize(("place", "number"), [(0, -1), (-1, 10**10), (5, 39), (-1, -1)])
def test_spans_of_documents_that_do_not_exist_are_refused(tmp_path: Path, place: int, number: int) -> None:
    corpus = prompts(tmp_path / "one", "abcdefgh")
    assert corpus.info.spans is not None
    table = pq.read_table(corpus.path / "spans.parquet")
    documents = table.column("document").to_numpy().copy()
    documents[place] = number
    write_spans(corpus, table.set_column(0, "document", pa.array(documents)), statistics=["document"])
    with pytest.raises(UserError, match=r"spans\.parquet can't be used \(its spans are not ordered"):
        _ = Corpus.open(corpus.path).spans


def write_spans(corpus: Corpus, table: pa.Table, statistics: Sequence[str]) -> None:
    path = corpus.path / "spans.parquet"
    writer = RowGroupWriter(path, SPANS_SCHEMA, checksum=table_crc32, statistics=statistics)
    writer.add(table)
    writer.close(table_crc32(table))
    assert corpus.info.spans is not None
    spans = replace(corpus.info.spans, num_bytes=path.stat().st_size, content_crc32=table_crc32(table))
    (corpus.path / "corpus.json").write_text(json.dumps(replace(corpus.info, spans=spans).to_json()))


def test_spans_without_the_bounds_of_their_groups_are_refused(tmp_path: Path) -> None:
    corpus = prompts(tmp_path / "one", "abcdefgh")
    write_spans(corpus, pq.read_table(corpus.path / "spans.parquet"), statistics=[])
    with pytest.raises(UserError, match=r"spans\.parquet can't be used \(its footer lacks the smallest"):
        Corpus.open(corpus.path)


@pytest.mark.parametrize("column", ["length", "source", "content"])
def test_documents_with_another_column_are_refused(corpus: Corpus, column: str) -> None:
    path = corpus.path / "documents.parquet"
    table = pq.read_table(path)
    place = table.schema.get_field_index(column)
    noted = {b"ray_ulysses.content_crc32": f"{corpus.info.lengths_crc32:08x}".encode()}
    pq.write_table(
        table.set_column(place, column, pa.array(["x"] * 30).cast(pa.large_binary())).replace_schema_metadata(noted),
        path,
    )
    info = replace(corpus.info, documents_bytes=path.stat().st_size)
    (corpus.path / "corpus.json").write_text(json.dumps(info.to_json()))
    with pytest.raises(UserError, match=r"documents\.parquet can't be used \(its columns do not match"):
        Corpus.open(corpus.path)
