from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ulysses.data.corpus import row_groups
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.format import CHUNK_TOKENS, token_dtype
from ray_ulysses.data.corpus.shard import ShardReader, ShardWriter
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.errors import UserError
from ray_ulysses.storage.patience import StorageAwayError
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.storage.test_patience import SleepingClock, patience_of


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return text_corpus(tmp_path, varied_texts(30), unit_bytes=2000)


def test_any_stretch_of_any_document_is_read_across_chunks_and_row_groups(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = [1, 7, 8, 9, 40, 3, 16, 17, 100, 5]
    documents = [rng.integers(0, 60_000, length) for length in lengths]
    writer = ShardWriter(tmp_path / "s.parquet", np.dtype(np.uint16), chunk_tokens=8)
    first_rows = [writer.add(document) for document in documents]
    writer.close()
    info = writer.info(tmp_path / "s.parquet")
    reader = ShardReader(tmp_path, np.dtype(np.uint16), max_open=1, chunk_tokens=8)
    for document, first_row in zip(documents, first_rows, strict=True):
        for start in range(document.size + 1):
            for length in {0, 1, document.size - start, (document.size - start) // 2}:
                if 0 <= length <= document.size - start:
                    found = reader.read(info, first_row, start, length)
                    assert found.tolist() == document[start : start + length].tolist()
    metadata = pq.read_metadata(tmp_path / "s.parquet")
    assert metadata.num_row_groups > 10


def test_row_groups_hold_about_64k_tokens(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "s.parquet", np.dtype(np.uint16))
    for length in (200_000, 30_000, 30_000, 30_000, 5):
        writer.add(np.arange(length) % 60_000)
    writer.close()
    shard = pq.ParquetFile(tmp_path / "s.parquet")
    sizes = [
        sum(len(tokens) for tokens in shard.read_row_group(group).column("tokens"))
        for group in range(shard.metadata.num_row_groups)
    ]
    assert sizes == [CHUNK_TOKENS, CHUNK_TOKENS, CHUNK_TOKENS, 200_000 - 3 * CHUNK_TOKENS + 2 * 30_000, 30_005]


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_the_smallest_type_that_holds_the_vocabulary_is_used(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size).name == name


def test_a_corpus_opens_with_what_the_plan_needs(corpus: Corpus) -> None:
    again = Corpus.open(str(corpus.path))
    assert again.lengths.dtype == np.uint32 and not again.lengths.flags.writeable
    assert again.fingerprint == corpus.fingerprint
    assert again.tokenizer.vocab_size == 257
    again.check_files(checksums=True)


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
    with pytest.raises(UserError, match=r"the corpus has format 7, this version reads 3"):
        Corpus.open(corpus.path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format_version": 3}'])
def test_a_broken_corpus_json_is_named(corpus: Corpus, text: str) -> None:
    (corpus.path / "corpus.json").write_text(text)
    with pytest.raises(UserError, match=r"corpus\.json can't be used"):
        Corpus.open(corpus.path)


def test_an_edited_corpus_json_is_refused(corpus: Corpus) -> None:
    path = corpus.path / "corpus.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "max_token_id": fields["max_token_id"] - 1}))
    with pytest.raises(UserError, match=r"its fields were changed: they do not give its checksum"):
        Corpus.open(corpus.path)
    del fields["checksum"]
    edited = {**fields, "num_documents": fields["num_documents"] - 1}
    path.write_text(json.dumps({**edited, "checksum": stable_hash(edited)}))
    with pytest.raises(UserError, match=r"its fields do not give its fingerprint"):
        Corpus.open(corpus.path)


def test_an_empty_corpus_is_refused(corpus: Corpus) -> None:
    empty = replace(corpus.info, num_documents=0)
    (corpus.path / "corpus.json").write_text(json.dumps(empty.to_json()))
    with pytest.raises(UserError, match=r"the corpus is empty"):
        Corpus.open(corpus.path)


def test_a_missing_or_cut_sidecar_is_named(corpus: Corpus) -> None:
    path = corpus.path / "documents.parquet"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(UserError, match=r"documents\.parquet can't be used \(\d+ bytes where prepare wrote \d+\)"):
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
    with pytest.raises(UserError, match=r"shard-00001\.parquet can't be used \(\d+ bytes where prepare wrote"):
        corpus.check_files()
    document = corpus.info.shards[0].num_documents
    with pytest.raises(UserError, match=r"the shard .*shard-00001\.parquet can't be read .*; restore the file"):
        corpus.read(document, 0, 2)


def test_a_missing_shard_is_named(corpus: Corpus) -> None:
    (corpus.path / "shards" / "shard-00000.parquet").unlink()
    with pytest.raises(UserError, match=r"shard-00000\.parquet can't be used \(No such file or directory\)"):
        corpus.check_files()


def test_a_shard_with_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path, varied_texts(3, longest=3000))
    path = corpus.path / "shards" / "shard-00000.parquet"
    clean = path.read_bytes()
    expected = [corpus.read(document, 0, int(corpus.lengths[document])) for document in range(3)]
    noticed = 0
    for at in range(40, len(clean) // 2, 97):
        damaged = bytearray(clean)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"its checksum differs from the one prepare wrote"):
            corpus.check_files(checksums=True)
        fresh = Corpus.open(corpus.path)
        for document in range(3):
            try:
                found = fresh.read(document, 0, int(corpus.lengths[document]))
            except UserError as error:
                noticed += "shard-00000.parquet can't be read" in str(error)
            else:
                assert np.array_equal(found, expected[document]), f"byte {at}"
    assert noticed > 5


def test_a_shard_of_another_corpus_is_named(tmp_path: Path, corpus: Corpus) -> None:
    other = text_corpus(tmp_path / "other", varied_texts(31, seed=5), unit_bytes=2000)
    theirs = (other.path / "shards" / "shard-00000.parquet").read_bytes()
    (corpus.path / "shards" / "shard-00000.parquet").write_bytes(theirs)
    with pytest.raises(UserError, match=r"shard-00000\.parquet"):
        corpus.check_files(checksums=True)


def test_a_shard_replaced_by_a_sound_one_of_the_same_size_is_noticed(tmp_path: Path) -> None:
    texts = [f"{number}{number}" for number in range(10, 20)]
    corpus = text_corpus(tmp_path, texts)
    other = text_corpus(tmp_path / "other", [text[::-1] + text for text in texts])
    swapped = text_corpus(tmp_path / "swapped", texts[::-1])
    path = corpus.path / "shards" / "shard-00000.parquet"
    for replacement in (other, swapped):
        theirs = (replacement.path / "shards" / "shard-00000.parquet").read_bytes()
        size = len(theirs)
        path.write_bytes(theirs)
        shard = replace(corpus.info.shards[0], num_bytes=size)
        fields = replace(corpus.info, shards=(shard,)).to_json()
        (corpus.path / "corpus.json").write_text(json.dumps(fields))
        fresh = Corpus.open(corpus.path)
        for look in (fresh.check_files, lambda fresh=fresh: fresh.read(0, 0, 2)):
            with pytest.raises(
                UserError,
                match=r"shard-00000\.parquet can't be read \(it was replaced by another shard of the same size\)",
            ):
                look()


def test_a_shard_of_another_type_is_refused(corpus: Corpus) -> None:
    path = corpus.path / "shards" / "shard-00000.parquet"
    table = pq.read_table(path)
    tokens = table.column("tokens").cast(pa.list_(pa.int32()))
    pq.write_table(table.set_column(1, "tokens", tokens), path)
    with pytest.raises(UserError, match=r"it holds list<element: int32> where corpus.json says tokens of uint16"):
        Corpus.open(corpus.path).read(0, 0, 2)


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

    monkeypatch.setattr(pq, "read_table", forbidden)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", forbidden)
    again = Corpus.open(corpus.path)
    assert (again.num_documents, again.num_tokens) == (corpus.num_documents, corpus.num_tokens)


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
        UserError, match=r"documents\.parquet can't be used \(its lengths do not add up to corpus\.json\)"
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
    with pytest.raises(
        UserError, match=r"documents\.parquet can't be used \(29 documents where corpus\.json says 30\)"
    ):
        Corpus.open(corpus.path)


def test_a_storage_that_comes_back_is_waited_for_and_the_shard_opened_anew(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SleepingClock()
    patient = Corpus.open(corpus.path, patience=patience_of(clock))
    expected = corpus.read(3, 0, 5).tolist()
    read = pq.ParquetFile.read_row_groups
    opened: list[pq.ParquetFile] = []

    def away(self: pq.ParquetFile, *args: object, **options: object) -> pa.Table:
        opened.append(self)
        if len(opened) <= 3:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(self, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", away)
    assert patient.read(3, 0, 5).tolist() == expected
    assert len({id(file) for file in opened}) == len(opened) == 4
    assert clock.pauses == [0.1, 0.2, 0.4]


def test_a_storage_that_stays_away_ends_the_read(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SleepingClock()
    patient = Corpus.open(corpus.path, patience=patience_of(clock))

    def away(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", away)
    with pytest.raises(
        StorageAwayError, match=r"documents\.parquet: the storage did not answer for 60 s \(14 tries, the last"
    ):
        patient.read(3, 0, 5)
    monkeypatch.undo()
    assert patient.read(3, 0, 5).size == 5
