"""A corpus in an object store: range reads, the node's cache, and storage faults."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.corpus.flat_file import FlatWriter
from ray_ulysses.data.prepare.upload import CorpusUpload
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.storage import place as place_module
from ray_ulysses.storage.object_store import ObjectStore
from ray_ulysses.storage.place import open_folder
from ray_ulysses.storage.retry import StorageAwayError
from tests.s3_server import BUCKET, Fault, FaultyProxy, S3Server
from tests.stores import FaultyStore
from tests.unit.data.corpora import check_content, text_corpus, varied_texts
from tests.unit.storage.test_retry import SleepingClock, policy_of


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
    with pytest.raises(RunError, match="run the same command again, which continues"):
        CorpusUpload(broken, str(folder), local.info.signature).run(local.path, lambda said: None)
    for _ in range(2):
        with pytest.raises(UserError, match=f"--out=s3://bucket/{prefix}: contains a corpus made from other sources"):
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
