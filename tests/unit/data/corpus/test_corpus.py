from __future__ import annotations

import contextlib
import json
import random
import re
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_ulysses.data.corpus import row_groups
from ray_ulysses.data.corpus.corpus import Corpus, first_of_same_content, refuse_repeats, table_crc32
from ray_ulysses.data.corpus.flat_file import FlatFile, FlatWriter
from ray_ulysses.data.corpus.format import SPANS_SCHEMA
from ray_ulysses.data.corpus.row_groups import RowGroupWriter
from ray_ulysses.data.fingerprint import stable_hash
from ray_ulysses.data.plan.segment import PlanSettings
from ray_ulysses.data.prepare.preparation import PrepareRequest
from ray_ulysses.data.prepare.upload import CorpusUpload
from ray_ulysses.data.sources.rows import RowFields
from ray_ulysses.data.sources.units import SourceSpec
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.storage import place as place_module
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import open_folder
from ray_ulysses.storage.retry import StorageAwayError
from tests.local_preparation import prepare_local
from tests.s3_server import BUCKET, Fault, FaultyProxy, S3Server
from tests.stores import FaultyStore
from tests.unit.data.corpora import begin, check_content, text_corpus, varied_texts, write_texts
from tests.unit.data.plans import build_plan
from tests.unit.data.tokenize.test_supervision import reasons_of
from tests.unit.data.tokenize.test_tokenizers import fast_tokenizer
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
        (
            json.dumps({**fields, "format_version": 7}),
            "format version 7, but .* reads version 5",
        ),
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
    with pytest.raises(UserError, match=r"documents\.parquet .*replaced by another file"):
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


def request_of(folder: Path, *names: str, **changes: object) -> PrepareRequest:
    sources = SourceSpec(paths=tuple(str(folder / name) for name in names))
    return replace(PrepareRequest(sources=sources, out=folder / "-".join([*names, "corpus"])), **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two trees of texts of their own, a copy of some of the first, and rows that hold some of them."""
    texts = varied_texts(12)
    write_texts(tmp_path / "one", texts[:8])
    write_texts(tmp_path / "two", texts[8:])
    write_texts(tmp_path / "copied", [*texts[10:], *varied_texts(2, seed=5), texts[3]])
    rows = [{"text": text} for text in (*varied_texts(2, seed=9), texts[5])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_first_of_equal_documents_is_found_as_a_dictionary_finds_it() -> None:
    rng = random.Random(0)
    for _ in range(200):
        # Few values, so that halves agree where digests do not.
        sizes = [rng.randrange(6) for _ in range(rng.randrange(1, 5))]
        groups = [
            np.array([[rng.randrange(3), rng.randrange(3)] for _ in range(n)], np.uint64).reshape(-1, 2) for n in sizes
        ]
        seen: dict[tuple[int, int], int] = {}
        expected = []
        for number, (low, high) in enumerate(np.concatenate(groups).tolist()):
            expected.append(seen.get((low, high), -1))
            seen.setdefault((low, high), number)
        found = first_of_same_content(groups)
        assert [one.size for one in found] == sizes
        assert np.concatenate(found).tolist() == expected
    assert first_of_same_content([]) == []


@pytest.mark.parametrize("num_contents", [1_000, 100_000])
def test_repeats_are_found_in_about_as_much_memory_as_the_digests_take(num_contents: int) -> None:
    rng = np.random.default_rng(0)
    contents = rng.integers(2**64, size=(num_contents, 2), dtype=np.uint64)
    drawn = rng.integers(num_contents, size=200_000)
    groups = np.split(contents[drawn], [120_000])
    _, firsts, contents_of = np.unique(drawn, return_index=True, return_inverse=True)
    expected = firsts[contents_of]
    tracemalloc.start()
    found = np.concatenate(first_of_same_content(groups))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(found, np.where(expected == np.arange(drawn.size), -1, expected))
    # The result takes half as much as the digests.
    assert peak < 2 * sum(group.nbytes for group in groups)


def test_documents_of_two_corpora_are_refused_by_their_content(folder: Path) -> None:
    one, two = (prepare_local(request_of(folder, name)) for name in ("one", "two"))
    copied, rows = (prepare_local(request_of(folder, name)) for name in ("copied", "rows.jsonl"))
    refuse_repeats([one, two])
    refuse_repeats([one])
    with pytest.raises(
        UserError,
        match=r"^data\.sources: .*/copied-corpus repeats 1 .*copied/text-0004\.txt, .* `--without .*/one-corpus`",
    ):
        refuse_repeats([one, copied])
    with pytest.raises(UserError, match=r"rows\.jsonl-corpus repeats 1 .*rows\.jsonl at 3, also in .*one-corpus\)"):
        refuse_repeats([two, one, rows])
    # Corpora that the run already has are not checked again.
    refuse_repeats([one, copied], num_known=2)
    with pytest.raises(UserError, match=r"rows\.jsonl-corpus repeats 1"):
        refuse_repeats([one, copied, rows], num_known=2)
    # Validation corpora may share documents with each other, but not with the training corpora.
    refuse_repeats([two, one, rows], num_known=1, are_validation=True)
    with pytest.raises(UserError, match=r"^data\.validation: .*rows\.jsonl-corpus repeats 1 .*training corpora"):
        refuse_repeats([one, two, rows], num_known=1, are_validation=True)


@pytest.mark.parametrize("duplicates", ["quarantine", "keep"])
def test_a_corpus_is_prepared_without_what_others_hold(folder: Path, duplicates: str) -> None:
    one, two = (prepare_local(request_of(folder, name)) for name in ("one", "two"))
    (folder / "copied" / "text-0009.txt").write_text((folder / "copied" / "text-0002.txt").read_text())
    request = request_of(folder, "copied", without=(str(one.path), str(two.path)), duplicates=duplicates)
    corpus = prepare_local(request)
    refuse_repeats([one, two, corpus])
    assert corpus.num_documents == (2 if duplicates == "quarantine" else 3)
    same = [re.findall(r"/(\w+/text-\d+)", reason)[-1] for _, reason in reasons_of(corpus)]
    assert same[:3] == ["two/text-0002", "two/text-0003", "one/text-0003"]
    assert same[3:] == (["copied/text-0002"] if duplicates == "quarantine" else [])
    assert corpus.info.reasons == (("the same content as another", corpus.info.num_quarantined),)
    assert begin(request).is_complete
    with pytest.raises(UserError, match=r"contains a corpus made from other sources, options"):
        begin(replace(request, without=(str(one.path),)))


def test_corpora_that_leave_out_other_documents_of_equal_lengths_differ_and_do_not_share_a_plan(tmp_path: Path) -> None:
    rows = [f"{number:04d}" * 8 for number in range(40)]
    for name, kept in {"all": rows, "val1": rows[:10], "val2": rows[10:20], "none": ["another"]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))
    others = {name: prepare_local(request_of(tmp_path, f"{name}.jsonl")) for name in ("val1", "val2", "none")}
    corpora = {
        name: prepare_local(
            replace(request_of(tmp_path, "all.jsonl", without=(str(other.path),)), out=tmp_path / f"but-{name}")
        )
        for name, other in others.items()
    }
    assert [corpus.num_documents for corpus in corpora.values()] == [30, 30, 40]
    assert len({corpus.fingerprint for corpus in corpora.values()}) == 3
    settings = PlanSettings(seed=1, context_tokens=64, pad_multiple=8, rows_per_step=2)
    plan = build_plan(corpora["val1"].lengths, corpora["val1"].fingerprint, settings)
    with pytest.raises(UserError, match=r"the corpus has been replaced since the plan was made"):
        plan.check_corpus(corpora["val2"].fingerprint)


def test_a_corpus_to_leave_out_that_cannot_be_used_is_refused_before_any_work(folder: Path) -> None:
    with pytest.raises(UserError, match=r"^--without=.*nowhere: does not exist; create it with `ray-ulysses prepare`"):
        begin(request_of(folder, "one", without=(str(folder / "nowhere"),)))
    tokenizer = str(fast_tokenizer(folder / "tokenizer"))
    other = prepare_local(request_of(folder, "two", tokenizer=tokenizer))
    with pytest.raises(
        UserError, match=r"^--without=.*two-corpus: was prepared with the tokenizer .* instead of bytes;"
    ):
        begin(request_of(folder, "one", without=(str(other.path),)))
    assert not (folder / "one-corpus").exists()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_ULYSSES_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def local(tmp_path: Path) -> Corpus:
    texts = [text * random.Random(text).randrange(1, 200) for text in varied_texts(60)]
    return text_corpus(tmp_path, texts, unit_bytes=200_000)


def copy(corpus: Corpus, uri: str) -> list[str]:
    said: list[str] = []
    folder = open_folder(uri)
    assert isinstance(folder, ObjectStore)
    CorpusUpload(folder, str(folder), corpus.info.signature).run(corpus.path, said.append)
    return said


@pytest.fixture
def uri(local: Corpus, s3: S3Server, prefix: str) -> str:
    copy(local, s3.uri(prefix))
    return s3.uri(prefix)


def ranges(corpus: Corpus, count: int) -> Iterator[tuple[int, int, int]]:
    rng = random.Random(7)
    for _ in range(count):
        document = rng.randrange(corpus.num_documents)
        length = int(corpus.lengths[document])
        start = rng.randrange(length)
        yield document, start, rng.randrange(length - start + 1)


def test_it_is_the_same_corpus(local: Corpus, uri: str) -> None:
    remote = Corpus.open(uri)
    assert remote.info == local.info and np.array_equal(remote.lengths, local.lengths)
    assert np.array_equal(remote.digests(), local.digests()) and remote.source(3) == local.source(3)
    remote.check_files()
    check_content(remote)
    for document, start, length in ranges(local, 200):
        assert np.array_equal(remote.read(document, start, length), local.read(document, start, length))


def test_what_was_read_comes_from_the_disk_the_next_time(
    local: Corpus, s3: S3Server, prefix: str, proxy: FaultyProxy, uri: str
) -> None:
    where = s3.uri(prefix, proxy.port)
    wanted = [*ranges(local, 50)]

    def requests(corpus: Corpus) -> int:
        before = proxy.count("GET", ".tokens")
        for one in wanted:
            corpus.read(*one)
        return proxy.count("GET", ".tokens") - before

    assert requests(Corpus.open(where)) > 0
    assert requests(Corpus.open(where)) == 0, "another process of the node"


def test_the_ranges_of_a_row_are_fetched_by_few_requests(
    local: Corpus, s3: S3Server, prefix: str, proxy: FaultyProxy, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ULYSSES_CACHE_GIB", "0")
    corpus = Corpus.open(s3.uri(prefix, proxy.port))
    wanted = [*ranges(local, 50)]
    before = proxy.count("GET", ".tokens")
    corpus.fetch(wanted)
    # The checksums and the tokens of each shard.
    assert proxy.count("GET", ".tokens") - before <= 3 * len(local.info.shards)
    fetched = proxy.count("GET", "")
    for one in wanted:
        assert np.array_equal(corpus.read(*one), local.read(*one))
    assert proxy.count("GET", "") == fetched, "a range that was fetched is here"


def test_a_storage_that_stumbles_is_asked_again_and_one_that_stays_away_is_named(
    local: Corpus, s3: S3Server, prefix: str, proxy: FaultyProxy, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_module, "_FOLDER_RETRY_S", 0.1)
    monkeypatch.setenv("RAY_ULYSSES_CACHE_GIB", "0")
    corpus = Corpus.open(s3.uri(prefix, proxy.port), retry=policy_of(SleepingClock()))
    faults: tuple[Fault, ...] = ("503", "drop", "cut-body")
    for fault in faults:
        proxy.fail(fault, lambda method, path: method == "GET")
        for one in ranges(local, 20):
            assert np.array_equal(corpus.read(*one), local.read(*one))
    proxy.fail("503", times=10_000)
    with pytest.raises(StorageAwayError, match=rf"s3://bucket/{prefix}/documents.index: the storage did not respond"):
        corpus.read(0, 0, 1)
    with pytest.raises(StorageAwayError, match=rf"s3://bucket/{prefix}: the storage did not respond"):
        Corpus.open(s3.uri(prefix, proxy.port), retry=policy_of(SleepingClock()))


def test_a_damaged_or_missing_object_is_named(local: Corpus, s3: S3Server, prefix: str, uri: str) -> None:
    key = f"{prefix}/shards/{local.info.shards[0].name}"
    content = bytearray((local.path / "shards" / local.info.shards[0].name).read_bytes())
    content[5000] ^= 1
    s3.client().put_object(Bucket=BUCKET, Key=key, Body=bytes(content))
    with pytest.raises(UserError, match=rf"the shard s3://bucket/{key} can't be read \(the block of 4096 bytes at"):
        check_content(Corpus.open(uri))
    s3.client().delete_object(Bucket=BUCKET, Key=key)
    with pytest.raises(UserError, match=rf"the shard s3://bucket/{key} can't be read"):
        Corpus.open(uri).check_files()
    s3.client().delete_object(Bucket=BUCKET, Key=f"{prefix}/corpus.json")
    with pytest.raises(UserError, match=rf"data.path=s3://bucket/{prefix}: is not a prepared corpus"):
        Corpus.open(uri)


@pytest.mark.parametrize("gib", ["0", "1"], ids=["without a cache", "with a cache"])
def test_a_shard_that_is_replaced_after_it_was_read_never_gives_wrong_tokens(
    local: Corpus, s3: S3Server, prefix: str, uri: str, gib: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ULYSSES_CACHE_GIB", gib)
    corpus, wanted = Corpus.open(uri), [(document, 0, int(length)) for document, length in enumerate(local.lengths)]
    for one in wanted:
        assert np.array_equal(corpus.read(*one), local.read(*one))
    for shard in local.info.shards:
        path, other = local.path / "shards" / shard.name, local.path / "other"
        values = np.memmap(path, local.info.dtype, "r", shape=shard.num_tokens)
        writer = FlatWriter(other, values.dtype)
        writer.add(values[::-1])
        writer.close()
        s3.client().put_object(Bucket=BUCKET, Key=f"{prefix}/shards/{shard.name}", Body=other.read_bytes())
    for one in wanted:
        if gib == "0":
            with pytest.raises(UserError, match=r"\.tokens can't be read"):
                corpus.read(*one)
        else:
            assert np.array_equal(corpus.read(*one), local.read(*one)), "the node's cache has what was read"


def test_a_copy_that_is_killed_is_no_corpus_and_goes_on(local: Corpus, s3: S3Server, prefix: str) -> None:
    folder = open_folder(s3.uri(prefix))
    assert isinstance(folder, ObjectStore)
    num_failed = 0
    while True:
        broken = FaultyStore(folder, fail_at=num_failed + 1, kinds=("create", "replace"))
        upload = CorpusUpload(broken, str(folder), local.info.signature)
        with contextlib.suppress(RunError):
            upload.run(local.path, lambda said: None)
        if not broken.has_failed:
            break
        num_failed += 1
        with pytest.raises(UserError, match=r"does not exist|is not a prepared corpus|the preparation is not finished"):
            Corpus.open(s3.uri(prefix))
    assert num_failed >= 3
    assert copy(local, s3.uri(prefix)) == [], "it is there"
    check_content(Corpus.open(s3.uri(prefix)))


def test_another_corpus_or_a_part_of_one_is_not_written_over(
    local: Corpus, s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    other = text_corpus(tmp_path / "other", varied_texts(5, seed=9))
    folder = open_folder(s3.uri(prefix))
    assert isinstance(folder, ObjectStore)
    broken = FaultyStore(folder, fail_at=3, kinds=("create", "replace"))
    with pytest.raises(RunError, match="then run the same command again to continue"):
        CorpusUpload(broken, str(folder), local.info.signature).run(local.path, lambda said: None)
    for _ in range(2):
        with pytest.raises(UserError, match=f"--out=s3://bucket/{prefix}: contains a complete or partial corpus made "):
            copy(other, s3.uri(prefix))
        copy(local, s3.uri(prefix))
    check_content(Corpus.open(s3.uri(prefix)))


def test_blocks_that_the_cache_lost_in_a_power_failure_are_fetched_again(local: Corpus, uri: str, cache: Path) -> None:
    wanted = [*ranges(local, 50)]
    for one in wanted:
        Corpus.open(uri).read(*one)
    segments = list(cache.rglob("*.blocks"))
    assert segments
    for segment in segments:
        content = bytearray(segment.read_bytes())
        content[: 1 << 20] = bytes(1 << 20)
        segment.write_bytes(content)
    corpus = Corpus.open(uri)
    assert all(np.array_equal(corpus.read(*one), local.read(*one)) for one in wanted)
